"""Single flight: identical requests that come while the first is being answered get that same answer, as it arrives.

There is no task behind a flight that runs by itself: whoever needs the next chunk pulls it from the upstream for all.
So the client that came first may leave, and the others go on; when the last one leaves, the upstream is told.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

BUFFER_LIMIT = 4 << 20
"""A flight that has brought more bytes takes no new followers, and forgets what all of them have."""

Head = TypeVar("Head")


class Cancelled(Exception):
    """Whoever led the flight left before there was anything to share."""


class Flight(Generic[Head]):
    """One answer under way. `shape` says who can take its bytes as they are; `ended` is called when it takes nobody any
    more, perhaps several times."""

    def __init__(self, shape: object, ended: Callable[[], None]) -> None:
        self.shape = shape
        self.head: asyncio.Future[Head] = asyncio.get_running_loop().create_future()
        self.landed = asyncio.Event()
        """All of it is there, or it failed."""
        self.riders = 1
        """Who reads it or is about to; the leader is the first."""
        self._ended = ended
        self._source: AsyncGenerator[bytes, None] | None = None
        self._chunks: deque[bytes] = deque()
        self._first = 0
        """The number of the first chunk that is kept."""
        self._bytes = 0
        self._positions: dict[object, int] = {}
        self._pulling: asyncio.Task[None] | None = None
        self._error: BaseException | None = None

    def depart(self, head: Head, source: AsyncGenerator[bytes, None], shared: bool = True) -> None:
        """The response's head is there, and this is where its body comes from. `shared`: others may still come."""
        self._source = source
        self.head.set_result(head)
        if not shared:
            self._ended()

    def fail(self, error: BaseException) -> None:
        """There will be no response."""
        self.head.set_exception(error if isinstance(error, Exception) else Cancelled())
        self.head.exception()  # nobody may be waiting for it
        self._land(error)

    async def ride(self) -> AsyncGenerator[bytes, None]:
        """The body from its beginning. One call for each of `riders`."""
        me = object()
        self._positions[me] = 0
        try:
            while True:
                while (position := self._positions[me]) < self._first + len(self._chunks):
                    self._positions[me] = position + 1
                    yield self._chunks[position - self._first]
                    self._trim()
                if not self.landed.is_set():
                    await self._more()
                elif self._error is not None:
                    raise self._error
                elif position >= self._first + len(self._chunks):
                    return
        finally:
            del self._positions[me]
            await self.leave()

    async def leave(self) -> None:
        """One rider fewer; with the last one the upstream is let go."""
        self.riders -= 1
        if self.riders or self.landed.is_set():
            return
        self._land(Cancelled())
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.gather(self._pulling, return_exceptions=True)
        if self._source is not None:
            await self._source.aclose()

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
                self._ended()
        finally:
            self._pulling = None

    def _land(self, error: BaseException | None) -> None:
        self._error = error
        self.landed.set()
        self._ended()

    def _trim(self) -> None:
        if self._bytes > BUFFER_LIMIT:
            for _ in range(min(self._positions.values()) - self._first):
                self._chunks.popleft()
                self._first += 1


@dataclass(frozen=True, slots=True)
class Boarding(Generic[Head]):
    """A flight to lead (`head` is None) or to follow; `landed`: one of another shape is over, look into the cache."""

    flight: Flight[Head]
    head: Head | None = None
    landed: bool = False


class Flights(Generic[Head]):
    """The flights that take followers, by key."""

    def __init__(self) -> None:
        self._flights: dict[bytes, Flight[Head]] = {}

    async def board(self, key: bytes, shape: object, good: Callable[[Head], bool]) -> Boarding[Head]:
        """Follow the flight of this key once its head is there, or lead a new one.

        Where a leader failed, or what it got is not `good`, its followers try once more among themselves, one of them
        leading; a second failure is theirs too, and raised.
        """
        again = True
        while (flight := self._flights.get(key)) is not None:
            if flight.shape != shape:
                await flight.landed.wait()
                return Boarding(flight, landed=True)
            flight.riders += 1
            try:
                head = await asyncio.shield(flight.head)
                if good(head) or not again:
                    return Boarding(flight, head)
                again = False
            except Cancelled:
                pass
            except Exception:
                if not again:
                    raise
                again = False
            except BaseException:
                await flight.leave()
                raise
            await flight.leave()
        return Boarding(self._start(key, shape))

    def _start(self, key: bytes, shape: object) -> Flight[Head]:
        def ended() -> None:
            if self._flights.get(key) is flight:
                del self._flights[key]

        flight: Flight[Head] = Flight(shape, ended)
        self._flights[key] = flight
        return flight
