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
