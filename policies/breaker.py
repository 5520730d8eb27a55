"""When to stop asking a backend that fails: a circuit breaker as a table of transitions.

    state      event                                   → state
    closed     failures reach the share, or come in a row  open
    open       the pause is over, and somebody asks        half-open (that request is a probe)
    half-open  a probe fails                               open, with twice the pause
    half-open  as many probes as wanted have succeeded     closed

Outcomes of requests that began before the last transition say nothing about the state after it, and are dropped.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from backends.protocol import Duration, Section

State = Literal["closed", "open", "half-open"]
SLOTS = 10
MAX_PAUSES = 20
"""The pause doubles with each failed probe, up to so many times the first."""


class BreakerConfig(Section):
    """`breaker:` of a backend."""

    failures: float = Field(default=0.5, gt=0, le=1)
    """The share of failures within `window` that opens it, once there are `minimum` requests."""
    minimum: int = Field(default=20, ge=1)
    """With fewer requests within `window` a share says nothing."""
    in_a_row: int = Field(default=10, ge=1)
    """So many failures one after the other open it, too."""
    window: Duration = Field(default=30.0, gt=0)
    """How far back outcomes count."""
    pause: Duration = Field(default=5.0, gt=0)
    """How long nobody is sent there; twice as long after each failed probe, up to 20 times."""
    probes: int = Field(default=2, ge=1)
    """How many requests at once try whether it works again, and how many must succeed."""
    slow: Duration | None = Field(default=60.0, gt=0)
    """A stream whose first byte takes longer counts as a failure."""


@dataclass(frozen=True, slots=True)
class Pass:
    """Permission for one request; its outcome is told with it. `era`: how often the state had changed."""

    era: int
    probe: bool = False


@dataclass(slots=True)
class Breaker:
    """The breaker of one backend, or of one replica. Times are seconds of one clock that never goes back."""

    config: BreakerConfig
    state: State = "closed"
    era: int = 0
    _until: float = 0.0
    _pauses: int = 1
    _row: int = 0
    _open_door: Pass = Pass(0)
    _probing: int = 0
    _proven: int = 0
    _slots: deque[list[int]] = field(default_factory=deque)
    """[slot, successes, failures], oldest first."""

    def ask(self, now: float) -> Pass | None:
        """Permission for a request, or None."""
        if self.state == "closed":
            return self._open_door
        if self.state == "open":
            if now < self._until:
                return None
            self._become("half-open", now)
        if self._probing + self._proven >= self.config.probes:
            return None
        self._probing += 1
        return Pass(self.era, probe=True)

    def wait(self, now: float) -> float:
        """Seconds until it may be worth asking."""
        if self.state == "closed":
            return 0.0
        return max(0.0, self._until - now) if self.state == "open" else 1.0

    def succeeded(self, now: float, permission: Pass) -> None:
        """A request was answered."""
        if permission.era != self.era:
            return
        if permission.probe:
            self._probing -= 1
            self._proven += 1
            if self._proven >= self.config.probes:
                self._pauses = 1
                self._become("closed", now)
            return
        self._row = 0
        self._slot(now)[1] += 1

    def failed(self, now: float, permission: Pass) -> None:
        """A request failed, and the backend is to blame."""
        if permission.era != self.era:
            return
        if permission.probe:
            self._pauses = min(MAX_PAUSES, self._pauses * 2)
            self._open(now)
            return
        self._row += 1
        self._slot(now)[2] += 1
        bad = sum(slot[2] for slot in self._slots)
        total = bad + sum(slot[1] for slot in self._slots)
        if self._row >= self.config.in_a_row or (total >= self.config.minimum and bad >= self.config.failures * total):
            self._open(now)

    def dropped(self, permission: Pass) -> None:
        """A request ended without telling anything: its client left, say."""
        if permission.era == self.era and permission.probe:
            self._probing -= 1

    def _open(self, now: float) -> None:
        self._until = now + self.config.pause * self._pauses
        self._become("open", now)

    def _become(self, state: State, now: float) -> None:
        self.state = state
        self.era += 1
        self._open_door = Pass(self.era)
        self._row = self._probing = self._proven = 0
        self._slots.clear()

    def _slot(self, now: float) -> list[int]:
        number = math.floor(now / self.config.window * SLOTS)
        while self._slots and self._slots[0][0] <= number - SLOTS:
            self._slots.popleft()
        if not self._slots or self._slots[-1][0] != number:
            self._slots.append([number, 0, 0])
        return self._slots[-1]
