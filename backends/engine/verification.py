"""`hitherto verify`: is cached output the same as uncached output, token by token, over prompts and every tier?

Each prompt is computed without any cache; then with the device's; then, for each lower tier, stored there, forgotten by
the device, and loaded back. Tokens and log-probabilities must be equal, not close (docs/decisions/0002).
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from backends.engine.config import EngineConfig
from backends.engine.engine import Engine
from backends.engine.load import Loaded, load
from backends.engine.sequence import Emission, SamplingParams
from backends.engine.sequence import Sequence as Request
from backends.engine.tiers.contract import Tier
from backends.engine.tiers.disk import DiskTier
from backends.engine.tiers.ram import RamTier

TOKENS = 24
_TIER_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class Outcome:
    """One prompt through one tier: how much of it was reused, and where the output first differs (None: nowhere)."""

    tier: str
    prompt: str
    prompt_tokens: int
    cached_tokens: int
    first_difference: int | None
    output_tokens: int = 0
    lossy: bool = False
    """The same bits are not promised (`kv.int8`, or a model that does not keep them): a difference is no fault."""
    logprob_change: float = 0.0
    """The mean difference of the tokens' log-probabilities, as far as the tokens are the same."""


Trace = list[tuple[int, float]]
"""Tokens with their log-probabilities."""


def verify(
    config: EngineConfig, data: Path, prompts: Sequence[str], redis: Tier | None, say: Callable[[str], None]
) -> Iterator[Outcome]:
    """Outcomes for the device and for RAM, disk and (if given) Redis, as they are known. Raises what `load` raises."""
    thread = ThreadPoolExecutor(1, "engine")
    loaded = thread.submit(load, config, data, say).result()
    ids = [loaded.text.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    with _engine(loaded, config.model_copy(update={"prefix_cache": False}), thread) as engine:
        expected = [_run(engine, tokens)[0] for tokens in ids]
    with _engine(loaded, config, thread) as engine:
        for prompt, tokens, want in zip(prompts, ids, expected, strict=True):
            _run(engine, tokens)
            got, cached = _run(engine, tokens)
            yield _outcome("device", prompt, len(tokens), cached, want, got, bool(loaded.tested.gap))
    with tempfile.TemporaryDirectory() as folder:
        tiers: list[Tier] = [RamTier(_TIER_BYTES, 3600.0), DiskTier(Path(folder), _TIER_BYTES, 3600.0)]
        for tier in [*tiers, redis] if redis is not None else tiers:
            yield from _through(loaded, config, thread, Kept(tier), list(zip(prompts, ids, expected, strict=True)))


def _through(
    loaded: Loaded,
    config: EngineConfig,
    thread: ThreadPoolExecutor,
    tier: Kept,
    cases: list[tuple[str, list[int], Trace]],
) -> Iterator[Outcome]:
    with _engine(loaded, config, thread, tier) as engine:
        for _, tokens, _ in cases:
            _run(engine, tokens)
    with _engine(loaded, config, thread, tier) as engine:  # a new device pool: everything must come from the tier
        if engine.lower is None:  # a model of snapshots, or no prefix cache
            return
        for prompt, tokens, want in cases:
            got, cached = _run(engine, tokens)
            yield _outcome(tier.name, prompt, len(tokens), cached, want, got, config.kv.int8 or bool(loaded.tested.gap))
            engine.call(engine.cache.pool.drop_cached).result()
    tier.inner.clear()
    tier.inner.close()


class Kept:
    """A tier that outlives the engine that uses it."""

    def __init__(self, inner: Tier) -> None:
        self.inner, self.name = inner, inner.name
        self.has, self.get, self.put = inner.has, inner.get, inner.put
        self.delete, self.clear = inner.delete, inner.clear

    @property
    def bytes_used(self) -> int:
        return self.inner.bytes_used

    def close(self) -> None:
        """Not yet."""


@contextmanager
def _engine(
    loaded: Loaded, config: EngineConfig, thread: ThreadPoolExecutor, tier: Tier | None = None
) -> Iterator[Engine]:
    engine = Engine(loaded, config, thread=thread, tiers=[tier] if tier is not None else [])
    if engine.lower is not None:
        engine.lower.ladder.always_load = True  # slow or not: this is about being right
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


def _run(engine: Engine, prompt: list[int]) -> tuple[Trace, int]:
    trace: Trace = []
    done = threading.Event()

    def emit(emission: Emission) -> None:
        if emission.token is not None and emission.logprobs is not None:
            trace.append((emission.token, emission.logprobs.logprob))
        if emission.finish:
            done.set()

    params = SamplingParams(TOKENS, temperature=0.0, top_logprobs=0)
    request = Request("verify", prompt, params, emit=emit, eos=engine.loaded.eos)
    engine.submit(request)
    done.wait()
    return trace, request.cached_tokens


def _outcome(
    tier: str, prompt: str, prompt_tokens: int, cached: int, want: Trace, got: Trace, lossy: bool = False
) -> Outcome:
    tokens = next((index for index, (a, b) in enumerate(zip(want, got, strict=False)) if a[0] != b[0]), len(want))
    changes = [abs(a[1] - b[1]) for a, b in zip(want[:tokens], got[:tokens], strict=False)]
    first = tokens if tokens < len(want) else None
    if want != got and not lossy:  # equal, not close
        first = next((index for index, (a, b) in enumerate(zip(want, got, strict=False)) if a != b), len(got))
    change = sum(changes) / len(changes) if changes else 0.0
    return Outcome(tier, prompt, prompt_tokens, cached, first, len(want), lossy, change)
