"""How soon an answer is out of date, judged by the words of its question."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType

_CLASSES: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (name, re.compile("|".join(patterns), re.IGNORECASE))
    for name, patterns in (
        (
            "now",
            [
                r"\bright now\b",
                r"\bwhat time is it\b",
                r"\bcurrent (?:local )?time\b",
                r"\btime now\b",
                r"\bwhat (?:day|date) is (?:it|today)\b",
                r"\b(?:today|tomorrow|yesterday)['’]?s date\b",
                r"\bdate today\b",
                r"\bat this (?:very )?moment\b",
                r"\bjust now\b",
            ],
        ),
        (
            "prices",
            [
                r"\b(?:stock|share|bitcoin|btc|crypto|ethereum|gold|silver|market) prices?\b",
                r"\b(?:oil|fuel|petrol|gas|gasoline|electricity) prices?\b",
                r"\bprice of (?:bitcoin|btc|ether(?:eum)?|gold|silver|oil|petrol|gas(?:oline)?)\b",
                r"\b(?:exchange|interest) rates?\b",
                r"\btrading at\b",
                r"\bmarket cap\b",
            ],
        ),
        (
            "scores",
            [
                r"\b(?:live|latest|current|final) (?:score|result)s?\b",
                r"\bthe score\b",
                r"\bwho(?: is|['’]s) winning\b",
                r"\bstandings\b",
            ],
        ),
        (
            "weather",
            [
                r"\bweather\b",
                r"\bforecast\b",
                r"\btemperature outside\b",
                r"\b(?:is|will) it (?:rain|snow)(?:ing)?\b",
            ],
        ),
        (
            "today",
            [
                r"\b(?:today|tonight|tomorrow|yesterday|nowadays|news|now)\b",
                r"\bthis (?:week|month|year|morning|evening|season)\b",
                r"\bnext (?:week|month|year)\b",
                r"\bat the moment\b",
                r"\bso far\b",
            ],
        ),
        (
            "recent",
            [
                r"\b(?:latest|newest|recent(?:ly)?|currently|current|upcoming|up[- ]to[- ]date)\b",
            ],
        ),
    )
)
ENDS = 500
"""Characters at both ends of a long question that are looked at."""
DEFAULTS: Mapping[str, float] = MappingProxyType(
    {"now": 0.0, "prices": 60.0, "scores": 60.0, "weather": 600.0, "today": 600.0, "recent": 3600.0}
)
"""Seconds that an answer may be reused for, by class; 0: not at all."""


def classify(question: str) -> tuple[str, ...]:
    """The classes whose words a question uses, the most volatile one first."""
    # Of a long prompt its beginning and its end tell what is asked; neither time nor memory goes into the rest.
    return _classify(question if len(question) <= 2 * ENDS else f"{question[:ENDS]} … {question[-ENDS:]}")


@lru_cache(maxsize=1024)  # asked several times on a question's way
def _classify(question: str) -> tuple[str, ...]:
    return tuple(name for name, pattern in _CLASSES if pattern.search(question))


def lifetime(question: str | None, limits: Mapping[str, float]) -> tuple[float, str]:
    """Seconds that an answer to this question may live at most, and the class that says so (empty: no limit)."""
    found = [(limits[name], name) for name in classify(question or "") if name in limits]
    return min(found, default=(float("inf"), ""))
