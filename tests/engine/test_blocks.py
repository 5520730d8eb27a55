"""The block pool against a naive model of itself, after every random step."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from backends.engine.blocks import BlockPool

TOTAL = 6


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, publish and give back blocks; the model knows only who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.holders: list[list[int]] = []
        self.serial = 0

    @rule(count=st.integers(1, TOTAL + 1))
    def allocate(self, count: int) -> None:
        held = {block for table in self.holders for block in table}
        blocks = self.pool.allocate(count)
        if count > TOTAL - len(held):
            assert blocks is None
        else:
            assert blocks is not None and len(set(blocks)) == count and not held & set(blocks) and 0 not in blocks
            self.holders.append(blocks)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.holders))
        block = data.draw(st.sampled_from(table))
        self.serial += 1
        self.pool.publish(block, b"key%d" % data.draw(st.integers(0, 4)), [1, 2])

    @rule(key=st.integers(0, 4))
    def find_and_share(self, key: int) -> None:
        block = self.pool.find(b"key%d" % key, [1, 2])
        if block is not None:
            self.pool.retain([block])
            self.holders.append([block])

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.holders))
        self.holders.remove(table)
        self.pool.release(table)

    @rule(key=st.integers(0, 4))
    def pin(self, key: int) -> None:
        self.pool.pin([b"key%d" % key])

    @rule(key=st.integers(0, 4))
    def forget(self, key: int) -> None:
        self.pool.forget([b"key%d" % key])
        assert self.pool.find(b"key%d" % key, [1, 2]) is None

    @rule()
    def unpin(self) -> None:
        self.pool.unpin_all()

    @rule(age=st.floats(0.5, 3.0))
    def time_goes_by(self, age: float) -> None:
        self.pool.now += 1.0
        self.pool.expire(self.pool.now - age)

    @rule()
    def drop(self) -> None:
        self.pool.drop_cached()

    @invariant()
    def accounts_add_up(self) -> None:
        self.pool.check_integrity()
        held = {block for table in self.holders for block in table}
        assert self.pool.available == TOTAL - len(held)
        assert all(self.pool.in_use(block) == (block in held) for block in range(1, TOTAL + 1))


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_hash_alone_is_not_trusted() -> None:
    pool = BlockPool(2)
    (block,) = pool.allocate(1) or []
    pool.publish(block, b"k", [1, 2, 3])
    assert pool.find(b"k", [1, 2, 3]) == block
    assert pool.find(b"k", [1, 2, 4]) is None


def test_tails_are_evicted_before_heads_and_the_oldest_first() -> None:
    pool = BlockPool(4)
    for name in (b"a", b"b"):
        table = pool.allocate(2) or []
        for index, block in enumerate(table):
            pool.publish(block, name + b"%d" % index, [index])
        pool.release(table)
    pool.allocate(1)
    assert pool.find(b"a1", [1]) is None and pool.find(b"a0", [0]) is not None
    pool.allocate(1)
    assert pool.find(b"a0", [0]) is None and pool.find(b"b0", [0]) is not None


def test_releasing_too_often_is_an_error_not_a_leak() -> None:
    pool = BlockPool(1)
    table = pool.allocate(1) or []
    pool.release(table)
    with pytest.raises(AssertionError):
        pool.release(table)


def fill(pool: BlockPool, name: bytes) -> None:
    (block,) = pool.allocate(1) or []
    pool.publish(block, name, [0])
    pool.release([block])


def hit(pool: BlockPool, name: bytes) -> None:
    block = pool.find(name, [0])
    assert block is not None
    pool.retain([block])
    pool.release([block])


def test_a_flood_of_single_prompts_does_not_wash_out_what_is_shared() -> None:
    pool = BlockPool(8)
    for name in (b"shared", b"pinned"):
        fill(pool, name)
    pool.pin([b"pinned"])
    hit(pool, b"shared")
    hit(pool, b"shared")
    for number in range(50):
        fill(pool, b"%d" % number)
    assert pool.find(b"shared", [0]) is not None and pool.find(b"pinned", [0]) is not None
    pool.check_integrity()


def test_under_pressure_even_pinned_blocks_give_way_the_others_first() -> None:
    pool = BlockPool(3)
    fill(pool, b"once")
    fill(pool, b"pinned")
    pool.pin([b"pinned"])
    fill(pool, b"shared")
    hit(pool, b"shared")
    hit(pool, b"shared")
    for gone in (b"once", b"shared", b"pinned"):
        assert pool.find(gone, [0]) is not None
        assert pool.allocate(1)
        assert pool.find(gone, [0]) is None


def test_what_is_shared_may_not_take_all_and_ages() -> None:
    pool = BlockPool(4)
    for name in (b"a", b"b", b"c", b"d"):
        fill(pool, name)
        hit(pool, name)
        hit(pool, name)
    assert pool.allocate(1)
    assert pool.find(b"a", [0]) is None, "the least recently used of the shared ones is as good as any"


def test_a_block_is_gone_when_nobody_used_it_for_long_unless_pinned() -> None:
    pool = BlockPool(4)
    for name in (b"old", b"pinned", b"used"):
        fill(pool, name)
    pool.pin([b"pinned"])
    pool.now = 10.0
    hit(pool, b"used")
    assert pool.expire(5.0) == 1
    assert pool.find(b"old", [0]) is None
    assert pool.find(b"used", [0]) is not None and pool.find(b"pinned", [0]) is not None
