"""A request whose body has arrived, and a response on its way."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from backends import asgi
from backends.protocol import Answer, Usage
from gateway.stores.contract import Taken
from gateway.tenant import Tenant
from policies import rate_limit
from policies.rate_limit import Limit, State

if TYPE_CHECKING:
    from gateway.books import Bill

COPY_LIMIT = 4 << 20
"""Longer answers are relayed, but not remembered."""


@dataclass(slots=True)
class Ticket:
    """What a request has taken at the door; give it back with `Admission.leave`."""

    tenant: Tenant
    limits: Sequence[Limit] = ()
    states: list[State] = field(default_factory=list)
    taken: Taken = Taken(0.0)
    holder: str = ""
    downgraded: bool = False
    request: str = ""
    """The id of the request."""
    user: str = ""
    surface: str = ""
    tags: tuple[str, ...] = ()
    bills: list[Bill] = field(default_factory=list)
    """The computations that it began."""
    looked: tuple[float, int] = (0.0, 0)
    """Seconds and tokens of looking for similar questions."""
    told: bool = False
    """Whether the ledger has its row: what ends later gets a row of its own."""
    behind: str = ""
    """Why it computes behind the back of somebody who is served already: "refresh" of a stale answer, "audit" of a
    hit, or "judgement" of two answers."""

    def headers(self) -> list[tuple[bytes, bytes]]:
        return rate_limit.headers(self.states)


@dataclass(slots=True)
class Incoming:
    """A request whose body has arrived. Start `watch` before waiting for anybody else."""

    scope: asgi.Scope
    headers: dict[str, str]
    body: bytes
    tenant: Tenant
    watch: asgi.HangupWatch
    id: str = ""
    surface: str = ""
    model: str = ""
    """What it asks for, once that is known."""
    span: Any = None
    """Its OpenTelemetry span, where there is one."""
    ticket: Ticket | None = None
    """What it took at the door."""

    @property
    def query(self) -> str:
        query: bytes = self.scope["query_string"]
        return query.decode("latin-1")


class Body(AsyncGenerator[bytes, None]):
    """A body on its way, to be closed by whoever takes it.

    A plain generator that is closed before it was begun skips its own `finally`; this one cleans up all the same.
    """

    def __init__(self, chunks: AsyncGenerator[bytes, None], cleanup: Callable[[], Awaitable[None]]) -> None:
        """`cleanup` may be called twice."""
        self._chunks, self._cleanup = chunks, cleanup

    async def asend(self, value: None) -> bytes:
        return await self._chunks.asend(value)

    async def athrow(self, *error: Any) -> bytes:
        return await self._chunks.athrow(*error)

    async def aclose(self) -> None:
        try:
            await self._chunks.aclose()
        finally:
            await self._cleanup()


@dataclass(slots=True)
class Served:
    """A response on its way: head, body, and what the log and the metrics will tell of it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes | None = None
    chunks: AsyncGenerator[bytes, None] | None = None
    tenant: str = ""
    model: str = ""
    backend: str = ""
    cache: str = "miss"
    reason: str = ""
    answer: Answer | None = None
    stored: str = ""
    """Why the answer was not stored, or "stored"."""
    backend_kind: str = ""
    priced: tuple[str, str, str] = ("", "", "")
    """What the price of its answer depends on: the model at the backend, the kind of backend, its URL."""
    avoided: Usage | None = None
    """Tokens that a stored answer made unnecessary."""
    source: str = ""
    """The backend that a stored answer came from."""
    leader: Served | None = None
    """Whose answer it shares."""
    entry: str = ""
    similarity: float | None = None
    stream: bool = False
    started: float = field(default_factory=time.perf_counter)
    overhead: float = 0.0
    first: float | None = None
    """When the first body byte went out."""
    complete: bool = False
    """Whether the last one did."""
