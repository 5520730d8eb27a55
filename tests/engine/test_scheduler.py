"""Scheduler and prefix cache together, without a model: tokens come from a sum over what was there before."""

from __future__ import annotations

import random

import pytest

from backends.engine.blocks import BlockPool
from backends.engine.prefix_cache import PrefixCache, extend_chain, root_key, salted
from backends.engine.scheduler import Limits, Scheduler
from backends.engine.sequence import SamplingParams, Sequence, State

BLOCK = 4


def make(total: int = 16, step_tokens: int = 16, max_running: int = 8) -> Scheduler:
    cache = PrefixCache(BlockPool(total), root_key({"model": "test"}), BLOCK)
    return Scheduler(cache, Limits(max_running, step_tokens))


def sequence(name: str, prompt: list[int], max_tokens: int = 4, salt: str = "") -> Sequence:
    return Sequence(name, prompt, SamplingParams(max_tokens), salt=salt)


def step(scheduler: Scheduler) -> list[str]:
    """Plan, check the plan, compute it, sample; returns who ran."""
    chunks = scheduler.schedule()
    assert sum(chunk.end - chunk.start for chunk in chunks) <= scheduler.limits.step_tokens + len(scheduler.running)
    for chunk in chunks:
        assert chunk.start == chunk.sequence.computed < chunk.end
        assert len(chunk.sequence.table) * BLOCK >= chunk.end, "every planned token has a block"
    sampling = [chunk.sequence for chunk in chunks if chunk.samples]
    scheduler.computed(chunks)
    for item in sampling:
        item.tokens.append(sum(item.tokens) % 97)
        if item.finish_reason():
            scheduler.finish(item)
    scheduler.pool.check_integrity()
    return [chunk.sequence.id for chunk in chunks]


def run(scheduler: Scheduler, limit: int = 500) -> None:
    for _ in range(limit):
        if scheduler.idle:
            return
        step(scheduler)
    raise AssertionError("the scheduler does not come to an end")


def test_a_second_prompt_finds_the_full_blocks_of_the_first() -> None:
    scheduler = make()
    first, second = sequence("a", list(range(10))), sequence("b", list(range(10)))
    scheduler.add(first)
    run(scheduler)
    scheduler.add(second)
    run(scheduler)
    assert first.cached_tokens == 0 and second.cached_tokens == 8
    assert first.output == second.output


@pytest.mark.parametrize(("length", "cached"), [(7, 4), (8, 4), (9, 8), (3, 0), (4, 0), (5, 4)])
def test_the_last_token_is_never_matched(length: int, cached: int) -> None:
    scheduler = make()
    for name in ("a", "b"):
        last = sequence(name, list(range(length)))
        scheduler.add(last)
        run(scheduler)
    assert last.cached_tokens == cached


def test_generated_tokens_are_found_by_the_next_turn() -> None:
    scheduler = make()
    first = sequence("a", list(range(6)), max_tokens=7)
    scheduler.add(first)
    run(scheduler)
    turn = sequence("b", [*first.tokens, 50, 51])
    scheduler.add(turn)
    run(scheduler)
    assert turn.cached_tokens == 12  # 13 tokens before the new turn, of which the last one was never computed


def test_tenants_with_different_salts_never_meet() -> None:
    scheduler = make()
    for salt in ("a", "b", ""):
        last = sequence(salt, list(range(9)), salt=salt)
        scheduler.add(last)
        run(scheduler)
        assert last.cached_tokens == 0


def test_keys_do_not_depend_on_the_process_and_cover_everything_before_them() -> None:
    root = root_key({"model": "m", "dtype": "bfloat16"})
    assert root == root_key({"dtype": "bfloat16", "model": "m"}) != root_key({"model": "m", "dtype": "float32"})
    chain: list[bytes] = []
    extend_chain(chain, salted(root, ""), list(range(9)), BLOCK)
    assert len(chain) == 2
    other: list[bytes] = []
    extend_chain(other, salted(root, ""), [9, *range(1, 9)], BLOCK)
    assert chain[1] != other[1], "the same second block behind another first block has another key"


def test_a_cold_prompt_that_another_one_is_computing_waits_for_it() -> None:
    scheduler = make(step_tokens=8)
    leader, follower, stranger = (
        sequence("leader", list(range(14))),
        sequence("follower", list(range(14))),
        sequence("stranger", list(range(100, 103))),
    )
    for item in (leader, follower, stranger):
        scheduler.add(item)
    assert step(scheduler) == ["leader"]
    assert step(scheduler) == ["leader", "stranger"], "the follower waits, others do not"
    run(scheduler)
    assert follower.cached_tokens == 12
    assert scheduler.counters.follower_waits > 0


def test_a_follower_goes_on_when_its_leader_is_cancelled() -> None:
    scheduler = make(step_tokens=4)
    leader, follower = sequence("leader", list(range(14))), sequence("follower", list(range(14)))
    scheduler.add(leader)
    scheduler.add(follower)
    step(scheduler)
    scheduler.finish(leader)
    run(scheduler)
    assert follower.state is State.FINISHED and follower.output_len == 4


def test_decodes_go_on_while_a_long_prompt_is_computed_in_chunks() -> None:
    scheduler = make(total=64, step_tokens=8)
    short, long = sequence("short", [1, 2, 3], max_tokens=12), sequence("long", list(range(100)))
    scheduler.add(short)
    step(scheduler)
    scheduler.add(long)
    for _ in range(10):
        ran = step(scheduler)
        assert "short" in ran and "long" in ran


def test_when_blocks_run_out_the_youngest_waits_and_everybody_ends_with_the_same_text() -> None:
    prompts = [[10 * number + offset for offset in range(9)] for number in range(4)]
    alone = []
    for number, prompt in enumerate(prompts):
        scheduler = make()
        alone.append(sequence(str(number), prompt, max_tokens=12))
        scheduler.add(alone[-1])
        run(scheduler)
    scheduler = make(total=9)
    crowd = [sequence(str(number), prompt, max_tokens=12) for number, prompt in enumerate(prompts)]
    for item in crowd:
        scheduler.add(item)
    run(scheduler)
    assert scheduler.counters.preemptions > 0
    assert [item.output for item in crowd] == [item.output for item in alone]


@pytest.mark.parametrize("seed", range(12))
def test_random_traffic_with_cancellations_leaks_nothing(seed: int) -> None:
    chance = random.Random(seed)
    scheduler = make(total=12, step_tokens=chance.choice([4, 8, 32]), max_running=chance.choice([1, 3, 8]))
    alive: list[Sequence] = []
    for number in range(120):
        if chance.random() < 0.4:
            prompt = [chance.choice([1, 2]) for _ in range(chance.randint(1, 20))]
            alive.append(sequence(str(number), prompt, max_tokens=chance.randint(1, 20), salt=chance.choice(["", "t"])))
            scheduler.add(alive[-1])
        if alive and chance.random() < 0.1:
            scheduler.finish(alive.pop(chance.randrange(len(alive))))
        step(scheduler)
    run(scheduler, 2000)
    assert all(item.state is State.FINISHED for item in alive)
    assert scheduler.pool.available == 12


def test_finishing_twice_is_harmless() -> None:
    scheduler = make()
    item = sequence("a", [1, 2, 3])
    scheduler.add(item)
    step(scheduler)
    scheduler.finish(item)
    scheduler.finish(item)
    scheduler.pool.check_integrity()


def test_tenants_take_turns_however_many_requests_one_of_them_has() -> None:
    scheduler = make(total=64, step_tokens=8, max_running=1)
    many = [sequence(f"a{number}", [number, *range(20, 27)], max_tokens=1) for number in range(10)]
    few = [sequence(f"b{number}", [50 + number, *range(60, 67)], max_tokens=1) for number in range(3)]
    for item in many:
        item.tenant = "a"
        scheduler.add(item)
    for item in few:
        item.tenant = "b"
        scheduler.add(item)
    order = [name for _ in range(40) for name in step(scheduler)]
    assert [name[0] for name in order[:7]] in (list("abababa"), list("abababb"))
    run(scheduler)


def test_whoever_was_away_has_saved_up_nothing() -> None:
    scheduler = make(total=64, step_tokens=8, max_running=1)
    for number in range(8):
        item = sequence(f"a{number}", [number, *range(20, 27)], max_tokens=1)
        item.tenant = "a"
        scheduler.add(item)
        run(scheduler)
    items = [(tenant, sequence(f"{tenant}{number}", [50 + 10 * (tenant == "b") + number, *range(30, 37)], max_tokens=1))
             for number in range(4) for tenant in ("a", "b")]  # fmt: skip
    for tenant, item in items:
        item.tenant = tenant
        scheduler.add(item)
    order = [name[0] for _ in range(20) for name in step(scheduler)]
    assert sorted(order[:4]) == list("aabb"), "b, who comes new, does not get all turns first"


def test_the_longest_known_prefix_goes_first_but_nobody_waits_for_ever() -> None:
    scheduler = make(total=64, step_tokens=64, max_running=1)
    seen = list(range(12))
    scheduler.add(sequence("seed", seen, max_tokens=1))
    run(scheduler)
    scheduler.add(sequence("cold", list(range(50, 62)), max_tokens=1))
    order: list[str] = []
    for number in range(40):
        scheduler.add(sequence(f"warm{number}", [*seen, 70 + number], max_tokens=1))
        order += step(scheduler)
    assert order[0].startswith("warm"), "a known prefix is cheap, and goes first"
    assert 10 <= order.index("cold") <= 17


def test_background_work_steps_aside_and_goes_on_later() -> None:
    scheduler = make(total=8, step_tokens=8)
    quiet = sequence("quiet", list(range(24)), max_tokens=2)
    quiet.background = True
    scheduler.add(quiet)
    assert step(scheduler) == ["quiet"]
    loud = sequence("loud", list(range(40, 48)), max_tokens=6)
    scheduler.add(loud)
    ran = [step(scheduler) for _ in range(6)]
    assert ran == [["loud"]] * 6
    run(scheduler)
    assert quiet.output_len == 2 and loud.output_len == 6


def test_background_work_gives_its_memory_and_its_place_to_others() -> None:
    scheduler = make(total=6, step_tokens=16, max_running=1)
    quiet = sequence("quiet", list(range(16)), max_tokens=4)
    quiet.background = True
    scheduler.add(quiet)
    step(scheduler)
    loud = sequence("loud", list(range(40, 56)), max_tokens=2)
    scheduler.add(loud)
    assert step(scheduler) == ["loud"]
    run(scheduler)
    assert quiet.output_len == 4 and loud.output_len == 2


def test_private_work_leaves_no_trace_and_finds_none() -> None:
    scheduler = make()
    scheduler.add(sequence("public", list(range(10))))
    run(scheduler)
    before = scheduler.pool.cached
    hidden = sequence("private", list(range(10)))
    hidden.private = True
    scheduler.add(hidden)
    run(scheduler)
    assert hidden.cached_tokens == 0 and scheduler.pool.cached == before
    other = sequence("other", list(range(100, 110)))
    other.private = True
    scheduler.add(other)
    run(scheduler)
    assert scheduler.pool.cached == before


def test_a_quarantined_block_is_neither_found_nor_published_again() -> None:
    scheduler = make()
    for name in ("a", "b"):
        last = sequence(name, list(range(13)))
        scheduler.add(last)
        run(scheduler)
    assert last.cached_tokens == 12
    scheduler.cache.quarantine(last.chain[1:2])
    for _ in range(2):
        again = sequence("c", list(range(13)))
        scheduler.add(again)
        run(scheduler)
        assert again.cached_tokens == 4


def test_nobody_waits_for_a_leader_that_stands_aside() -> None:
    scheduler = make(total=32, step_tokens=8)
    warm_up = sequence("warm", list(range(24)), max_tokens=1)
    warm_up.background = True
    scheduler.add(warm_up)
    assert step(scheduler) == ["warm"]
    asked = sequence("asked", [*range(24), 50], max_tokens=2)
    scheduler.add(asked)
    assert step(scheduler) == ["asked"], "its prefix is half computed by somebody who is not computing"
    run(scheduler)
    assert asked.output_len == 2 and warm_up.output_len == 1


def test_a_flood_of_one_tenant_does_not_hide_another() -> None:
    scheduler = make(total=64, step_tokens=8, max_running=1)
    for number in range(150):
        item = sequence(f"a{number}", [number % 97, *range(20, 27)], max_tokens=1)
        item.tenant = "a"
        scheduler.add(item)
    for _ in range(40):
        step(scheduler)
    for number in range(30):
        item = sequence(f"b{number}", [number, *range(60, 67)], max_tokens=1)
        item.tenant = "b"
        scheduler.add(item)
    order = [name[0] for _ in range(60) for name in step(scheduler)]
    assert abs(order[:40].count("b") - 20) <= 4, "turns, from the first to the last"


def test_background_work_has_no_share() -> None:
    scheduler = make(total=64, step_tokens=8, max_running=1)
    idle = sequence("idle", list(range(30)), max_tokens=1)
    idle.background, idle.tenant = True, "b"
    scheduler.add(idle)
    for number in range(5):
        for tenant in ("a", "b"):
            item = sequence(f"{tenant}{number}", [50 + 10 * (tenant == "b") + number, *range(40, 47)], max_tokens=1)
            item.tenant = tenant
            scheduler.add(item)
    order = [name[0] for _ in range(10) for name in step(scheduler)]
    assert sorted(order[:6]) == list("aaabbb")
