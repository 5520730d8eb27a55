"""The loop: schedule → run → sample → publish, on one thread that owns the model and all accounts."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Sequence_
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from backends.engine.blocks import BlockPool
from backends.engine.config import EngineConfig
from backends.engine.load import Loaded
from backends.engine.lower import Lower
from backends.engine.prefix_cache import PrefixCache
from backends.engine.runner import Piece
from backends.engine.sampler import logprobs, sample
from backends.engine.scheduler import Chunk, Limits, Scheduler
from backends.engine.sequence import Emission, Sequence
from backends.engine.shadow import Shadow
from backends.engine.snapshots import SEQUENCES as SNAPSHOT_SEQUENCES
from backends.engine.tiers.contract import Tier
from backends.engine.tiers.int8 import Int8
from backends.engine.tiers.ladder import Ladder

log = logging.getLogger("hitherto.engine")

T = TypeVar("T")


TOGETHER = 0.01
"""Seconds that an idle engine waits for requests that are being read: a batch takes little longer than the first."""


class EngineFull(Exception):
    """The queue is full; come back later."""


@dataclass(frozen=True, slots=True)
class Stats:
    """A look at the engine, for `/health` and the metrics."""

    running: int
    waiting: int
    free_blocks: int
    cached_blocks: int
    total_blocks: int
    evictions: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: Mapping[str, int]
    steps: int
    pinned_blocks: int
    shadow_checks: int
    shadow_mismatches: int
    late_loads: int
    dropped_writes: int


class Engine:
    """Computes sequences. `submit` and `cancel` may be called from any thread; emissions come from the engine's own.

    `flush` is called after each step that emitted something, so that a listener can be woken once per step; `crashed`
    if the engine thread dies, which nothing can mend but a new process. `thread` is where the model was loaded: OpenMP
    keeps a set of workers for each thread that computes, and with two sets on the same cores takes itself for crowded.
    """

    def __init__(
        self,
        loaded: Loaded,
        config: EngineConfig,
        flush: Callable[[], None] = lambda: None,
        crashed: Callable[[], None] = lambda: None,
        thread: ThreadPoolExecutor | None = None,
        tiers: Sequence_[Tier] = (),
    ) -> None:
        self.loaded = loaded
        self._reuse = config.prefix_cache
        self._max_waiting = config.max_waiting
        self._flush = flush
        self._crashed = crashed
        pool = BlockPool(loaded.runner.blocks - 1)
        self.cache = PrefixCache(pool, loaded.root, loaded.runner.block_size)
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.lower: Lower | None = None
        if tiers and config.prefix_cache and loaded.runner.pool is not None:
            kv = loaded.runner.pool
            codec = Int8(kv.layers, kv.kv_heads, kv.block_size, kv.head_dim, loaded.dtype) if config.kv.int8 else None
            ladder = Ladder(tiers, loaded.root, codec)
            self.lower = Lower(ladder, self.cache, kv, config.kv.deadline, self._inbox.put)
        most = config.max_running if loaded.runner.paged else min(config.max_running, SNAPSHOT_SEQUENCES)
        limits = Limits(most, config.step_tokens)
        look_below = self.lower.look if self.lower else lambda *_: False
        self.scheduler = Scheduler(self.cache, limits, look_below)
        self._ttl = config.kv.ttl
        delete = self.lower.ladder.delete if self.lower else lambda keys: None
        self.shadow = Shadow(config.verify_share, self.cache, delete)
        self._thread = thread or ThreadPoolExecutor(1, "engine")
        self._running: Future[None] | None = None
        self._steps = self._coming = 0
        self._stopping = False

    @property
    def longest(self) -> int:
        """Tokens of prompt and output that one request may have: the model's context, or what the pool can hold."""
        return min(self.loaded.context, self.scheduler.capacity())

    def start(self) -> None:
        self._running = self._thread.submit(self._run)

    def stop(self) -> None:
        """Finish the step in progress and end the thread; sequences under way are cancelled."""
        self._stopping = True
        self._inbox.put(None)
        if self._running is not None:
            self._running.result()
        if self.lower is not None:
            self.lower.ladder.close()

    def submit(self, sequence: Sequence) -> None:
        """Queue a sequence whose length was checked against `longest`. Raises `EngineFull`."""
        if len(self.scheduler.waiting) + self._inbox.qsize() >= self._max_waiting:
            raise EngineFull
        self._inbox.put(lambda: self.scheduler.add(sequence))

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """A request is being read. An idle engine waits a moment for it, to compute those that come together together.
        Call from one thread."""
        self._coming += 1
        try:
            yield
        finally:
            self._coming -= 1

    def cancel(self, sequence: Sequence) -> None:
        """Stop computing for it. Nothing is emitted any more once the engine has seen this."""
        self._inbox.put(lambda: self.scheduler.finish(sequence))

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run something between two steps, where no account is in use; the future has what it returns or raises."""
        done: Future[T] = Future()

        def work() -> None:
            if done.set_running_or_notify_cancel():
                try:
                    done.set_result(action())
                except Exception as error:
                    done.set_exception(error)

        self._inbox.put(work)
        return done

    def stats(self) -> Stats:
        scheduler, pool = self.scheduler, self.cache.pool
        return Stats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            free_blocks=pool.available - pool.cached,
            cached_blocks=pool.cached,
            total_blocks=pool.total,
            evictions=pool.evictions,
            preemptions=scheduler.counters.preemptions,
            prompt_tokens=scheduler.counters.prompt_tokens,
            cached_tokens=dict(scheduler.counters.cached_tokens),
            steps=self._steps,
            pinned_blocks=pool.pinned,
            shadow_checks=self.shadow.checked,
            shadow_mismatches=self.shadow.mismatches,
            late_loads=self.lower.late if self.lower else 0,
            dropped_writes=self.lower.ladder.dropped if self.lower else 0,
        )

    def pin(self, keys: Sequence_[bytes]) -> Future[bool]:
        """Let these blocks give way last, here and now or when they come back. False: half of the pool is pinned."""

        def work() -> bool:
            pool = self.cache.pool
            fits = pool.pinned_with(keys) <= pool.total // 2
            if fits:
                pool.pin(keys)
            return fits

        return self.call(work)

    def purge(self) -> Future[None]:
        """Forget all KV that no running request holds, in every tier; done when the future is."""
        done: Future[None] = Future()

        def forget() -> None:
            self.cache.pool.unpin_all()
            self.cache.pool.drop_cached()
            if self.lower is None:
                _settle(done, None)
            else:
                self.lower.abandon()
                self.lower.ladder.clear(lambda: _settle(done, None))

        self._inbox.put(forget)
        return done

    def tier_stats(self) -> dict[str, dict[str, float]]:
        """What was seen of each lower tier."""
        if self.lower is None:
            return {}
        return {
            state.tier.name: {
                "bytes": state.bytes_used,
                "hits": state.hits,
                "loads": state.loads,
                "faults": state.faults,
                "unsound": state.unsound,
                "skipped": state.skipped,
                "loaded_bytes": state.loaded_bytes,
                "load_seconds": state.load_seconds,
            }
            for state in self.lower.ladder.states
        }

    def step(self) -> None:
        """One forward pass over whatever the scheduler planned."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return
        sampling, started = [chunk for chunk in chunks if chunk.samples], time.monotonic()
        try:
            logits = self.loaded.runner.run([_piece(chunk) for chunk in chunks])
            if len(logits) != len(sampling):
                logits = _take_prompt_logprobs(chunks, logits)
            results = sample(logits, [chunk.sequence for chunk in sampling]) if sampling else []
        except Exception as error:
            if self.loaded.runner.device.type != "cpu":
                raise  # an error on an accelerator leaves it unusable for the whole process
            log.exception("a step failed; its %d requests are ended", len(chunks))
            self._fail([chunk.sequence for chunk in chunks], f"{type(error).__name__}: {error}")
            return
        before = [chunk.sequence.published for chunk in chunks]
        self.scheduler.computed(chunks)
        if self.lower is not None:
            self._tell_lower(chunks, before, time.monotonic() - started)
        for chunk, result in zip(sampling, results, strict=True):
            sequence = chunk.sequence
            if isinstance(result, ValueError):
                self._fail([sequence], str(result))
                continue
            token, chosen = result
            sequence.tokens.append(token)
            finish = sequence.finish_reason()
            sequence.emit(Emission(token, chosen, finish, sources=sequence.sources or {}))
            if finish:
                self.scheduler.finish(sequence)
                if twin := self.shadow.twin(sequence):
                    self.scheduler.add(twin)
        if not self._reuse:
            self.cache.pool.drop_cached()
        self._steps += 1

    def _tell_lower(self, chunks: list[Chunk], before: list[int], seconds: float) -> None:
        """Hand new blocks on, and tell how fast prompts are computed."""
        assert self.lower is not None
        for chunk, published in zip(chunks, before, strict=True):
            self.lower.published(chunk.sequence, published, chunk.sequence.published)
        tokens = sum(chunk.end - chunk.start for chunk in chunks)
        if tokens >= 2 * self.cache.block_size:  # a step that was about prompts
            rate, old = tokens / seconds, self.lower.ladder.prefill_rate
            self.lower.ladder.prefill_rate = rate if old is None else old + 0.3 * (rate - old)

    def _fail(self, sequences: Sequence_[Sequence], reason: str) -> None:
        for sequence in sequences:
            sequence.emit(Emission(finish="error", error=reason))
            self.scheduler.finish(sequence)

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException:
            log.exception("the engine thread died")
            self._crashed()

    def _loop(self) -> None:
        pool, next_look = self.cache.pool, 0.0
        while not self._stopping:
            self._drain(wait=self.scheduler.idle)
            if self.lower is not None:
                self.lower.give_up_late()
            started = pool.now = time.monotonic()
            if started >= next_look:
                pool.expire(started - self._ttl)
                next_look = started + 1.0
            self.step()
            self._flush()
            if not self.scheduler.running and self.scheduler.waiting and time.monotonic() - started < 0.001:
                time.sleep(0.001)  # nothing could be planned; do not spin
        for sequence in [*self.scheduler.running, *self.scheduler.waiting]:
            sequence.emit(Emission(finish="cancelled", error="the engine is shutting down"))
            self.scheduler.finish(sequence)
        self._flush()

    def _drain(self, wait: bool) -> None:
        """Do what is in the inbox; `wait` for something to be there, and then a moment for what is being read."""
        until = 0.0
        if wait:
            self._act(self._inbox.get())
            until = time.monotonic() + TOGETHER
        while not self._stopping:
            left = until - time.monotonic() if self._coming else 0.0
            try:
                self._act(self._inbox.get(block=left > 0, timeout=max(left, 0.0)))
            except queue.Empty:
                return

    def _act(self, action: Callable[[], None] | None) -> None:
        if action is not None:
            action()


def _settle(future: Future[T], result: T) -> None:
    """Set a result, unless whoever wanted it has left."""
    if future.set_running_or_notify_cancel():
        future.set_result(result)


def _piece(chunk: Chunk) -> Piece:
    sequence = chunk.sequence
    return Piece(sequence.tokens[chunk.start : chunk.end], chunk.start, sequence.table, chunk.wanted, sequence)


def _take_prompt_logprobs(chunks: Sequence_[Chunk], logits: torch.Tensor) -> torch.Tensor:
    """Give sequences the logprobs of their prompts' tokens; what is left are the rows to sample from, one a chunk."""
    rows, row = [], 0
    for chunk in chunks:
        sequence, known = chunk.sequence, len(chunk.sequence.prompt_logprobs)
        if sequence.params.prompt_logprobs is not None and chunk.start < len(sequence.prompt):
            end = min(chunk.end, len(sequence.prompt) - 1)
            if chunk.start <= known < end:  # after a preemption some are known already
                wanted = logits[row + known - chunk.start : row + end - chunk.start]
                following = sequence.prompt[known + 1 : end + 1]
                sequence.prompt_logprobs += logprobs(wanted, following, sequence.params.prompt_logprobs or 0)
        row += chunk.wanted
        if chunk.samples:
            rows.append(row - 1)
    return logits[rows]
