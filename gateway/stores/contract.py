"""What a store of answers must do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

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


OBSERVATIONS = 10_000
"""So many observations of a tenant are kept, the newest; in Redis a hundred times as many of all together."""
Source = Literal["audit", "shadow", "grey", "feedback"]
"""Where it is known from: a hit that was computed as well; what `semantic: shadow` would have served; a candidate
that was not good enough, when the fresh answer came; somebody who was served."""


@dataclass(frozen=True, slots=True)
class Observation:
    """Whether a stored answer was right for a question in other words. No text: scores and keys only."""

    at: float
    tenant: str
    group: bytes
    """The model and the system prompt that it was about, as a hash."""
    entry: bytes
    created: float
    """When the entry was."""
    asked: bytes
    """The key of the question."""
    score: float
    """The verifier's log-odds, or the cosine where there is no verifier."""
    right: bool | None
    """None: the two answers could not be told equal or different."""
    source: Source
    judge: str = ""
    """The fingerprint of what made the score: scores of another verifier mean nothing."""


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

    def observe(self, rows: Sequence[Observation]) -> None: ...

    def observed(self, after: int = 0) -> list[tuple[int, Observation]]:
        """What was observed after a number (0: all that is kept), oldest first, each with its own."""
        ...

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


@dataclass(slots=True)
class Booking:
    """One row of the ledger: an answer, or something else that was paid for. Money is in billionths of a dollar.

    `part`: "answer" (a request and what it got), "attempt" (a try or a lost hedge that came to nothing and may be
    charged all the same), or "late" (a computation that ended after its request: its client had left, or it was made
    in the background). What was paid is the sum over all parts.
    """

    at: float
    """When it began, in seconds since the epoch."""
    tenant: str
    part: str = "answer"
    request: str = ""
    key: str = ""
    """Which of the tenant's keys."""
    user: str = ""
    surface: str = ""
    asked: str = ""
    """The model that was asked for."""
    model: str = ""
    """The model that answered, by its name at the backend."""
    backend: str = ""
    cache: str = "none"
    """The answer cache's tier: exact, semantic, alias, stale, miss, bypass, or none where it was not reached."""
    reason: str = ""
    stored: str = ""
    entry: str = ""
    """The stored answer that was served, or of a miss the nearest one."""
    similarity: float | None = None
    stream: bool = False
    status: int = 0
    ttft: float | None = None
    seconds: float = 0.0
    prompt: int = 0
    completion: int = 0
    cached: int = 0
    written: int = 0
    sources: Mapping[str, int] = field(default_factory=dict)
    """Of `cached`, how many came from which KV tier, or from `upstream`."""
    avoided_prompt: int = 0
    avoided_completion: int = 0
    """Tokens that a stored or shared answer made unnecessary."""
    estimated: bool = False
    """Whether tokens were guessed, because nobody told them."""
    cost: int | None = 0
    """None: nobody knows a price."""
    lookup: int = 0
    """Of `cost`, what looking for similar questions took."""
    saved_answer: int = 0
    saved_prefix: int = 0
    """What it would have cost cold, less what it cost: by a stored answer, or by what was cached of the prompt."""
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Audit:
    """A change that somebody made."""

    at: float
    actor: str
    action: str
    detail: str = ""
    outcome: str = "done"


WEEK = 7 * 86400
MONDAY = 3 * 86400
"""The epoch began on a Thursday."""


def floored(at: float, span: int) -> int:
    """When the step of `span` seconds began that a time is in; weeks begin on Mondays, all in UTC."""
    shift = MONDAY if span == WEEK else 0
    return (int(at) + shift) // span * span - shift


class StoreAway(Exception):
    """The store takes nothing just now; later it may."""


class LedgerStore(Protocol):
    """Blocking calls, made from worker threads."""

    def add(self, rows: Sequence[Booking]) -> None:
        """Book all or none, and bring the roll-ups up to date in the same transaction. Raises `StoreAway`."""
        ...

    def tidy(self, now: float) -> None:
        """Drop what is older than it is to be kept."""
        ...

    def totals(self, query: Query) -> list[dict[str, Any]]:
        """Sums over roll-ups, one object for each group."""
        ...

    def quantiles(self, query: Query) -> list[dict[str, Any]]:
        """Times to the first byte, one object for each group and kind (`hit`, `prefix`, `miss`)."""
        ...

    def entries(self, query: Query, limit: int) -> list[dict[str, Any]]:
        """The stored answers that saved most."""
        ...

    def rows(
        self, tenant: str, before: int, after: int, limit: int, conditions: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        """Rows between two numbers, newest first."""
        ...

    def row(self, number: int, tenant: str) -> list[dict[str, Any]]:
        """A row, with every other part of its request."""
        ...

    def note(self, audit: Audit) -> None:
        """Keep what somebody did."""
        ...

    def audits(self, limit: int) -> list[dict[str, Any]]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Query:
    """Which part of the ledger: from a time to another, in steps of `span` seconds; of one tenant, or of all."""

    start: float
    end: float
    span: int
    tenant: str = ""
    by: tuple[str, ...] = ()
    """Names of what to group by: tenant, key, model, backend, surface, cache, outcome, time."""
