"""Flights: everybody gets every byte from the beginning, whoever leaves, and the upstream is asked once."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator

import pytest

from gateway.flights import BUFFER_LIMIT, Flight, Flights, TooSlow

KEY = (b"k", "json")


class Source:
    """An upstream whose body gives what is put into it, and that knows whether it was closed."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.opened: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.closed = self.cancelled = False
        self.pulls = 0

    async def open(self) -> tuple[int, AsyncGenerator[bytes, None]]:
        try:
            return await self.opened, self.chunks()
        except asyncio.CancelledError:
            self.cancelled = True
            raise

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            while True:
                self.pulls += 1
                item = await self.queue.get()
                if item is None:
                    return
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.closed = True


async def take(flight: Flight[int]) -> bytes:
    """One rider, from the head to the last byte."""
    assert await flight.head() == 200
    return b"".join([chunk async for chunk in flight.ride()])


async def test_followers_come_at_any_moment_and_get_everything() -> None:
    flights: Flights[int] = Flights()
    source = Source()
    flight = flights.start(KEY, source.open())
    riders = [asyncio.create_task(take(flight)) for _ in range(2)]
    await asyncio.sleep(0)
    source.opened.set_result(200)
    source.queue.put_nowait(b"one ")
    await asyncio.sleep(0.01)
    assert flights.find(KEY) is flight
    riders.append(asyncio.create_task(take(flight)))
    source.queue.put_nowait(b"two")
    source.queue.put_nowait(None)
    assert await asyncio.gather(*riders) == [b"one two"] * 3 and source.pulls == 3
    assert flights.find(KEY) is None and source.closed


@pytest.mark.parametrize("before_the_head", [True, False])
async def test_the_first_may_leave_at_any_moment(before_the_head: bool) -> None:
    flights: Flights[int] = Flights()
    source = Source()
    flight = flights.start(KEY, source.open())
    first, other = (asyncio.create_task(take(flight)) for _ in range(2))
    await asyncio.sleep(0)
    if not before_the_head:
        source.opened.set_result(200)
        await asyncio.sleep(0.01)
    first.cancel()
    await asyncio.sleep(0.01)
    assert not source.closed and not source.cancelled
    if before_the_head:
        source.opened.set_result(200)
    source.queue.put_nowait(b"all of it")
    source.queue.put_nowait(None)
    assert await other == b"all of it"


@pytest.mark.parametrize("before_the_head", [True, False])
async def test_the_upstream_is_let_go_when_the_last_one_leaves(before_the_head: bool) -> None:
    flights: Flights[int] = Flights()
    source = Source()
    flight = flights.start(KEY, source.open())
    riders = [asyncio.create_task(take(flight)) for _ in range(3)]
    if not before_the_head:
        source.opened.set_result(200)
    await asyncio.sleep(0.01)
    for rider in riders:
        assert not source.closed and not source.cancelled
        rider.cancel()
        await asyncio.gather(rider, return_exceptions=True)
    assert source.cancelled if before_the_head else source.closed
    assert flights.find(KEY) is None


async def test_a_failure_to_open_is_everybodys_and_the_flight_is_gone() -> None:
    flights: Flights[int] = Flights()
    source = Source()
    flight = flights.start(KEY, source.open())
    riders = [asyncio.create_task(take(flight)) for _ in range(3)]
    await asyncio.sleep(0)
    source.opened.set_exception(OSError("down"))
    results = await asyncio.gather(*riders, return_exceptions=True)
    assert all(isinstance(result, OSError) for result in results)
    assert flights.find(KEY) is None and flight.riders == 0


async def test_a_body_that_breaks_off_breaks_off_for_all() -> None:
    flights: Flights[int] = Flights()
    source = Source()
    source.opened.set_result(200)
    flight = flights.start(KEY, source.open())
    riders = [asyncio.create_task(take(flight)) for _ in range(2)]
    source.queue.put_nowait(b"half")
    source.queue.put_nowait(OSError("gone"))
    results = await asyncio.gather(*riders, return_exceptions=True)
    assert all(isinstance(result, OSError) for result in results)


async def test_an_endless_body_keeps_memory_flat_and_drops_who_stands_still() -> None:
    flights: Flights[int] = Flights()
    source = Source()
    source.opened.set_result(200)
    flight = flights.start(KEY, source.open())
    await flight.head()
    await flight.head()
    quick, still = flight.ride(), flight.ride()
    chunk = b"x" * (1 << 20)
    source.queue.put_nowait(chunk)
    assert await anext(quick) == await anext(still) == chunk
    for _ in range(30):
        source.queue.put_nowait(chunk)
        assert await anext(quick) == chunk
        assert len(flight._chunks) <= 2 * BUFFER_LIMIT // len(chunk) + 2
    assert flights.find(KEY) is None
    with pytest.raises(TooSlow):
        await anext(still)
    await quick.aclose()
    assert source.closed


async def test_a_flight_that_is_over_is_not_left_to_the_garbage_collector() -> None:
    flights: Flights[int] = Flights()
    source = Source()
    source.opened.set_result(200)
    flight = flights.start(KEY, source.open())
    source.queue.put_nowait(b"x")
    source.queue.put_nowait(None)
    gc.disable()
    try:
        assert await take(flight) == b"x"
        gone = weakref.ref(flight)
        del flight
        await asyncio.sleep(0.01)
        assert gone() is None
    finally:
        gc.enable()
