"""Lower tiers under the real engine: found after a restart, shared through Redis, harmless when they fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from backends.engine.config import DiskConfig, EngineConfig, KVConfig, RedisConfig
from backends.engine.engine import Engine
from backends.engine.load import Loaded, load
from backends.engine.lower import build_tiers
from backends.engine.sequence import SamplingParams, Sequence
from tests.conftest import eventually
from tests.engine.running import compute
from tests.servers import RedisServer

SYSTEM = "You are a careful assistant who answers in one short sentence. " * 20


@pytest.fixture(scope="module")
def thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


@pytest.fixture(scope="module")
def loaded(model_folder: Path, thread: ThreadPoolExecutor) -> Loaded:
    config = EngineConfig(model=str(model_folder), dtype="bfloat16", kv=KVConfig(device=256 << 20))  # type: ignore[arg-type]
    return thread.submit(load, config, model_folder, lambda line: None).result()


@contextmanager
def engine(loaded: Loaded, thread: ThreadPoolExecutor, data: Path, **kv: object) -> Iterator[Engine]:
    """A fresh engine (its device pool is empty) over the same model and the given tiers."""
    settings = KVConfig(device=256 << 20, **kv)  # type: ignore[arg-type]
    config = EngineConfig(model="x", kv=settings)
    engine = Engine(loaded, config, thread=thread, tiers=build_tiers(settings, data))
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
        engine.cache.pool.check_integrity()


def ask(engine: Engine, question: str, tokens: int = 12) -> tuple[list[int], int]:
    """Output tokens, and how many of the prompt were cached."""
    prompt = engine.loaded.text.encode_chat(
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
    )
    params = SamplingParams(tokens, temperature=0.0)
    (output,), (cached,) = compute(engine, [prompt], params, engine.loaded.eos)
    return output, cached


DISK = {"disk": DiskConfig(path="kv", size=1 << 30)}  # type: ignore[arg-type]


def test_a_restart_finds_its_prefixes_on_disk(loaded: Loaded, thread: ThreadPoolExecutor, tmp_path: Path) -> None:
    with engine(loaded, thread, tmp_path, **DISK) as first:
        cold, none = ask(first, "What is the capital of France?")
    with engine(loaded, thread, tmp_path, **DISK) as second:
        warm, cached = ask(second, "What is the capital of France?")
        assert none == 0 and cached > 200 and warm == cold
        assert second.tier_stats()["disk"]["hits"] == cached / second.cache.block_size
        other, also = ask(second, "Name a fruit.")
        assert also > 200
    with engine(loaded, thread, tmp_path) as plain:
        assert ask(plain, "Name a fruit.")[0] == other


def test_a_spoiled_file_is_recomputed_around(loaded: Loaded, thread: ThreadPoolExecutor, tmp_path: Path) -> None:
    with engine(loaded, thread, tmp_path, **DISK) as first:
        cold, _ = ask(first, "Who wrote Hamlet?")
    files = sorted((tmp_path / "kv").glob("??/*.kv"))
    for path in files:
        path.write_bytes(path.read_bytes()[:-5] + b"spoil")
    with engine(loaded, thread, tmp_path, **DISK) as second:
        warm, cached = ask(second, "Who wrote Hamlet?")
        assert warm == cold and cached == 0 and second.tier_stats()["disk"]["unsound"] >= 1


def test_a_second_engine_finds_them_in_redis_and_lives_without_it(
    loaded: Loaded, thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with RedisServer(tmp_path) as server:
        shared = {"redis": RedisConfig(url=server.url, size=1 << 30, timeout=5.0), "deadline": 20.0}  # type: ignore[arg-type]
        hasty = {"redis": RedisConfig(url=server.url, size=1 << 30, timeout=0.3), "deadline": 1.0}  # type: ignore[arg-type]
        with engine(loaded, thread, tmp_path, **shared) as first:
            cold, _ = ask(first, "Is water wet?")
        with engine(loaded, thread, tmp_path, **shared) as second:
            warm, cached = ask(second, "Is water wet?")
            assert warm == cold and cached > 200
        with engine(loaded, thread, tmp_path, **hasty) as third:
            server.pause()
            slow, cached = ask(third, "Is water wet?")
            assert slow == cold and cached == 0
            server.resume()
            assert eventually(lambda: third.tier_stats()["redis"]["faults"] >= 1)
    with engine(loaded, thread, tmp_path, **hasty) as fourth:
        gone, cached = ask(fourth, "Is water wet?")
        assert gone == cold and cached == 0


def test_a_load_past_its_deadline_is_not_waited_for(loaded: Loaded, thread: ThreadPoolExecutor, tmp_path: Path) -> None:
    with engine(loaded, thread, tmp_path, **DISK) as first:
        cold, _ = ask(first, "Why is the sky blue?")
    with engine(loaded, thread, tmp_path, **DISK, deadline=0.05) as second:
        assert second.lower is not None
        go = threading.Event()
        second.lower.ladder._at_once(lambda: go.wait(60))
        warm, cached = ask(second, "Why is the sky blue?")
        go.set()
        assert warm == cold and cached == 0 and second.lower.late == 1


def test_a_cancelled_request_leaves_a_load_behind_that_harms_nobody(
    loaded: Loaded, thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with engine(loaded, thread, tmp_path, **DISK) as first:
        cold, _ = ask(first, "List three colours.")
    with engine(loaded, thread, tmp_path, **DISK) as second:
        assert second.lower is not None
        second.lower.ladder._at_once(lambda: time.sleep(0.3))
        prompt = loaded.text.encode_chat(
            [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "List three colours."}]
        )
        gone = Sequence("gone", prompt, SamplingParams(4))
        second.submit(gone)
        time.sleep(0.1)
        second.cancel(gone)
        warm, cached = ask(second, "List three colours.")
        assert warm == cold and cached > 200
        assert eventually(lambda: second.cache.pool.available == second.cache.pool.total)


def test_it_is_told_in_which_tier_the_reused_tokens_were(
    loaded: Loaded, thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with engine(loaded, thread, tmp_path, **DISK) as first:
        ask(first, "How deep is the sea?")
    with engine(loaded, thread, tmp_path, **DISK) as second:
        _, cached = ask(second, "How deep is the sea?")
        assert dict(second.scheduler.counters.cached_tokens) == {"disk": cached}
        _, again = ask(second, "How deep is the sea?")
        assert dict(second.scheduler.counters.cached_tokens) == {"disk": cached, "device": again}


def test_eight_bit_blocks_are_half_as_large_and_say_nearly_the_same(
    loaded: Loaded, thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    sizes = {}
    for int8 in (False, True):
        data = tmp_path / str(int8)
        with engine(loaded, thread, data, int8=int8, **DISK) as first:
            cold, _ = ask(first, "What is the capital of France?")
        with engine(loaded, thread, data, int8=int8, **DISK) as second:
            warm, cached = ask(second, "What is the capital of France?")
            assert cached > 200 and warm[:4] == cold[:4]
            sizes[int8] = second.tier_stats()["disk"]["bytes"]
    assert sizes[False] > 1 << 20, "known from the start, before anything is written"
    assert sizes[True] < 0.62 * sizes[False]


def test_a_prefix_larger_than_the_device_brings_its_head_and_washes_nothing_of_its_own_out(
    loaded: Loaded, thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    with engine(loaded, thread, tmp_path, **DISK) as first:
        cold, _ = ask(first, "How high is the moon?")
    with engine(loaded, thread, tmp_path, **DISK) as second:
        pool = second.cache.pool
        # Just enough is left for the prompt of 17 blocks and its answer.
        taken = second.call(lambda: pool.allocate(pool.total - 24)).result(10) or []
        warm, cached = ask(second, "How high is the moon?")
        assert warm == cold and cached > 200
        second.call(lambda: pool.release(taken)).result(10)


def test_a_purge_is_over_when_it_says_so(loaded: Loaded, thread: ThreadPoolExecutor, tmp_path: Path) -> None:
    with engine(loaded, thread, tmp_path, **DISK) as running:
        ask(running, "What is a purge?")
        assert eventually(lambda: running.tier_stats()["disk"]["bytes"] > 1 << 20)
        running.purge().result(10)
        assert not list((tmp_path / "kv").glob("??/*.kv"))
        assert ask(running, "What is a purge?")[1] == 0


def spoil(engine: Engine) -> None:
    """Change KV in the device's pool behind everybody's back, as a broken machine would."""
    engine.call(lambda: engine.loaded.runner.pool.data[1:].neg_()).result(10)  # type: ignore[union-attr]


def test_a_wrong_block_is_found_out_and_taken_out_of_use(
    loaded: Loaded, thread: ThreadPoolExecutor, tmp_path: Path
) -> None:
    settings = KVConfig(device=256 << 20, ram=1 << 28)  # type: ignore[arg-type]
    config = EngineConfig(model="x", kv=settings, verify_share=1.0)
    watched = Engine(loaded, config, thread=thread, tiers=build_tiers(settings, tmp_path))
    watched.start()
    try:
        right, _ = ask(watched, "What is the capital of France?")
        same, cached = ask(watched, "What is the capital of France?")
        assert same == right and cached > 200
        assert eventually(lambda: watched.stats().shadow_checks == 1, 30)
        assert watched.stats().shadow_mismatches == 0
        spoil(watched)
        wrong, _ = ask(watched, "What is the capital of France?")
        assert wrong != right, "the test must do harm to prove anything"
        assert eventually(lambda: watched.stats().shadow_mismatches == 1, 30)
        mended, reused = ask(watched, "What is the capital of France?")
        assert mended == right and reused == 0
        assert watched.lower is not None
        key = next(iter(watched.cache.quarantined))
        assert eventually(lambda: not watched.lower.ladder.states[0].tier.has([key]))  # type: ignore[union-attr]
    finally:
        watched.stop()
        watched.cache.pool.check_integrity()
