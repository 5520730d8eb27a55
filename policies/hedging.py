"""A second try beside the first, when that is slower than nearly all others: J. Dean and L. A. Barroso, "The Tail at
Scale", CACM 56 (2013)."""

from __future__ import annotations

from collections import deque
from typing import Literal

from pydantic import Field

from backends.protocol import Duration, Section

SAMPLE, ENOUGH = 200, 20


class HedgeConfig(Section):
    """`hedge:` of a model."""

    after: Literal["p95"] | Duration = "p95"
    """How long the first try is waited for alone: the 95th percentile of the last 200 first bytes, or a duration."""
    extra: float = Field(default=0.05, gt=0, le=1)
    """The share of requests that may be sent twice."""


class Percentile:
    """The 95th percentile of what was seen last."""

    def __init__(self) -> None:
        self._seen: deque[float] = deque(maxlen=SAMPLE)
        self._value: float | None = None
        self._news = 0

    def add(self, seconds: float) -> None:
        self._seen.append(seconds)
        self._news += 1
        if len(self._seen) >= ENOUGH and (self._news >= 10 or self._value is None):
            self._value, self._news = sorted(self._seen)[int(len(self._seen) * 0.95)], 0

    @property
    def p95(self) -> float | None:
        """None before there is enough to say."""
        return self._value
