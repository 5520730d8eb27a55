"""Flights: everybody gets every byte from the beginning, whoever leaves, and the upstream is asked once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from gateway import flights
from gateway.flights import Flights

KEY = b"k"


class Source:
    """An upstream body that gives what is put into it, and knows whether it was closed."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.closed = False
        self.pulls = 0

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


async def collect(body: AsyncGenerator[bytes, None]) -> bytes:
    return b"".join([chunk async for chunk in body])


async def lead(all_: Flights[int], shape: object = "json") -> flights.Flight[int]:
    boarding = await all_.board(KEY, shape, lambda status: status < 400)
    assert boarding.head is None and not boarding.landed
    return boarding.flight


async def test_followers_come_at_any_moment_and_get_everything() -> None:
    all_: Flights[int] = Flights()
    source = Source()
    flight = await lead(all_)
    early = asyncio.create_task(all_.board(KEY, "json", lambda status: True))
    await asyncio.sleep(0)
    flight.depart(200, source.chunks())
    readers = [asyncio.create_task(collect(flight.ride()))]
    boarding = await early
    assert boarding.head == 200
    readers.append(asyncio.create_task(collect(boarding.flight.ride())))
    source.queue.put_nowait(b"one ")
    await asyncio.sleep(0.01)
    late = await all_.board(KEY, "json", lambda status: True)
    readers.append(asyncio.create_task(collect(late.flight.ride())))
    source.queue.put_nowait(b"two")
    source.queue.put_nowait(None)
    assert await asyncio.gather(*readers) == [b"one two"] * 3 and source.pulls == 3
    assert (await all_.board(KEY, "json", lambda status: True)).head is None, "it has landed; the next one leads"


async def test_the_leader_may_leave_in_the_middle_of_a_chunk() -> None:
    all_: Flights[int] = Flights()
    source = Source()
    flight = await lead(all_)
    flight.depart(200, source.chunks())
    leader = asyncio.create_task(collect(flight.ride()))
    follower = asyncio.create_task(collect((await all_.board(KEY, "json", lambda status: True)).flight.ride()))
    await asyncio.sleep(0.01)
    leader.cancel()
    await asyncio.sleep(0.01)
    assert not source.closed
    source.queue.put_nowait(b"all of it")
    source.queue.put_nowait(None)
    assert await follower == b"all of it"


async def test_the_upstream_is_let_go_when_the_last_one_leaves() -> None:
    all_: Flights[int] = Flights()
    source = Source()
    flight = await lead(all_)
    flight.depart(200, source.chunks())
    readers = [asyncio.create_task(collect(flight.ride()))]
    readers.append(asyncio.create_task(collect((await all_.board(KEY, "json", lambda status: True)).flight.ride())))
    await asyncio.sleep(0.01)
    for reader in readers:
        assert not source.closed
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    assert source.closed
    await lead(all_)


@pytest.mark.parametrize("failure", [OSError("down"), 503])
async def test_a_failed_leader_is_tried_again_once_by_one_of_the_others(failure: Exception | int) -> None:
    all_: Flights[int] = Flights()
    leaders = 0

    async def ask() -> int:
        nonlocal leaders
        boarding = await all_.board(KEY, "json", lambda status: status < 400)
        if boarding.head is not None:
            await boarding.flight.leave()
            return boarding.head
        leaders += 1
        await asyncio.sleep(0.01)
        if isinstance(failure, Exception):
            boarding.flight.fail(failure)
            raise failure
        boarding.flight.depart(failure, Source().chunks(), shared=False)
        await boarding.flight.leave()
        return failure

    results = await asyncio.gather(*(ask() for _ in range(20)), return_exceptions=True)
    assert leaders == 2, "no herd"
    assert all(result == failure or isinstance(result, OSError) for result in results)


async def test_a_leader_that_leaves_before_there_is_anything_makes_way() -> None:
    all_: Flights[int] = Flights()
    flight = await lead(all_)
    others = [asyncio.create_task(all_.board(KEY, "json", lambda status: True)) for _ in range(3)]
    await asyncio.sleep(0)
    flight.fail(asyncio.CancelledError())
    await asyncio.sleep(0.01)
    done = [task for task in others if task.done()]
    assert len(done) == 1 and done[0].result().head is None
    done[0].result().flight.depart(200, Source().chunks())
    assert [boarding.head for boarding in await asyncio.gather(*others)].count(200) == 2


async def test_a_body_that_breaks_off_breaks_off_for_all() -> None:
    all_: Flights[int] = Flights()
    source = Source()
    flight = await lead(all_)
    flight.depart(200, source.chunks())
    readers = [asyncio.create_task(collect(flight.ride()))]
    readers.append(asyncio.create_task(collect((await all_.board(KEY, "json", lambda status: True)).flight.ride())))
    source.queue.put_nowait(b"half")
    source.queue.put_nowait(OSError("gone"))
    results = await asyncio.gather(*readers, return_exceptions=True)
    assert all(isinstance(result, OSError) for result in results)


async def test_another_shape_waits_for_the_landing() -> None:
    all_: Flights[int] = Flights()
    source = Source()
    flight = await lead(all_)
    flight.depart(200, source.chunks())
    other = asyncio.create_task(all_.board(KEY, "stream", lambda status: True))
    reader = asyncio.create_task(collect(flight.ride()))
    await asyncio.sleep(0.01)
    assert not other.done()
    source.queue.put_nowait(None)
    assert (await other).landed and await reader == b""


async def test_an_endless_body_keeps_memory_flat_and_takes_nobody_new(monkeypatch: pytest.MonkeyPatch) -> None:
    all_: Flights[int] = Flights()
    source = Source()
    flight = await lead(all_)
    flight.depart(200, source.chunks())
    body = flight.ride()
    chunk = b"x" * (1 << 20)
    for _ in range(20):
        source.queue.put_nowait(chunk)
        assert await anext(body) == chunk
    assert len(flight._chunks) <= 2
    await lead(all_)
    await body.aclose()
    assert source.closed
