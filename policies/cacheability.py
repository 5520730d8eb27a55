"""May this request be answered from the cache, and may this answer enter it? Every "no" has a reason."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from backends.protocol import Answer, View

Sampling = Literal["reuse", "exact-only", "never"]


@dataclass(frozen=True, slots=True)
class CacheRules:
    """What a tenant's cache section says. Seconds; `threshold` is a cosine."""

    exact: bool = True
    semantic: bool = True
    threshold: float = 0.90
    ttl: float = 86400.0
    sampling: Sampling = "reuse"


@dataclass(frozen=True, slots=True)
class Controls:
    """What one request asks of the cache. It can only tighten: less reading, less writing, fresher, more similar."""

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age: float | None = None
    ttl: float | None = None
    threshold: float | None = None
    namespace: str = ""


class MalformedControl(ValueError):
    """A control header that cannot be understood; the text names it."""


def parse_controls(headers: Mapping[str, str]) -> Controls:
    """`Cache-Control` (RFC 9111 section 5.2.1) and the `x-hitherto-*` request headers, by lower-case name."""
    directives: dict[str, str] = {}
    if "cache-control" in headers:
        for item in headers["cache-control"].lower().split(","):
            name, _, value = item.strip().partition("=")
            directives[name] = value.strip('"')
    max_age = None
    if "max-age" in directives:
        if not re.fullmatch("[0-9]{1,12}", directives["max-age"]):
            raise MalformedControl(f"cache-control: max-age needs whole seconds, not {directives['max-age']!r}")
        max_age = float(directives["max-age"])
    return Controls(
        no_cache="no-cache" in directives,
        no_store="no-store" in directives,
        only_if_cached="only-if-cached" in directives,
        max_age=max_age,
        ttl=_number(headers, "x-hitherto-ttl", 0, float("inf"), "s"),
        threshold=_number(headers, "x-hitherto-threshold", 0, 1),
        namespace=headers.get("x-hitherto-namespace", ""),
    )


def _number(headers: Mapping[str, str], name: str, low: float, high: float, unit: str = "") -> float | None:
    if name not in headers:
        return None
    text = headers[name].strip()
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]+)?" + (f"{unit}?" if unit else ""), text):
        raise MalformedControl(f"{name} needs a number, not {text!r}")
    value = float(text.removesuffix(unit) if unit else text)
    if not low <= value <= high:
        raise MalformedControl(f"{name} must be between {low:g} and {high:g}, not {text}")
    return value


@dataclass(frozen=True, slots=True)
class Readable:
    """What may be looked up; `reason` says why not more."""

    exact: bool
    semantic: bool
    reason: str = ""


# Questions about the moment have a new answer every time, so their wording must not be generalised. They may still
# be exact hits within the TTL.
_VOLATILE = re.compile(
    r"\b(today|tonight|tomorrow|yesterday|now|currently|current|latest|newest|recent(ly)?"
    r"|this (week|month|year|morning)|what time|weather|forecast|stock price|exchange rate|score)\b",
    re.IGNORECASE,
)


def may_read(view: View, rules: CacheRules, controls: Controls) -> Readable:
    """Which tiers may answer this request."""
    if not rules.exact:
        return Readable(False, False, "disabled")
    if controls.no_cache:
        return Readable(False, False, "no-cache")
    sampled = view.temperature is None or view.temperature > 0
    if sampled and rules.sampling == "never":
        return Readable(False, False, "sampling")
    if reason := _not_semantic(view, rules, sampled):
        return Readable(True, False, reason)
    return Readable(True, True)


def _not_semantic(view: View, rules: CacheRules, sampled: bool) -> str:
    if not rules.semantic:
        return "semantic-disabled"
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
    if _VOLATILE.search(view.question):
        return "volatile"
    return ""


def may_write(view: View, rules: CacheRules, controls: Controls, status: int, answer: Answer) -> str:
    """Empty if the answer may be stored, else the reason why not."""
    if not rules.exact:
        return "disabled"
    if controls.no_store:
        return "no-store"
    if (view.temperature is None or view.temperature > 0) and rules.sampling == "never":
        return "sampling"
    if not 200 <= status < 300:
        return f"status-{status}"
    if controls.ttl == 0:
        return "ttl-0"
    if len(answer.finish_reasons) != view.choices and not answer.flaw:
        return "choices-missing"
    return answer.flaw


def fresh_for(rules: CacheRules, controls: Controls) -> float:
    """Seconds that a new entry lives: the rule's, or less where the request says so."""
    return rules.ttl if controls.ttl is None else min(rules.ttl, controls.ttl)
