"""Writing behind: what is remembered is served at once, and durable within milliseconds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from gateway.stores.contract import AnswerStore, Entry, Shape, Vector

RETRY_SECONDS = 1.0
WAITING_LIMIT = 10_000
WAITING_BYTES = 64 << 20
"""More than this is not kept for a store that does not take it."""


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
        self._entries: list[Entry] = []
        self._vectors: list[Vector] = []
        self._gone: list[tuple[bytes, float]] = []
        self._announced: list[tuple[bytes, float]] = []
        self._shapes: list[Shape] = []
        self._task: asyncio.Task[None] | None = None
        self._given = self._tried = 0
        """How many things were given to be written, and how many of them have been tried."""
        self._progress = asyncio.Event()
        self._closing = False

    def put(self, entry: Entry) -> None:
        self._entries.append(entry)
        self._soon()

    def put_vector(self, vector: Vector) -> None:
        self._vectors.append(vector)
        self._soon()

    def describe(self, shape: Shape) -> None:
        """Keep what a scope is made of; nothing is lost if it fails."""
        self._shapes.append(shape)
        self._soon()

    def delete(self, keys: list[tuple[bytes, float]], announce: bool = False) -> None:
        """Delete (key, created); `announce`: whoever shares the store shall forget them, too."""
        (self._announced if announce else self._gone).extend(keys)
        self._soon()

    async def settled(self) -> None:
        """Return when everything given so far is written, or has failed once."""
        given = self._given
        while self._tried < given and self._task is not None and not self._task.done():
            self._progress.clear()
            await asyncio.wait(
                {asyncio.ensure_future(self._progress.wait()), self._task}, return_when="FIRST_COMPLETED"
            )

    async def close(self) -> None:
        """Write what waits, once."""
        self._closing = True
        if self._task is not None:
            await self._task
        self._thread.shutdown()

    def _soon(self) -> None:
        self._given += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while self._entries or self._vectors or self._gone or self._announced or self._shapes:
            given = self._given
            entries, self._entries = self._entries, []
            vectors, self._vectors = self._vectors, []
            gone, self._gone = self._gone, []
            announced, self._announced = self._announced, []
            shapes, self._shapes = self._shapes, []
            entries = [entry for entry in entries if self._is_current(entry.key, entry.created)]
            vectors = [vector for vector in vectors if self._is_current(vector.key, vector.created)]
            try:
                await loop.run_in_executor(self._thread, self._write, entries, vectors, gone, announced, shapes)
            except Exception:
                self._fault("store")
                self._advance(given)
                if self._closing:
                    return
                self._entries = _within(entries + self._entries)
                self._vectors = (vectors + self._vectors)[:WAITING_LIMIT]
                self._gone = gone + self._gone
                self._announced = announced + self._announced
                await self._pause()
            else:
                self._advance(given)

    def _advance(self, tried: int) -> None:
        self._tried = tried
        self._progress.set()

    async def _pause(self) -> None:
        passed = 0.0
        while passed < RETRY_SECONDS and not self._closing:
            await asyncio.sleep(0.05)
            passed += 0.05

    def _write(
        self,
        entries: list[Entry],
        vectors: list[Vector],
        gone: list[tuple[bytes, float]],
        announced: list[tuple[bytes, float]],
        shapes: list[Shape],
    ) -> None:
        if gone:
            self._store.delete(gone)
        if announced:
            self._store.delete(announced, announce=True)
        if entries:
            self._store.put(entries)
        if vectors:
            self._store.put_vectors(vectors)
        for shape in shapes:
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
