"""The ladder: order of tiers, checks, cost model, breaker, bounded queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import pytest

from backends.engine.prefix_cache import root_key
from backends.engine.tiers import ladder as module
from backends.engine.tiers.codec import Unsound, seal, unseal
from backends.engine.tiers.ladder import Ladder, Load, Wanted
from backends.engine.tiers.ram import RamTier
from tests.conftest import eventually

ROOT = root_key({"model": "test"})


def wanted(number: int) -> Wanted:
    return Wanted(number.to_bytes(32, "big"), (number, number + 1))


class Named(RamTier):
    """A RAM tier that can fail and be slow."""

    def __init__(self, name: str) -> None:
        super().__init__(1 << 20, 3600.0)
        self.name = name
        self.error: Exception | None = None
        self.calls = 0
        self.hold = threading.Event()
        self.hold.set()

    def has(self, keys: Sequence[bytes]) -> int:
        self.hold.wait()
        self.calls += 1
        if self.error:
            raise self.error
        return super().has(keys)


def find(ladder: Ladder, numbers: Sequence[int]) -> list[bytes]:
    done = threading.Event()
    load: list[Load] = []

    def on_done(found: Load) -> None:
        load.append(found)
        done.set()

    ladder.find([wanted(number) for number in numbers], on_done)
    assert done.wait(5)
    return [bytes(payload) for payload in load[0].payloads]


@pytest.fixture
def make() -> Callable[..., Ladder]:
    return lambda *tiers, clock=None: Ladder(tiers, ROOT, clock=clock) if clock else Ladder(tiers, ROOT)


def test_what_is_stored_reaches_every_tier_and_is_found_up_to_a_gap(make: Callable[..., Ladder]) -> None:
    upper, lower = Named("ram"), Named("disk")
    ladder = make(upper, lower)
    for number in (1, 2, 4):
        ladder.store(wanted(number), lambda number=number: lambda: b"block %d" % number)
    ladder.close()
    again = make(upper2 := Named("ram"), lower)
    assert upper.bytes_used == 0 and lower.bytes_used == 0, "closing a RAM tier empties it"
    for number in (1, 2, 4):
        lower.put(wanted(number).key, seal(ROOT, wanted(number).key, wanted(number).tokens, b"block %d" % number))
    assert find(again, [1, 2, 3, 4]) == [b"block 1", b"block 2"]
    assert upper2.has([wanted(1).key, wanted(2).key]) == 2, "what was loaded is promoted"
    assert [state.hits for state in again.states] == [0, 2]
    again.close()


def test_a_lower_tier_goes_on_where_the_upper_one_ends(make: Callable[..., Ladder]) -> None:
    upper, lower = Named("ram"), Named("disk")
    for number, tier in ((1, upper), (2, lower), (3, lower)):
        tier.put(wanted(number).key, seal(ROOT, wanted(number).key, wanted(number).tokens, b"%d" % number))
    ladder = make(upper, lower)
    assert find(ladder, [1, 2, 3]) == [b"1", b"2", b"3"]
    ladder.close()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda sealed: sealed[:-1],
        lambda sealed: sealed + b"x",
        lambda sealed: sealed[:20],
        lambda sealed: b"",
        lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1]),
        lambda sealed: sealed[:90] + bytes([sealed[90] ^ 1]) + sealed[91:],
        lambda sealed: b"HKV0" + sealed[4:],
        lambda sealed: seal(root_key({"model": "other"}), wanted(1).key, wanted(1).tokens, b"1"),
        lambda sealed: seal(ROOT, wanted(2).key, wanted(1).tokens, b"1"),
        lambda sealed: seal(ROOT, wanted(1).key, (8, 9), b"1"),
    ],
)
def test_unsound_blocks_are_ignored_counted_and_removed(
    make: Callable[..., Ladder], spoil: Callable[[bytes], bytes]
) -> None:
    good = seal(ROOT, wanted(1).key, wanted(1).tokens, b"payload of one")
    assert bytes(unseal(good, ROOT, wanted(1).key, wanted(1).tokens)) == b"payload of one"
    with pytest.raises(Unsound):
        unseal(spoil(good), ROOT, wanted(1).key, wanted(1).tokens)
    tier = Named("disk")
    tier.put(wanted(1).key, spoil(good))
    ladder = make(tier)
    assert find(ladder, [1]) == [] and ladder.states[0].unsound == 1
    assert tier.has([wanted(1).key]) == 0
    ladder.close()


def test_a_tier_that_fails_is_left_alone_and_tried_again(make: Callable[..., Ladder]) -> None:
    now = [0.0]
    tier = Named("redis")
    ladder = make(tier, clock=lambda: now[0])
    tier.error = OSError("gone")
    for _ in range(10):
        assert find(ladder, [1]) == []
    assert tier.calls == module.FAULTS_TO_OPEN and ladder.states[0].faults == module.FAULTS_TO_OPEN
    tier.error = None
    tier.put(wanted(1).key, seal(ROOT, wanted(1).key, wanted(1).tokens, b"1"))
    assert find(ladder, [1]) == [], "still open"
    now[0] += module.OPEN_SECONDS + 0.1
    assert find(ladder, [1]) == [b"1"]
    ladder.close()


def test_a_load_that_would_be_slower_than_computing_is_skipped(make: Callable[..., Ladder]) -> None:
    tier = Named("disk")
    ladder = make(tier)
    for number in range(1, 4):
        tier.put(wanted(number).key, seal(ROOT, wanted(number).key, wanted(number).tokens, bytes(1000)))
    ladder.prefill_rate = 1e12
    assert len(find(ladder, [1])) == 1, "the first load is the measurement"
    ladder.states[0].bytes_per_second = 1000.0
    assert find(ladder, [1, 2]) == [] and ladder.states[0].skipped == 1
    ladder.prefill_rate = 0.1
    assert len(find(ladder, [1, 2, 3])) == 3
    ladder.close()


def test_writes_beyond_the_queue_are_dropped_and_counted(make: Callable[..., Ladder]) -> None:
    tier = Named("disk")
    ladder = make(tier)
    tier.hold.clear()
    ladder.find([wanted(1)], lambda load: None)  # keeps the thread busy
    for number in range(module.QUEUE_BLOCKS + 10):
        ladder.store(wanted(number), lambda: lambda: b"x")
    assert ladder.dropped == 10
    tier.hold.set()
    ladder.close()


def test_clearing_forgets_what_waits_and_what_is_there(make: Callable[..., Ladder]) -> None:
    tier = Named("disk")
    ladder = make(tier)
    ladder.store(wanted(1), lambda: lambda: b"x")
    ladder.clear()
    assert find(ladder, [1]) == []
    ladder.close()


def test_a_block_says_where_it_was_and_climbs_only_after_it_was_handed_over(make: Callable[..., Ladder]) -> None:
    upper, lower = Named("ram"), Named("disk")
    ladder = make(upper, lower)
    lower.put(wanted(2).key, seal(ROOT, wanted(2).key, wanted(2).tokens, b"2"))
    upper.put(wanted(1).key, seal(ROOT, wanted(1).key, wanted(1).tokens, b"1"))
    there: list[int] = []
    done = threading.Event()
    loads: list[Load] = []

    def on_done(load: Load) -> None:
        there.append(upper.has([wanted(2).key]))
        loads.append(load)
        done.set()

    ladder.find([wanted(1), wanted(2)], on_done)
    assert done.wait(10)
    assert loads[0].sources == ["ram", "disk"] and there == [0], "nobody waits for the copy"
    assert eventually(lambda: upper.has([wanted(2).key]))


def test_deleted_blocks_are_gone_from_every_tier_and_from_the_queue(make: Callable[..., Ladder]) -> None:
    upper, lower = Named("ram"), Named("disk")
    ladder = make(upper, lower)
    for number in (1, 2):
        ladder.store(wanted(number), lambda: lambda: b"x")
    assert eventually(lambda: lower.has([wanted(1).key, wanted(2).key]) == 2)
    upper.hold.clear()
    for number in (3, 4, 5):
        ladder.store(wanted(number), lambda: lambda: b"x")
    ladder.delete([wanted(1).key, wanted(5).key])
    upper.hold.set()
    assert eventually(lambda: not lower.has([wanted(1).key]))
    assert eventually(lambda: lower.has([wanted(4).key]) == 1)
    assert not upper.has([wanted(5).key]) and not lower.has([wanted(5).key]) and lower.has([wanted(2).key])
