"""What others do to a shared store, and what an earlier run left undone in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from itertools import count
from typing import TYPE_CHECKING, Any

from gateway.stores.contract import Vector

if TYPE_CHECKING:
    from gateway.cache.answers import Answers

FOLLOW_SECONDS = 0.2
TIDY_SECONDS = 600.0
REPORTS_EVERY = 25
"""Reports of wrong answers are rare: in every this many-th round they are read."""


class Feed:
    """Keeps the memory and the index of one process equal to the store."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._followed = (0, 0, 0)
        """The numbers of the newest entry, vector and removal that we know of."""
        self._catching_up = asyncio.Lock()
        self._begun = 0.0

    async def begin(self) -> None:
        """Note where the store stands; to be called before it is read. May raise."""
        self._begun = time.time()
        self._followed = await self._answers.aside(self._answers.store.last)

    async def follow(self) -> None:
        """Learn what other processes have stored and purged, for ever."""
        for round in count():
            await asyncio.sleep(FOLLOW_SECONDS)
            try:
                await self.catch_up()
                if round % REPORTS_EVERY == 0:
                    self._answers.deny_again(set(await self._answers.aside(self._answers.store.denied)))
                    await self.evidence()
            except Exception:
                self._answers.fault("store")

    async def catch_up(self) -> None:
        """Learn it now. May raise."""
        async with self._catching_up:
            await self._entries()
            await self._vectors()
            await self._removals()

    async def evidence(self) -> None:
        """Learn what was observed, by us before or by others. May raise."""
        evidence = self._answers.evidence
        if evidence is None:
            return
        for number, observation in await self._answers.aside(self._answers.store.observed, evidence.number):
            evidence.number = number
            entry = self._answers.memory.get(observation.entry)
            evidence.add(observation, of_this_answer=entry is not None and entry.created == observation.created)

    async def tidy(self) -> None:
        """Drop what belongs to no entry any more, now and then."""
        while True:
            await asyncio.sleep(TIDY_SECONDS)
            try:
                await self._answers.aside(self._answers.store.tidy)
                await self.evidence()  # in case it could not be read at the start
                self._answers.describe_anew()
            except Exception:
                self._answers.fault("store")

    async def embed_the_rest(self) -> None:
        """Vectors for entries without one by this encoder: it was changed, or the process died before it was done."""
        answers, semantic = self._answers, self._answers.semantic
        if semantic is None:
            return
        try:
            unknown: set[bytes] = set()  # evicted meanwhile, or so new that its vector is on its way
            while True:
                rest = await answers.aside(answers.store.unembedded, semantic.fingerprint, 64 + len(unknown))
                rest = [row for row in rest if row[0] not in unknown]
                for key, scope, created, text in rest:
                    if created < self._begun and answers.is_current(key, created):
                        packed = await semantic.add(scope, key, text, None)
                        answers.writer.put_vector(Vector(key, scope, created, semantic.fingerprint, packed or b""))
                    else:
                        unknown.add(key)
                if not rest:
                    return
                await answers.settled()
        except Exception:
            answers.fault("index")

    async def _entries(self) -> None:
        answers, (known, vectors, removals) = self._answers, self._followed
        for row in await answers.aside(_listed, answers.store.rows, known):
            known = row.number
            mine = answers.memory.get(row.key)
            if row.known.kept_until > time.time() and (mine is None or mine.created < row.known.created):
                answers.memory.add(row.key, row.known)
                if answers.evidence is not None:
                    answers.evidence.forget(row.key)
        self._followed = (known, vectors, removals)
        answers.evict()

    async def _vectors(self) -> None:
        answers, semantic, (known, vectors, removals) = self._answers, self._answers.semantic, self._followed
        if semantic is None:
            return
        for number, vector in await answers.aside(_listed, answers.store.vectors, semantic.fingerprint, vectors):
            vectors = number
            if vector.packed and answers.is_current(vector.key, vector.created):
                answers.ignore(semantic.add(vector.scope, vector.key, "", vector.packed))
        self._followed = (known, vectors, removals)

    async def _removals(self) -> None:
        answers, (known, vectors, removals) = self._answers, self._followed
        for number, key, created in await answers.aside(answers.store.removed, removals):
            removals = number
            if answers.is_current(key, created):
                answers.memory.remove(key)
                if answers.semantic is not None:
                    answers.ignore(answers.semantic.remove([key]))
        self._followed = (known, vectors, removals)


def _listed(read: Callable[..., Iterable[Any]], *arguments: Any) -> list[Any]:
    return list(read(*arguments))
