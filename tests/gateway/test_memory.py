"""The size budget, and who gives way."""

from __future__ import annotations

import random

from gateway.cache.memory import OVERHEAD, Memory
from gateway.stores.contract import Entry, Known


def known(size: int = 0, cost: float = 10.0, used: float = 100.0, kept_until: float = 1e9) -> Known:
    return Known(used, kept_until, kept_until, size, cost, True, used)


def test_bytes_are_counted_whatever_comes_and_goes() -> None:
    memory, model, chance = Memory(1 << 30), {}, random.Random(1)
    for number in range(2000):
        key = bytes([chance.randrange(50)])
        if chance.random() < 0.6:
            model[key] = chance.randrange(1000)
            memory.add(key, known(model[key], used=float(number)))
        else:
            assert (memory.remove(key) is not None) == (model.pop(key, None) is not None)
        assert memory.bytes == sum(size + OVERHEAD for size in model.values())
        assert len(memory) == len(model) and all(key in memory for key in model)


def test_the_least_recently_used_goes_first_where_all_else_is_equal() -> None:
    memory = Memory(1)
    for number in range(10):
        memory.add(b"%d" % number, known(used=float(number)))
    memory.get(b"0").used = 50.0  # type: ignore[union-attr]
    assert memory.over() and memory.least(100.0) == b"1"


def test_what_was_dear_to_compute_stays_longer_and_what_is_big_goes_sooner() -> None:
    memory = Memory(1)
    memory.add(b"cheap", known(cost=10, used=90))
    memory.add(b"dear", known(cost=1000, used=50))
    assert memory.least(100.0) == b"cheap"
    memory.add(b"big", known(size=100_000, cost=10, used=95))
    assert memory.least(100.0) == b"big"
    memory.add(b"dead", known(cost=1e9, kept_until=99.0))
    assert memory.least(100.0) == b"dead" and memory.dead(100.0) == [b"dead"]


def test_among_many_a_sample_finds_a_poor_one_in_no_time() -> None:
    memory = Memory(1)
    for number in range(5000):
        memory.add(b"%05d" % number, known(used=float(number)))
    chosen = [int(memory.least(5000.0)) for _ in range(200)]
    assert sum(chosen) / len(chosen) < 400, "on average among the oldest tenth"


def test_only_some_bodies_are_kept_at_hand() -> None:
    memory = Memory(1 << 40)
    for number in range(70):
        key = b"%d" % number
        body = b"x" * (1 << 20)
        memory.add(key, known(1 << 20), Entry(key, b"", "", "", "", "", None, body, True, 0.0, 1e9))
    held = [number for number in range(70) if memory.body(b"%d" % number) is not None]
    assert held == list(range(held[0], 70)) and 55 < len(held) < 66
