"""Where a request may run, in which order. Names first, then patterns; then who can do it; then who should."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from policies.hedging import HedgeConfig
from policies.retry import RetryConfig

LEAST = 4
"""Nobody with fewer requests under way carries too much."""
Capability = Literal["tools", "images", "audio", "files", "json-schema", "logprobs", "several-choices"]
Choice = Literal["sticky", "weighted", "fastest"]


@dataclass(frozen=True, slots=True)
class Target:
    """One place to try: a backend, and the model name to ask it for (None: the name the client used)."""

    backend: str
    model: str | None = None
    weight: float | None = None
    """Targets with weights are equals that share the load; those without are fallbacks, in order."""
    context: int | None = None
    """The most tokens of prompt and answer together."""
    lacks: frozenset[Capability] = frozenset()


@dataclass(frozen=True, slots=True)
class Route:
    """Where a model may run, and how hard it is tried."""

    targets: tuple[Target, ...]
    choose: Choice = "sticky"
    retry: RetryConfig = field(default_factory=RetryConfig)
    hedge: HedgeConfig | None = None
    first_byte: float | None = None
    total: float | None = None
    is_choosy: bool = field(init=False)
    """Whether there are requests that not all targets can answer."""
    equals: Sequence[Target] = field(init=False)
    """Of all targets."""

    def __post_init__(self) -> None:
        choosy = any(target.lacks or target.context is not None for target in self.targets)
        object.__setattr__(self, "is_choosy", choosy)
        object.__setattr__(self, "equals", equals(self.targets))


def equals(targets: Sequence[Target]) -> Sequence[Target]:
    """Those that may be asked first: any of them gives *the* answer."""
    return (
        [target for target in targets if target.weight] or [one for one in targets if one.weight is None][:1] or targets
    )


def match(name: str, table: Iterable[str]) -> str | None:
    """The entry for a name: an exact name wins over a pattern, and of several patterns (`gpt-*`) the one with the
    longest literal start."""
    if name in table:
        return name
    patterns = [pattern for pattern in table if "*" in pattern and fnmatchcase(name, pattern)]
    return max(patterns, key=lambda pattern: (len(pattern.partition("*")[0]), len(pattern)), default=None)


def allows(patterns: Iterable[str], name: str) -> bool:
    """Whether a list of names and patterns has a name."""
    return any(pattern == name or ("*" in pattern and fnmatchcase(name, pattern)) for pattern in patterns)


def needs(fields: Mapping[str, Any]) -> frozenset[Capability]:
    """What a target must be able to do to answer a request with these fields, of chat completions or messages."""
    found = set[Capability]()
    if fields.get("tools") or fields.get("functions"):
        found.add("tools")
    form = fields.get("response_format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        found.add("json-schema")
    if fields.get("logprobs") is True:
        found.add("logprobs")
    if fields.get("n") not in (None, 1):
        found.add("several-choices")
    modalities = fields.get("modalities")
    if isinstance(modalities, list) and "audio" in modalities:
        found.add("audio")
    messages = fields.get("messages")
    for message in messages if isinstance(messages, list) else ():
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else ():
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind in _PARTS:
                found.add(_PARTS[kind])
    return frozenset(found)


_PARTS: Mapping[str, Capability] = {
    "image_url": "images",
    "image": "images",
    "input_audio": "audio",
    "file": "files",
    "document": "files",
}


def able(targets: Sequence[Target], wanted: frozenset[Capability], tokens: int) -> tuple[list[Target], str]:
    """The targets that can answer a request of about so many tokens, and why there are none.

    The number is an estimate: where it is too large for all, the roomiest may say for itself.
    """
    capable = [target for target in targets if not wanted & target.lacks]
    roomy = [target for target in capable if target.context is None or tokens <= target.context]
    if capable:
        return roomy or [max(capable, key=lambda target: target.context or 0)], ""
    why = (f"{target.backend} has no {', '.join(sorted(wanted & target.lacks))}" for target in targets)
    return [], "; ".join(why)


def in_order(
    targets: Sequence[Target], choose: Choice, conversation: bytes, draw: random.Random, pace: Mapping[str, float]
) -> list[Target]:
    """The equals in the order of choice, then the fallbacks. `pace`: expected seconds to the first byte by backend,
    load included; who is not in there was not measured yet, and comes first."""
    first = [target for target in targets if target.weight]
    drained = [target for target in targets if target.weight == 0]
    rest = [target for target in targets if target.weight is None]
    if len(first) > 1:
        if choose == "fastest":
            # Of two at random the faster one: the best one by a stale measure would get everything at once
            # (M. Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing", 2001).
            pair = sorted(draw.sample(first, 2), key=lambda target: pace.get(target.backend, 0.0))
            first = [*pair, *(target for target in first if target not in pair)]
        elif choose == "weighted":
            first.sort(key=lambda target: -math.log(1.0 - draw.random()) / (target.weight or 1.0))
        else:
            first.sort(key=lambda target: _distance(conversation, target))
    return [*first, *rest, *drained]


def _distance(conversation: bytes, target: Target) -> float:
    return score(conversation, f"{target.backend}\0{target.model or ''}") / (target.weight or 1.0)


def score(key: bytes, place: str) -> float:
    """Weighted rendezvous hashing: the place with the least score (divided by its weight) is the key's home, and only
    the keys of a place that goes away move (D. Thaler and C. Ravishankar, 1998; weights after Schindelhauer, 2005)."""
    digest = hashlib.blake2b(place.encode(), digest_size=8, key=key[:64]).digest()
    return -math.log((int.from_bytes(digest) + 1) / 2.0**64)


def ranked(key: bytes, places: Sequence[str], load: Mapping[str, int], slack: float) -> list[str]:
    """The places of a key, its home first, load permitting."""
    return within_load(sorted(places, key=lambda place: score(key, place)), load, slack)


def within_load(order: Sequence[str], load: Mapping[str, int], slack: float) -> list[str]:
    """Places in the order of preference, but those that carry more than `slack` times their share of the load last
    (V. Mirrokni, M. Thorup, M. Zadimoghaddam, "Consistent Hashing with Bounded Loads", 2018)."""
    if not order:
        return []
    bound = max(LEAST, math.ceil(slack * (sum(load.get(place, 0) for place in order) + 1) / len(order)))
    free = [place for place in order if load.get(place, 0) < bound]
    return [*free, *(place for place in order if place not in free)]
