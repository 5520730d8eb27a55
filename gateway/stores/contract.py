"""What a store of answers must do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from policies.budget import Account
from policies.rate_limit import Limit, State


class BrokenRow(Exception):
    """What a store holds is not what was written."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored answer. Times are seconds since the epoch.

    `body` is the answer as JSON without id and created. An alias has no body of its own: it is another wording of the
    question of the entry `target`.
    """

    key: bytes
    scope: bytes
    tenant: str
    surface: str
    model: str
    backend: str
    question: str | None
    body: bytes
    has_usage: bool
    created: float
    expires: float
    cost: float = 0.0
    """What it took to compute, in tokens of the prompt; a token of the answer counts as four."""
    stale_until: float = 0.0
    """How long after `expires` it may still be of use to somebody."""
    tags: tuple[str, ...] = ()
    target: bytes | None = None
    embeds: bool = False
    """Whether its question belongs into the semantic index."""

    @property
    def kept_until(self) -> float:
        return max(self.expires, self.stale_until)


@dataclass(slots=True, eq=False)
class Known:
    """What stays in memory of every entry, whether its body does or not."""

    created: float
    expires: float
    kept_until: float
    size: int
    cost: float
    has_usage: bool
    used: float = 0.0
    """When it was last served or stored."""
    place: int = 0
    """Where its key stands in the list of keys."""


@dataclass(frozen=True, slots=True)
class Row:
    """One entry as it comes back from a scan: enough to find it, not to serve it."""

    number: int
    key: bytes
    scope: bytes
    known: Known


@dataclass(frozen=True, slots=True)
class Vector:
    """The packed embedding of a stored question, made by the encoder with the fingerprint `embedder`.

    `packed` is empty where the question does not fit the encoder.
    """

    key: bytes
    scope: bytes
    created: float
    """When its entry was created: a vector belongs to no other."""
    embedder: str
    packed: bytes


@dataclass(frozen=True, slots=True)
class Selector:
    """Which entries are meant; what is left out does not matter. Without anything: all."""

    entry: str = ""
    """The first hexadecimal digits of the key, as in `x-hitherto-entry`."""
    tag: str = ""
    model: str = ""
    tenant: str = ""
    older_than: float | None = None
    """Seconds."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a scope is made of: the names of its parts, each with a hash of its value."""

    scope: bytes
    parts: dict[str, str] = field(default_factory=dict)


class AnswerStore(Protocol):
    """Blocking calls, made from worker threads. Any of them may raise; callers count that as a cache fault."""

    def rows(self, after: int = 0) -> Iterator[Row]:
        """What was written after a number (0: everything), in the order of writing."""
        ...

    def vectors(self, embedder: str, after: int = 0) -> Iterator[tuple[int, Vector]]:
        """Vectors by this encoder that were written after a number, each with its own."""
        ...

    def removed(self, after: int) -> list[tuple[int, bytes, float]]:
        """(number, key, created) of what was deleted after a number, by whoever shares the store."""
        ...

    def last(self) -> tuple[int, int, int]:
        """The numbers of the newest entry, vector and removal; 0 if there was none."""
        ...

    def get(self, key: bytes) -> Entry | None: ...

    def put(self, entries: Sequence[Entry]) -> None:
        """Store all or none, except over newer ones; durable when it returns (against a crash of the process)."""
        ...

    def put_vectors(self, vectors: Sequence[Vector]) -> None:
        """Give stored entries, unless they are gone or replaced, their vectors."""
        ...

    def delete(self, keys: Sequence[tuple[bytes, float]], announce: bool = False) -> None:
        """Delete the entries with these keys, unless they were created after the time given with each.

        `announce`: others that share the store shall forget them, too.
        """
        ...

    def find(self, selector: Selector) -> list[tuple[bytes, float, int]]:
        """(key, created, size) of the entries that are meant, and of their aliases."""
        ...

    def unembedded(self, embedder: str, limit: int) -> list[tuple[bytes, bytes, float, str]]:
        """(key, scope, created, question) of entries that embed, and have no vector by this encoder."""
        ...

    def elsewhere(self, scope: bytes, question: str, limit: int) -> list[tuple[bytes, bytes, float]]:
        """(key, scope, created) of entries with this very question in other scopes, newest first."""
        ...

    def describe(self, shape: Shape) -> None:
        """Keep what a scope is made of, to explain misses."""
        ...

    def tidy(self) -> None:
        """Drop what belongs to no entry any more."""
        ...

    def described(self, scope: bytes) -> dict[str, str]: ...

    def deny(self, asked: bytes, entry: bytes) -> None:
        """Never again serve `entry` to the question with the key `asked`."""
        ...

    def denied(self) -> list[tuple[bytes, bytes]]: ...

    def lease(self, key: bytes, holder: str, seconds: float) -> bool:
        """Whether `holder` may compute what `key` names now; nobody else may until it releases, or the time is up."""
        ...

    def release(self, key: bytes, holder: str) -> None: ...

    def statistics(self) -> dict[str, Any]:
        """Counts and bytes, for `hitherto cache stats`."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Taken:
    """When, by the clock of where it is counted, and where something was taken: it is given back there."""

    at: float
    here: bool = True
    """Whether this process counts it by itself."""


class CounterStore(Protocol):
    """Rate limits and money that several requests, and perhaps several gateways, share.

    What is given back or settled is told without waiting for it. `estimated`: the shared store is away, and this
    process counts by itself.
    """

    @property
    def estimated(self) -> bool: ...

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def share(self, limit: Limit) -> int:
        """How much of a limit is this process' own: all of it, unless several divide it."""
        ...

    async def take(self, wanted: Sequence[tuple[Limit, int]], holder: str) -> tuple[list[State], Taken]:
        """Use so much of each limit, or of none if one of them does not allow it; how they stand then.

        `State.wait` says who did not allow it. What has no window is used until `holder` gives it back.
        """
        ...

    def give(self, changes: Sequence[tuple[Limit, int]], taken: Taken, holder: str) -> None:
        """Correct what was taken: less is given back, more is used now, limit or not."""
        ...

    async def reserve(self, accounts: Sequence[Account], amount: int, holder: str) -> Account | None:
        """Hold an amount on every account, or on none: the account that has not enough left, or None."""
        ...

    def settle(self, accounts: Sequence[Account], amount: int, holder: str) -> None:
        """Book what was really spent in place of what `holder` holds. Once for each holder."""
        ...

    async def spent(self, accounts: Sequence[Account]) -> list[tuple[int, int]]:
        """(booked, held) of each account."""
        ...
