"""What a prefix costs where it lies: time to the first token behind prefixes of two lengths, found on the device, in
RAM, on disk, in a real Redis, or computed again; and the memory of 100 requests that share a prefix or do not.

    python -m benchmarks.kv_tiers [--rounds 7]

The engine runs in this process, without HTTP. Every tier is asked in turn, each round behind prefixes of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "2500")  # as the engine process does

from backends.engine.config import EngineConfig, KVConfig
from backends.engine.engine import Engine
from backends.engine.load import Loaded, load
from backends.engine.models import resolve
from backends.engine.sequence import Emission, SamplingParams, Sequence
from backends.engine.tiers.contract import Tier
from backends.engine.tiers.disk import DiskTier
from backends.engine.tiers.ram import RamTier
from backends.engine.tiers.redis import RedisTier
from backends.engine.verification import Kept
from benchmarks.shared_prefix import SENTENCE
from benchmarks.table import conditions, show
from gateway.config import DEFAULT_MODEL, Settings
from tests.servers import RedisServer

LENGTHS = (500, 1500)
GIB = 1 << 30


def start(loaded: Loaded, thread: ThreadPoolExecutor, tiers: list[Tier], **settings: int) -> Engine:
    config = EngineConfig(model="x", kv=KVConfig(deadline=60.0), **settings)  # type: ignore[arg-type]
    engine = Engine(loaded, config, thread=thread, tiers=tiers)
    if engine.lower is not None:
        engine.lower.ladder.always_load = True
    engine.start()
    return engine


def run(engine: Engine, prompts: list[list[int]], tokens: int = 1) -> tuple[float, int, int]:
    """(seconds to the first token of the first prompt, prompt tokens reused, most blocks in use)."""
    first: list[float] = []
    done = threading.Semaphore(0)
    most = [0]

    def emit(emission: Emission) -> None:
        first.append(time.perf_counter())
        most[0] = max(most[0], engine.cache.pool.total - engine.cache.pool.available)
        if emission.finish:
            done.release()

    params = SamplingParams(tokens, temperature=0.0, ignore_eos=True)
    sequences = [Sequence(str(index), prompt, params, emit=emit) for index, prompt in enumerate(prompts)]
    started = time.perf_counter()
    for sequence in sequences:
        engine.submit(sequence)
    for _ in sequences:
        done.acquire()
    return first[0] - started, sum(sequence.cached_tokens for sequence in sequences), most[0]


def prompt(loaded: Loaded, length: int, name: str) -> list[int]:
    text = loaded.text.encode(f"{name}. " + SENTENCE * 100)
    return [*text[:length], *loaded.text.encode(" Do you sell bells?")]


def times(loaded: Loaded, thread: ThreadPoolExecutor, rounds: int) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(RedisServer(folder))
        tiers: dict[str, list[Tier]] = {
            "computed again": [],
            "device": [],
            "RAM": [Kept(RamTier(GIB, 3600.0))],
            "disk": [Kept(DiskTier(folder / "kv", GIB, 3600.0))],
            "Redis": [Kept(RedisTier(server.url, GIB, 3600.0, timeout=5.0))],
        }
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        sizes: dict[tuple[str, int], int] = {}
        for number in range(rounds + 1):
            for where, chosen in tiers.items():
                engine = start(loaded, thread, chosen)
                for length in LENGTHS:
                    asked = prompt(loaded, length, f"{where} {number} {length}")
                    run(engine, [asked])
                    if engine.lower is not None:
                        while engine.lower.ladder._stores:
                            time.sleep(0.01)
                        time.sleep(0.05)
                    if where != "device":
                        engine.call(engine.cache.pool.drop_cached).result()
                    took, reused, _ = run(engine, [asked])
                    sizes[where, length] = reused
                    if number:  # the first round warms up
                        seconds[where, length].append(took * 1000)
                engine.stop()
        rows = []
        for length in LENGTHS:
            base = statistics.median(seconds["computed again", length])
            for where in tiers:
                value = statistics.median(seconds[where, length])
                rows.append([str(length), where, str(sizes[where, length]), f"{value:.0f}", f"{value / base:.2f}"])
        headings = ["prefix tokens", "found", "reused", "first token after ms", "× computed again"]
        show("Tiers", headings, rows, conditions(n=f"median of {rounds} rounds", what="SmolLM2-135M, dtype auto"))


def memory(loaded: Loaded, thread: ThreadPoolExecutor) -> None:
    rows = []
    for shared in (True, False):
        engine = start(loaded, thread, [], max_running=100)
        prompts = [prompt(loaded, 500, "all" if shared else f"{number}") for number in range(100)]
        for number, tokens in enumerate(prompts):
            tokens += loaded.text.encode(f" Order {number}.")
        if shared:
            run(engine, prompts[:1])
        _, _, most = run(engine, prompts, 128)  # long enough for all of them to be under way at once
        size = most * loaded.runner.block_bytes
        rows.append(["the same" if shared else "its own", str(most), f"{size / 2**20:.0f}"])
        engine.stop()
    show("Memory", ["500-token prefix of 100 requests", "KV blocks in use", "MiB"], rows, conditions(n="one run"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    folder = resolve(DEFAULT_MODEL, Settings().data, lambda line: print(line, file=sys.stderr))
    thread = ThreadPoolExecutor(1)
    config = EngineConfig(model=str(folder), kv=KVConfig(device=2 * GIB))  # type: ignore[arg-type]
    loaded = thread.submit(load, config, folder, lambda line: None).result()
    times(loaded, thread, arguments.rounds)
    memory(loaded, thread)


if __name__ == "__main__":
    main()
