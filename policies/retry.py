"""Whether, when and where a request that failed is tried once more.

Only before the first byte has gone to the client. What is wrong with the request itself is never tried again; the same
backend only within a retry budget, so that retries cannot multiply the load on something that is overloaded
("Addressing Cascading Failures" in Google's SRE book); other candidates at once, and further rounds after a pause with
full jitter (M. Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Literal

from pydantic import Field

from backends.protocol import Duration, Section

Kind = Literal["unreachable", "timeout", "limited", "refused", "broken", "too-long", "final", ""]
"""What became of a try. "": it was answered; "final": it failed, and would anywhere else."""

TRANSIENT = frozenset({408, 429, 500, 502, 503, 504, 520, 521, 522, 523, 524, 529})
"""Statuses that another try may not meet again."""
_BROKEN = TRANSIENT - {408, 429}
RANK: Mapping[str, int] = {"refused": 0, "too-long": 1, "unreachable": 2, "timeout": 3, "broken": 4, "limited": 5}
"""Of several failures of a request the one that tells its client most of when to come back."""
BASE, CAP = 0.25, 8.0
"""Of the pauses between rounds, in seconds."""
SHARE, SPARE = 0.2, 10.0
"""Retries may be a fifth of what was sent, and ten more."""


class RetryConfig(Section):
    """`retry:` of a model."""

    attempts: int = Field(default=2, ge=1, le=10)
    """Rounds over the candidates."""
    within: Duration = Field(default=30.0, gt=0)
    """No round begins later."""


def kind_of(status: int, own_key: bool) -> Kind:
    """What a response's status says of the try; `own_key`: the credential is ours, not the client's."""
    if status < 400:
        return ""
    if status == 429:
        return "limited"
    if status in _BROKEN:
        return "broken"
    if status == 408:
        return "timeout"
    if status in (401, 402, 403) and own_key:
        return "refused"  # our key, our quota: another backend may do
    return "final"


def blames(kind: Kind, own_key: bool) -> bool:
    """Whether a breaker counts it as a failure; a limit on the client's own key says nothing of other clients."""
    if kind == "limited":
        return own_key
    return kind in ("unreachable", "timeout", "refused", "broken")


def retry_after(headers: Mapping[bytes, bytes], now: float) -> float | None:
    """Seconds that a response asks to wait: `retry-after-ms`, `retry-after` in seconds or as a date."""
    try:
        if (milliseconds := headers.get(b"retry-after-ms")) is not None:
            return max(0.0, float(milliseconds) / 1000)
        if (text := headers.get(b"retry-after")) is None:
            return None
        if text.strip().replace(b".", b"", 1).isdigit():
            return float(text)
        return max(0.0, parsedate_to_datetime(text.decode("latin-1")).timestamp() - now)
    except (ValueError, TypeError, OverflowError):
        return None


def pause(round_number: int, draw: float, asked: float | None) -> float:
    """Seconds before round 1, 2, …; `draw` is uniform in [0, 1), `asked` the least that a backend asked for."""
    jitter = draw * min(CAP, BASE * 2.0**round_number)
    return jitter if asked is None else asked + jitter


@dataclass(slots=True)
class RetryBudget:
    """Each request adds a share of a retry, each retry takes one."""

    share: float = SHARE
    most: float = SPARE
    left: float = SPARE

    def sent(self) -> None:
        self.left = min(self.most, self.left + self.share)

    def take(self) -> bool:
        """Whether one more may be sent."""
        if self.left < 1.0:
            return False
        self.left -= 1.0
        return True
