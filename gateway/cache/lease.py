"""Single flight across processes: whoever shares the store lets one of them compute an answer, and reads it there."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator

from gateway.cache.answers import Answers
from gateway.cache.question import Question
from gateway.logs import new_id
from gateway.stores.contract import Entry

LEASE_SECONDS = 60.0
"""After this time a process that has not said that it is done counts as dead."""
PATIENCE = 10.0
"""Longer than this nobody waits for another process: it might not get an answer that may be kept."""
POLL_SECONDS = 0.1


class Leases:
    """The right to compute an answer, one holder at a time. Costs nothing where the store is not shared."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._holder = f"{os.getpid()}-{new_id()}"
        self._releasing: set[asyncio.Task[None]] = set()

    async def acquire(self, question: Question) -> Entry | None:
        """Wait for our turn to compute an answer; or the answer, if another process has got it meanwhile."""
        answers = self._answers
        if not answers.shared or question.controls.no_cache:
            return None
        deadline = time.monotonic() + PATIENCE
        try:
            while time.monotonic() < deadline:
                ours = await answers.reading(answers.store.lease, question.key, self._holder, LEASE_SECONDS)
                await answers.feed.catch_up()
                if (entry := await answers.again(question)) is not None:
                    if ours:
                        self.release(question)
                    return entry
                if ours:
                    return None
                await asyncio.sleep(POLL_SECONDS)
        except Exception:  # without a lease an answer may be computed twice; that is no reason to give none
            answers.fault("lease")
        return None

    def while_read(self, question: Question, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        """The same body; when it ends, others may go on."""
        return self._until_read(question, chunks) if self._answers.shared else chunks

    async def _until_read(self, question: Question, chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in chunks:
                yield chunk
        finally:
            await chunks.aclose()
            self.release(question)

    def release(self, question: Question) -> None:
        """Let others go on: the answer is stored, or there will be none."""
        if self._answers.shared:
            task = asyncio.create_task(self._give_back(question.key))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    async def _give_back(self, key: bytes) -> None:
        try:
            await self._answers.settled()  # whoever waits looks into the store next
            await self._answers.reading(self._answers.store.release, key, self._holder)
        except Exception:
            self._answers.fault("lease")
