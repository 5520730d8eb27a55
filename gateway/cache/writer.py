"""Writing behind: what is remembered is served at once, and durable within milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from gateway.stores.contract import AnswerStore, Entry, Observation, Shape, Vector

RETRY_SECONDS = 1.0
WAITING_LIMIT = 10_000
WAITING_BYTES = 64 << 20
"""More than this is not kept for a store that does not take it."""


@dataclass(slots=True)
class _Batch:
    """What is written in one go."""

    entries: list[Entry] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    gone: list[tuple[bytes, float]] = field(default_factory=list)
    announced: list[tuple[bytes, float]] = field(default_factory=list)
    shapes: list[Shape] = field(default_factory=list)
    observations: list[Observation] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.entries or self.vectors or self.gone or self.announced or self.shapes or self.observations)


class Writer:
    """Gathers what comes while a transaction is under way, and writes it in the next one.

    What could not be written is tried again every second: a full disk may be cleared, a lock be released.
    """

    def __init__(
        self, store: AnswerStore, is_current: Callable[[bytes, float], bool], fault: Callable[[str], None]
    ) -> None:
        """`is_current(key, created)`: whether an entry is still wanted; `fault(part)` counts an exception."""
        self._store, self._is_current, self._fault = store, is_current, fault
        self._thread = ThreadPoolExecutor(1, "answers-write")
        self._next = _Batch()
        self._task: asyncio.Task[None] | None = None
        self._waiting: list[asyncio.Future[bool]] = []
        """Who waits for what is in the next batch."""
        self._closing = False

    def put(self, entry: Entry) -> None:
        self._next.entries.append(entry)
        self._soon()

    def put_vector(self, vector: Vector) -> None:
        self._next.vectors.append(vector)
        self._soon()

    def describe(self, shape: Shape) -> None:
        """Keep what a scope is made of; nothing is lost if it fails."""
        self._next.shapes.append(shape)
        self._soon()

    def observe(self, observation: Observation) -> None:
        self._next.observations.append(observation)
        self._soon()

    def delete(self, keys: list[tuple[bytes, float]], announce: bool = False) -> None:
        """Delete (key, created); `announce`: whoever shares the store shall forget them, too."""
        (self._next.announced if announce else self._next.gone).extend(keys)
        self._soon()

    async def settled(self) -> bool:
        """Return when everything given so far has been tried: whether all is written."""
        if self._task is None or self._task.done():
            return True
        waiting = asyncio.get_running_loop().create_future()
        self._waiting.append(waiting)
        return bool(await waiting)

    async def close(self) -> None:
        """Write what waits, once."""
        self._closing = True
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    def _soon(self) -> None:
        if self._next and (self._task is None or self._task.done()):
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._next or self._waiting:
            batch, self._next = self._next, _Batch()
            waiting, self._waiting = self._waiting, []
            batch.entries = [entry for entry in batch.entries if self._is_current(entry.key, entry.created)]
            batch.vectors = [vector for vector in batch.vectors if self._is_current(vector.key, vector.created)]
            written = True
            try:
                await loop.run_in_executor(self._thread, self._write, batch)
            except Exception:
                self._fault("store")
                written = False
            for future in waiting:
                if not future.done():
                    future.set_result(written)
            if not written and not self._closing:
                self._again(batch)
                await self._pause()

    def _again(self, batch: _Batch) -> None:
        """Try a batch once more, with the next one."""
        self._next.entries = _within(batch.entries + self._next.entries)
        self._next.vectors = (batch.vectors + self._next.vectors)[:WAITING_LIMIT]
        self._next.observations = (batch.observations + self._next.observations)[:WAITING_LIMIT]
        self._next.gone = batch.gone + self._next.gone
        self._next.announced = batch.announced + self._next.announced

    async def _pause(self) -> None:
        passed = 0.0
        while passed < RETRY_SECONDS and not self._closing and not self._waiting:
            await asyncio.sleep(0.05)
            passed += 0.05

    def _write(self, batch: _Batch) -> None:
        if batch.gone:
            self._store.delete(batch.gone)
        if batch.announced:
            self._store.delete(batch.announced, announce=True)
        if batch.entries:
            self._store.put(batch.entries)
        if batch.vectors:
            self._store.put_vectors(batch.vectors)
        if batch.observations:
            self._store.observe(batch.observations)
        for shape in batch.shapes:
            self._store.describe(shape)


def _within(entries: list[Entry]) -> list[Entry]:
    """As many of the entries as may wait."""
    kept, size = 0, 0
    for entry in entries[:WAITING_LIMIT]:
        size += len(entry.body)
        if size > WAITING_BYTES:
            break
        kept += 1
    return entries[:kept]
