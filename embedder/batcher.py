"""One thread for encoder and index: batches what waits, and never blocks the event loop."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from embedder.contract import Encoder, Vectors

T = TypeVar("T")
MAX_BATCH = 32
MAX_WAITING = 1000


class BatcherFull(Exception):
    """More texts wait than could be encoded in any useful time."""


@dataclass(slots=True)
class _Job:
    """Encode `text` if there is one, then call `action` with the vector; its result goes to `future`."""

    text: str | None
    action: Callable[[Vectors], Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


class Batcher:
    """Runs jobs in order of arrival on its own thread; texts that wait at the same time are encoded in one pass."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder = encoder
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="encoder", daemon=True)
        self._thread.start()

    def encode_then(self, text: str, action: Callable[[Vectors], T]) -> asyncio.Future[T | None]:
        """Future of `action(vector)`, where `vector` is `[dimensions]`; of None if the text does not fit the window."""
        return self._submit(text, action)

    def run(self, action: Callable[[], T]) -> asyncio.Future[T]:
        """Future of `action()`, run between batches."""
        return self._submit(None, lambda _: action())

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _submit(self, text: str | None, action: Callable[[Vectors], Any]) -> asyncio.Future[Any]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if text is not None and self._jobs.qsize() >= MAX_WAITING:
            future.set_exception(BatcherFull())
            return future
        self._jobs.put(_Job(text, action, future, loop))
        return future

    def _run(self) -> None:
        while True:
            batch = [self._jobs.get()]
            while len(batch) < MAX_BATCH and batch[-1] is not None and not self._jobs.empty():
                batch.append(self._jobs.get())
            jobs = [job for job in batch if job is not None and not job.future.cancelled()]
            if jobs:
                self._do(jobs)
            if batch[-1] is None:
                return

    def _do(self, jobs: list[_Job]) -> None:
        texts: list[_Job] = []
        vectors: dict[int, Vectors] = {}
        try:
            texts = [job for job in jobs if job.text is not None and self.encoder.fits(job.text)]
            if texts:
                encoded = self.encoder.encode([job.text or "" for job in texts])
                vectors = {id(job): vector for job, vector in zip(texts, encoded, strict=True)}
        except Exception as error:
            for job in jobs:
                if job.text is not None:
                    _settle(job, None, error)
            jobs = [job for job in jobs if job.text is None]
        for job in jobs:
            if job.text is not None and id(job) not in vectors:
                _settle(job, None, None)
                continue
            try:
                _settle(job, job.action(vectors.get(id(job))), None)
            except Exception as error:
                _settle(job, None, error)


def _settle(job: _Job, result: Any, error: Exception | None) -> None:
    def settle() -> None:
        if job.future.done():
            return
        if error is not None:
            job.future.set_exception(error)
        else:
            job.future.set_result(result)

    try:
        job.loop.call_soon_threadsafe(settle)
    except RuntimeError:
        pass  # the loop is closed: nobody waits any more
