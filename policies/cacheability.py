"""May this request be answered from the cache, and may this answer enter it? Every "no" has a reason."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from backends.protocol import Answer, View
from policies.controls import Controls
from policies.volatility import DEFAULTS, lifetime

Sampling = Literal["reuse", "exact-only", "never"]


@dataclass(frozen=True, slots=True)
class Judge:
    """A model that judges, and how often a day it may be asked; `hits`: it has the last word on semantic hits, too."""

    model: str
    hits: bool = False
    per_day: int = 1000


@dataclass(frozen=True, slots=True)
class CacheRules:
    """What a tenant's cache section says. Seconds; `threshold` is a cosine."""

    exact: bool = True
    semantic: bool = True
    threshold: float | None = None
    """None: what suits the encoder."""
    ttl: float = 86400.0
    sampling: Sampling = "reuse"
    buckets: int = 1
    """How many different answers a request that wants variety may get, in turn."""
    stale_if_error: float = 0.0
    """How long after its time an answer still serves when no backend does."""
    stale_while_revalidate: float = 0.0
    """How long after its time an answer still serves while a fresh one is computed."""
    volatile: Mapping[str, float] = field(default_factory=lambda: DEFAULTS)
    grey: float = 0.10
    """How far below the threshold a neighbour may be whose answer, if it is the same, makes an alias; 0: none."""
    share_near: bool = False
    """Whether a question may share the answer that a nearly identical one is getting just now."""
    per_user: bool = False
    """Whether answers are kept apart by end user."""
    max_wrong_rate: float = 0.03
    """The share of semantic hits that may be wrong."""
    shadow: bool = False
    """Whether semantic hits are only counted, not served."""
    audit: float = 0.02
    """The share of semantic hits that are computed as well."""
    judge: Judge | None = None
    """A model that is asked where rules cannot tell whether two answers are the same."""
    drops_history: bool = False
    """Whether a last turn that stands alone is matched without the turns before it."""

    @property
    def stale(self) -> float:
        return max(self.stale_if_error, self.stale_while_revalidate)


@dataclass(frozen=True, slots=True)
class Readable:
    """What may be looked up; `reason` says why not more."""

    exact: bool
    semantic: bool
    reason: str = ""


def may_read(view: View, rules: CacheRules, controls: Controls) -> Readable:
    """Which tiers may answer this request."""
    if not rules.exact:
        return Readable(False, False, "disabled")
    if controls.no_cache:
        return Readable(False, False, "no-cache")
    sampled = view.temperature is None or view.temperature > 0
    if sampled and rules.sampling == "never":
        return Readable(False, False, "sampling")
    if reason := _not_semantic(view, rules, controls, sampled):
        return Readable(True, False, reason)
    return Readable(True, True)


def _not_semantic(view: View, rules: CacheRules, controls: Controls, sampled: bool) -> str:
    if not rules.semantic:
        return "semantic-disabled"
    if controls.exact_only:
        return "exact-only"
    if sampled and rules.buckets > 1:
        return "buckets"
    if sampled and rules.sampling == "exact-only":
        return "sampling"
    if view.question is None:
        return view.no_question
    if not view.question.strip():
        return "no-text"
    if view.choices != 1:
        return "several-choices"
    if view.wants_logprobs:
        return "logprobs"
    if lifetime(view.question, rules.volatile)[0] <= 0:
        return "volatile"  # a question about this moment: its wording must not be generalised
    return ""


def may_write(view: View, rules: CacheRules, controls: Controls, status: int, answer: Answer) -> str:
    """Empty if the answer may be stored, else the reason why not."""
    if not rules.exact:
        return "disabled"
    if controls.no_store:
        return "no-store"
    if (view.temperature is None or view.temperature > 0) and rules.sampling == "never":
        return "sampling"
    if status != 200:  # of the other successes none is an answer: accepted, no content, a part of it …
        return f"status-{status}"
    if controls.ttl == 0:
        return "ttl-0"
    if lifetime(view.question, rules.volatile)[0] <= 0:
        return "volatile"
    if len(answer.finish_reasons) != view.choices and not answer.flaw:
        return "choices-missing"
    return answer.flaw


def fresh_for(view: View, rules: CacheRules, controls: Controls) -> float:
    """Seconds that a new entry lives: the rule's, or less where the request or its words say so."""
    limit = min(rules.ttl, lifetime(view.question, rules.volatile)[0])
    return limit if controls.ttl is None else min(limit, controls.ttl)


def wants_variety(view: View, rules: CacheRules) -> bool:
    """Whether a request is answered from several entries in turn: sampled, and the rules allow more than one."""
    return rules.buckets > 1 and (view.temperature is None or view.temperature > 0)
