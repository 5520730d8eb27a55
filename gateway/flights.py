"""Single flight: identical requests that come while the first is being answered get that same answer, as it arrives.

A flight belongs to nobody: the request to the upstream is a task of the flight, and whoever needs the next chunk pulls
it for all. So the client that came first may leave, and the others go on; when the last leaves, the upstream is told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from functools import partial
from typing import Generic, TypeVar

from gateway.exchange import Body

BUFFER_LIMIT = 4 << 20
"""A flight that has brought more bytes takes no new followers and forgets what all of them have; whoever is twice as
far behind the fastest is dropped."""

Head = TypeVar("Head")
Key = tuple[bytes, tuple[bool, bytes]]
"""What is asked, and in which bytes the answer is wanted: as a stream or not, with which options."""
Opened = tuple[Head, AsyncGenerator[bytes, None]]


class TooSlow(Exception):
    """A client that read so much slower than the others that the rest is not kept for it any more."""


class Flight(Generic[Head]):
    """One answer under way; `ended` is called when it takes nobody any more."""

    def __init__(self, opening: Awaitable[Opened[Head]], ended: Callable[[], None]) -> None:
        self.riders = 0
        """Who waits for it or reads it."""
        self._opening: asyncio.Task[Opened[Head]] | None = asyncio.ensure_future(opening)
        self._ended: Callable[[], None] | None = ended
        self._source: AsyncGenerator[bytes, None] | None = None
        self._chunks: deque[bytes] = deque()
        self._first = 0
        """The number of the first chunk that is kept."""
        self._bytes = 0
        self._at: dict[object, tuple[int, int]] = {}
        """How many chunks and bytes each rider has."""
        self._aboard: set[object] = set()
        self._pulling: asyncio.Task[None] | None = None
        self._landed = False
        self._error: Exception | None = None
        self.over = asyncio.Event()
        """Set when its answer is there, or will not come."""

    async def head(self) -> Head:
        """The response's head. Raises what opening it raised. Call once for each rider, before `ride`."""
        self.riders += 1
        opening = self._opening
        assert opening is not None, "a flight that is over is not found"
        try:
            head, self._source = await asyncio.shield(opening)
        except BaseException as error:
            if opening.done():
                self.close()
            if not isinstance(error, Exception) or opening.done():
                await self.leave()
            raise
        return head

    def ride(self) -> Body:
        """The body from its beginning; close it."""
        me = object()
        self._at[me] = (0, 0)
        self._aboard.add(me)
        return Body(self._ride(me), partial(self._get_off, me))

    async def _get_off(self, me: object) -> None:
        self._at.pop(me, None)
        if me in self._aboard:
            self._aboard.remove(me)
            await self.leave()

    async def _ride(self, me: object) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                if me not in self._at:
                    raise TooSlow
                number, size = self._at[me]
                if number < self._first + len(self._chunks):
                    chunk = self._chunks[number - self._first]
                    self._at[me] = (number + 1, size + len(chunk))
                    yield chunk
                elif not self._landed:
                    await self._more()
                elif self._error is not None:
                    raise self._error
                else:
                    return
        finally:
            await self._get_off(me)

    def close(self) -> None:
        """Take no more followers."""
        if self._ended is not None:
            self._ended()
            self._ended = None  # it knows this flight: a cycle would keep the body until the garbage collector comes

    async def leave(self) -> None:
        """One rider fewer; with the last one the upstream is let go, and all is forgotten."""
        self.riders -= 1
        if self.riders:
            return
        self.close()
        self.over.set()
        opening, pulling, source = self._opening, self._pulling, self._source
        self._opening = self._pulling = None
        if opening is not None and not opening.done():
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        elif opening is not None and source is None and not opening.cancelled() and opening.exception() is None:
            source = opening.result()[1]
        if pulling is not None:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
        if source is not None:
            await source.aclose()
        self._source, self._error = None, None
        self._chunks.clear()

    async def _more(self) -> None:
        if self._pulling is None:
            self._pulling = asyncio.create_task(self._pull())
        await asyncio.shield(self._pulling)  # whoever leaves must not take the others' chunk along

    async def _pull(self) -> None:
        assert self._source is not None
        try:
            chunk = await anext(self._source)
        except StopAsyncIteration:
            self._land(None)
        except Exception as error:
            self._land(error)
        else:
            self._chunks.append(chunk)
            self._bytes += len(chunk)
            if self._bytes > BUFFER_LIMIT:
                self._forget()
        finally:
            self._pulling = None

    def _land(self, error: Exception | None) -> None:
        self._error, self._landed = error, True
        self.over.set()
        self.close()

    def _forget(self) -> None:
        """Drop who is too far behind, and what everybody else has."""
        self.close()
        for rider, (_, size) in list(self._at.items()):
            if self._bytes - size > 2 * BUFFER_LIMIT:
                del self._at[rider]
        slowest = min((number for number, _ in self._at.values()), default=self._first)
        while self._first < slowest:
            self._chunks.popleft()
            self._first += 1


class Flights(Generic[Head]):
    """The flights that take followers, by key: what is asked, and in which bytes the answer is wanted."""

    def __init__(self) -> None:
        self._flights: dict[Key, Flight[Head]] = {}
        self._shapes: dict[bytes, dict[tuple[bool, bytes], Flight[Head]]] = {}

    def find(self, key: Key) -> Flight[Head] | None:
        return self._flights.get(key)

    def otherwise(self, key: Key) -> tuple[tuple[bool, bytes], Flight[Head]] | None:
        """A flight that brings the same answer in another shape: which one, and the flight."""
        shapes = self._shapes.get(key[0], {})
        return next(((shape, flight) for shape, flight in shapes.items() if shape != key[1]), None)

    def start(self, key: Key, opening: Awaitable[Opened[Head]]) -> Flight[Head]:
        """A new flight; `opening` makes its response's head and body."""

        def ended() -> None:
            if self._flights.get(key) is flight:
                del self._flights[key]
                del self._shapes[key[0]][key[1]]
                if not self._shapes[key[0]]:
                    del self._shapes[key[0]]

        flight: Flight[Head] = Flight(opening, ended)
        self._flights[key] = flight
        self._shapes.setdefault(key[0], {})[key[1]] = flight
        return flight
