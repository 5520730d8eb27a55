"""How much may be used in a while: a sliding window that never admits more than its limit.

The window is cut into slots; what was used in a slot counts until the last moment of the slot is as old as the window.
So in no span of a window's length is more admitted than the limit (it may take one slot, a 60th of the window, longer
than necessary until something is free again), whereas fixed windows and token buckets let twice as much through. Tokens
are reserved by an estimate and settled when they are known: then the most that can pass beyond the limit is by how much
the requests under way were estimated too low, and what went over is waited for by those that come next.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from pydantic import Field

from backends.protocol import Section

SLOTS = 60
"""Of one window."""


class Rates(Section):
    """How much may be used; what is left out is not limited."""

    requests_per_minute: int | None = Field(default=None, ge=1)
    """In any span of 60 seconds."""
    requests_per_day: int | None = Field(default=None, ge=1)
    """In any span of 24 hours."""
    tokens_per_minute: int | None = Field(default=None, ge=1)
    """Tokens of prompts and answers that were computed, in any span of 60 seconds."""
    tokens_per_day: int | None = Field(default=None, ge=1)
    """The same in any span of 24 hours."""
    concurrency: int | None = Field(default=None, ge=1)
    """Requests under way at once."""

    def windows(self) -> tuple[tuple[str, int, float], ...]:
        """(kind, limit, seconds) of those that are set."""
        every = (
            ("requests", self.requests_per_minute, 60.0),
            ("requests", self.requests_per_day, 86400.0),
            ("tokens", self.tokens_per_minute, 60.0),
            ("tokens", self.tokens_per_day, 86400.0),
        )
        return tuple((kind, limit, seconds) for kind, limit, seconds in every if limit is not None)


class Limits(Rates):
    """`limits:` of a tenant."""

    per_user: Rates = Rates()
    """For each end user by itself (`user_from` says who that is)."""
    per_model: dict[str, Rates] = {}
    """For each of these models (as the client names it) by itself."""
    count_hits: bool = False
    """Whether the tokens of answers from the cache count."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit that a request meets: how much of what in which time, and whose it is."""

    subject: str
    """Who shares it: a tenant, a tenant's user, a tenant's model."""
    kind: str
    """`requests`, `tokens`, or `concurrency`, whose window is 0: what is used counts until it is given back."""
    limit: int
    window: float

    @property
    def key(self) -> str:
        return f"{self.subject}|{self.kind}|{self.window:g}"


@dataclass(frozen=True, slots=True)
class State:
    """How a limit stands."""

    limit: Limit
    used: int
    wait: float
    """Seconds until what was asked for fits; 0: now; infinite: never."""
    reset: float
    """Seconds until nothing of it is used."""

    @property
    def remaining(self) -> int:
        return max(0, self.limit.limit - self.used)


@dataclass(slots=True)
class Window:
    """What was used of one limit, slot by slot, oldest first. Times are seconds of one clock that never goes back."""

    seconds: float
    used: int = 0
    slots: deque[list[int]] = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        self.slots = deque()

    def _slot(self, now: float) -> int:
        return math.floor(now / self.seconds * SLOTS) if self.seconds else 0

    def forget(self, now: float) -> None:
        """Drop what does not count any more."""
        if not self.seconds:
            return
        oldest = self._slot(now) - SLOTS
        while self.slots and self.slots[0][0] < oldest:
            self.used -= self.slots.popleft()[1]

    def state(self, now: float, limit: Limit, amount: int) -> State:
        """How it would be to use so much now. Call `forget` before."""
        return State(limit, self.used, self._wait(now, limit.limit - amount), self._free_at(now, -1))

    def _wait(self, now: float, allowed: int) -> float:
        if self.used <= allowed:
            return 0.0
        if allowed < 0:
            return math.inf
        if not self.seconds:
            return 1.0  # nobody knows when somebody will be done
        left = self.used
        for position, (_, used) in enumerate(self.slots):
            left -= used
            if left <= allowed:
                return self._free_at(now, position)
        return self.seconds

    def _free_at(self, now: float, position: int) -> float:
        if not self.slots or not self.seconds:
            return 0.0
        return max(0.0, (self.slots[position][0] + SLOTS + 1) * self.seconds / SLOTS - now)

    def add(self, now: float, amount: int) -> None:
        """Use so much, limit or not."""
        slot = self._slot(now)
        self.used += amount
        if self.slots and self.slots[-1][0] >= slot:
            self.slots[-1][1] += amount
        else:
            self.slots.append([slot, amount])

    def take_back(self, at: float, amount: int) -> None:
        """Undo so much of what was used at a time, where it still counts."""
        slot = self._slot(at)
        for entry in reversed(self.slots):
            if entry[0] == slot:
                amount = min(amount, entry[1])
                entry[1] -= amount
                self.used -= amount
                return
            if entry[0] < slot:
                return


def headers(states: list[State]) -> list[tuple[bytes, bytes]]:
    """`x-ratelimit-*` as OpenAI's clients read them: of several limits the one with the least left."""
    found: dict[str, State] = {}
    for state in states:
        kind = state.limit.kind
        if kind != "concurrency" and (kind not in found or state.remaining < found[kind].remaining):
            found[kind] = state
    out = []
    for kind, state in found.items():
        out.append((f"x-ratelimit-limit-{kind}".encode(), str(state.limit.limit).encode()))
        out.append((f"x-ratelimit-remaining-{kind}".encode(), str(state.remaining).encode()))
        out.append((f"x-ratelimit-reset-{kind}".encode(), f"{state.reset:.3f}s".encode()))
    return out


def estimate(text_bytes: int, max_tokens: int | None, default: int = 256) -> int:
    """Tokens that a request will probably use: a quarter of its bytes, and what it may answer at most (`default` where
    it does not say)."""
    return max(1, text_bytes // 4) + (default if max_tokens is None else max(0, min(max_tokens, 1 << 20)))
