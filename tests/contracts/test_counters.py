"""One suite over every `CounterStore`: in this process, and in a real Redis."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gateway.stores.contract import CounterStore
from gateway.stores.redis_counters import RedisCounters
from gateway.stores.sqlite_counters import LocalCounters
from policies.budget import Account
from policies.rate_limit import Limit
from tests.conftest import comes
from tests.servers import RedisServer

REQUESTS = Limit("t", "requests", 3, 60.0)
TOKENS = Limit("t", "tokens", 100, 60.0)
AT_ONCE = Limit("t", "concurrency", 2, 0.0)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(params=["local", "redis"])
async def counters(request: pytest.FixtureRequest, tmp_path: Path, server: RedisServer) -> AsyncIterator[CounterStore]:
    local = LocalCounters(tmp_path / "money.sqlite")
    prefix = f"test-{time.time_ns()}:"
    store: Any = local if request.param == "local" else RedisCounters(server.url, local, prefix, timeout=10)
    await store.open()
    yield store
    await store.close()


async def taken(store: CounterStore, *wanted: tuple[Limit, int], holder: str = "h") -> bool:
    states, _ = await store.take(wanted, holder)
    return not any(state.wait for state in states)


async def becomes(what: Callable[[], Awaitable[object]], value: object) -> None:
    """What is told behind the caller's back arrives."""
    for _ in range(1000):
        if await what() == value:
            return
        await asyncio.sleep(0.02)
    assert await what() == value


async def used(store: CounterStore, limit: Limit, amount: int) -> None:
    async def now() -> int:
        (state,), _ = await store.take([(limit, 0)], "nobody")
        return state.used

    await becomes(now, amount)


async def test_a_limit_admits_so_many_and_says_how_long_to_wait(counters: CounterStore) -> None:
    assert [await taken(counters, (REQUESTS, 1)) for _ in range(5)] == [True, True, True, False, False]
    (state,), _ = await counters.take([(REQUESTS, 1)], "h")
    assert 50 < state.wait <= 61 and state.remaining == 0
    (state,), _ = await counters.take([(Limit("other", "requests", 3, 60.0), 1)], "h")
    assert state.wait == 0 and state.remaining == 2, "another one's is another matter"


async def test_all_or_none(counters: CounterStore) -> None:
    assert not await taken(counters, (TOKENS, 10), (REQUESTS, 4))
    (state,), _ = await counters.take([(TOKENS, 0)], "h")
    assert state.used == 0


async def test_settling_gives_back_or_takes_more_even_beyond_the_limit(counters: CounterStore) -> None:
    _, taken_then = await counters.take([(TOKENS, 80)], "h")
    counters.give([(TOKENS, -50)], taken_then, "h")
    await used(counters, TOKENS, 30)
    assert await taken(counters, (TOKENS, 70)) and not await taken(counters, (TOKENS, 1))
    counters.give([(TOKENS, 30)], taken_then, "h")
    await used(counters, TOKENS, 130)
    (state,), _ = await counters.take([(TOKENS, 0)], "h")
    assert state.used == 130 and state.wait > 0


async def test_concurrency_is_given_back(counters: CounterStore) -> None:
    at = {}
    for holder in "abc":
        states, at[holder] = await counters.take([(AT_ONCE, 1)], holder)
        assert bool(states[0].wait) is (holder == "c")
    counters.give([(AT_ONCE, -1)], at["a"], "a")
    await becomes(lambda: taken(counters, (AT_ONCE, 1), holder="d"), True)
    assert not await taken(counters, (AT_ONCE, 1), holder="e")


async def test_many_at_once_never_get_more_than_there_is(counters: CounterStore) -> None:
    limit = Limit("crowd", "requests", 25, 60.0)
    got = await asyncio.gather(*(taken(counters, (limit, 1), holder=str(number)) for number in range(80)))
    assert sum(got) == 25


def money(limit: int, name: str = "t|2026-11") -> tuple[Account, ...]:
    return (Account(name, limit, time.time() + 1000),)


async def test_money_that_is_held_cannot_be_held_again(counters: CounterStore) -> None:
    assert await counters.reserve(money(100), 60, "a") is None
    short = await counters.reserve(money(100), 60, "b")
    assert short is not None and short.key == "t|2026-11"
    counters.settle(money(100), 10, "a")
    await becomes(lambda: counters.spent(money(100)), [(10, 0)])
    assert await counters.reserve(money(100), 90, "b") is None
    assert await counters.spent(money(100)) == [(10, 90)]
    counters.settle(money(100), 0, "b")
    await becomes(lambda: counters.spent(money(100)), [(10, 0)])  # nothing came of it


async def test_money_never_drifts(counters: CounterStore) -> None:
    """What is booked is the sum of what was settled, whatever was held before, and held is what is under way."""
    amounts = [(number * 7919) % 1000 for number in range(60)]

    async def one(number: int, amount: int) -> int:
        if await counters.reserve(money(10_000), amount, f"r{number}") is not None:
            return 0
        await asyncio.sleep(0)
        counters.settle(money(10_000), amount // 2, f"r{number}")
        return amount // 2

    total = sum(await asyncio.gather(*(one(number, amount) for number, amount in enumerate(amounts))))
    await becomes(lambda: counters.spent(money(10_000)), [(total, 0)])
    assert 0 < total <= 10_000


async def test_what_was_spent_outlives_a_restart_and_what_was_held_does_not(tmp_path: Path) -> None:
    first = LocalCounters(tmp_path / "money.sqlite")
    await first.open()
    assert await first.reserve(money(100), 30, "a") is None and await first.reserve(money(100), 50, "b") is None
    first.settle(money(100), 25, "a")
    await first.close()
    second = LocalCounters(tmp_path / "money.sqlite")
    await second.open()
    assert await second.spent(money(100)) == [(25, 0)]
    await second.close()


async def test_several_processes_share_the_money_and_divide_the_rates(tmp_path: Path) -> None:
    one, two = (LocalCounters(tmp_path / "money.sqlite", processes=2) for _ in range(2))
    await one.open()
    await two.open()
    await two.spent(money(100))
    one.settle(money(100), 40, "a")
    two.settle(money(100), 2, "b")
    for each in (one, two):
        await becomes(lambda store=each: store.spent(money(100)), [(42, 0)])  # type: ignore[misc]
    limit = Limit("t", "requests", 10, 60.0)
    assert [sum([await taken(each, (limit, 1)) for _ in range(9)]) for each in (one, two)] == [5, 5]
    await one.close()
    await two.close()


async def test_without_redis_each_counts_by_itself_and_what_was_spent_is_booked_later(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        store = RedisCounters(server.url, LocalCounters(tmp_path / "money.sqlite"), timeout=4)
        await store.open()
        states, there = await store.take([(REQUESTS, 1), (AT_ONCE, 1)], "a")
        assert not any(state.wait for state in states) and not there.here and not store.estimated
        server.pause()
        began = time.monotonic()
        assert [await taken(store, (REQUESTS, 1)) for _ in range(5)] == [True, True, True, False, False]
        assert time.monotonic() - began < 5 * 4 and store.estimated, "Redis is waited for once, not five times"
        _, here = await store.take([(AT_ONCE, 1)], "b")
        assert here.here
        store.settle(money(100), 7, "a")
        store.give([(AT_ONCE, -1)], there, "a")
        server.resume()
        store._away_until = 0.0
        store.give([(AT_ONCE, -1)], here, "b")

        async def settled() -> object:
            return await store.spent(money(100)), bool(store._waiting), store.estimated

        await becomes(settled, ([(7, 0)], False, False))
        assert [await taken(store, (AT_ONCE, 1), holder=name) for name in "cde"] == [True, True, False], (
            "all given back"
        )
        states, _ = await store._local.take([(AT_ONCE, 2)], "f")
        assert not states[0].wait, "here, too"
        await store.close()


async def test_a_settlement_that_was_made_but_not_answered_is_not_made_twice(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        store = RedisCounters(server.url, LocalCounters(tmp_path / "money.sqlite"), timeout=10)
        await store.open()
        keys = [*store._accounts(money(100)), "hitherto:settled:a"]
        for _ in range(2):
            await store._scripts["settle"](keys=keys, args=["a", 7, int(time.time()) + 1000])
        assert await store.spent(money(100)) == [(7, 0)]
        await store.close()


async def test_money_is_written_once_however_it_ends(tmp_path: Path) -> None:
    for number in range(20):
        store = LocalCounters(tmp_path / "money.sqlite")
        await store.open()
        for each in range(10):
            store.settle(money(10**9), 1, f"{number}-{each}")
            if each == 5:
                asyncio.ensure_future(store._flush())  # noqa: RUF006 - one that is under way at the end
                await asyncio.sleep(0)
        await asyncio.gather(store.close(), store.spent(money(10**9)))
    again = LocalCounters(tmp_path / "money.sqlite")
    await again.open()
    assert await again.spent(money(10**9)) == [(200, 0)]
    await again.close()


async def test_a_locked_file_loses_nothing(tmp_path: Path) -> None:
    store = LocalCounters(tmp_path / "money.sqlite")
    await store.open()
    store.settle(money(100), 60, "a")
    await store._flush()
    locker = sqlite3.connect(tmp_path / "money.sqlite")
    locker.execute("BEGIN EXCLUSIVE")
    store.settle(money(100), 30, "b")
    await store._flush()
    assert await store.spent(money(100)) == [(90, 0)] and await store.reserve(money(100), 20, "c") is not None
    locker.rollback()
    locker.close()
    await store.close()
    again = LocalCounters(tmp_path / "money.sqlite")
    await again.open()
    assert await again.spent(money(100)) == [(90, 0)]
    await again.close()


async def test_who_leaves_while_money_is_read_takes_nobodys_along(tmp_path: Path) -> None:
    store = LocalCounters(tmp_path / "money.sqlite")
    await store.open()
    store.settle(money(10**6), 777, "a")
    leaving = asyncio.create_task(store.reserve(money(100, "new|2026-11"), 1, "b"))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await store.close()
    again = LocalCounters(tmp_path / "money.sqlite")
    await again.open()
    assert await again.spent(money(10**6)) == [(777, 0)]
    await again.close()


async def test_what_redis_refuses_for_ever_does_not_hold_up_the_rest(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        store = RedisCounters(server.url, LocalCounters(tmp_path / "money.sqlite"), timeout=10)
        await store.open()
        await store._redis.set("hitherto:money:odd", "no hash")
        store.settle((Account("odd", 5, time.time() + 1000),), 1, "a")
        store.settle(money(100), 7, "b")
        assert await comes(lambda: not store._waiting)
        assert await store.spent(money(100)) == [(7, 0)] and not store.estimated
        await store.close()
