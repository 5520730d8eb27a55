"""Single flight across processes: whoever shares the store lets one of them compute an answer, and reads it there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator

from gateway.cache.answers import Answers
from gateway.cache.question import Question
from gateway.exchange import Body
from gateway.logs import new_id
from gateway.stores.contract import Entry

LEASE_SECONDS = 60.0
"""After this time a process that has not said that it is done counts as dead."""
PATIENCE = 10.0
"""Longer than this nobody waits for another's answer: it might not be one that may be kept."""
POLL_SECONDS = 0.1
REST_SECONDS = 10.0


class Leases:
    """The right to compute an answer, one holder at a time. Costs nothing where the store is not shared."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._releasing: set[asyncio.Task[None]] = set()
        self._rest_until = 0.0
        """A store that does not answer is not asked for a while: nobody shall wait for it again and again."""

    async def acquire(self, question: Question) -> tuple[str, Entry | None]:
        """Wait for our turn to compute an answer; or the answer, if another process has got it meanwhile.

        The string stands for our turn and goes to `release`; it is empty where there is none.
        """
        answers = self._answers
        if not answers.shared or question.controls.no_cache or time.monotonic() < self._rest_until:
            return "", None
        holder, ours = new_id(), False
        try:
            async with asyncio.timeout(PATIENCE):
                while True:
                    ours = await answers.leasing(answers.store.lease, question.key, holder, LEASE_SECONDS)
                    await answers.feed.catch_up()
                    if (entry := await answers.again(question)) is not None:
                        self.release(question, holder if ours else "")
                        return "", entry
                    if ours:
                        return holder, None
                    await asyncio.sleep(POLL_SECONDS)
        except TimeoutError:
            pass
        except Exception:  # without a lease an answer may be computed twice; that is no reason to give none
            answers.fault("lease")
            self._rest_until = time.monotonic() + REST_SECONDS
        except BaseException:  # the client has left
            self.release(question, holder)
            raise
        return holder if ours else "", None

    def while_read(
        self, question: Question, holder: str, chunks: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """The same body; when it ends, others may go on."""
        if not holder:
            return chunks

        async def give_back() -> None:
            self.release(question, holder)

        return Body(chunks, give_back)

    def release(self, question: Question, holder: str) -> None:
        """Let others go on: the answer is stored, or there will be none."""
        if holder:
            task = asyncio.create_task(self._give_back(question.key, holder))
            self._releasing.add(task)
            task.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """Give back what is still held."""
        await asyncio.gather(*self._releasing)

    async def _give_back(self, key: bytes, holder: str) -> None:
        try:
            await self._answers.settled()  # whoever waits looks into the store next
            await self._answers.leasing(self._answers.store.release, key, holder)
        except Exception:
            self._answers.fault("lease")
