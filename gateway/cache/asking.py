"""Questions whose answers are under way, so that a nearly identical one may share the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gateway.cache.question import Question
from gateway.flights import Key

if TYPE_CHECKING:  # numpy is not there where only exact answers are served
    from gateway.cache.semantic import Neighbours

    Vector = asyncio.Future[Neighbours | None]

SCOPES = 10_000
WAIT_SECONDS = 0.05
NEAR = 0.85
"""The cosine that such a question must reach, where the rules do not say: nobody can take its answer back."""


@dataclass(frozen=True, slots=True)
class _Asked:
    text: str
    flight: Key
    vector: Vector
    under_way: Callable[[], bool]


class Asking:
    """By scope, the questions of the flights of this process."""

    def __init__(self) -> None:
        self._asked: dict[bytes, list[_Asked]] = {}

    def add(self, question: Question, flight: Key, vector: Vector | None, under_way: Callable[[], bool]) -> None:
        """A question whose answer is under way for as long as `under_way` says so."""
        if vector is None or question.view.question is None:
            return
        if len(self._asked) >= SCOPES:
            self._asked = {scope: left for scope, asked in self._asked.items() if (left := _living(asked))}
        asked = _living(self._asked.get(question.scope, []))
        self._asked[question.scope] = [*asked, _Asked(question.view.question, flight, vector, under_way)]

    def any(self, scope: bytes) -> bool:
        """Whether something is being asked in this scope."""
        return any(asked.under_way() for asked in self._asked.get(scope, ()))

    async def nearest(
        self,
        question: Question,
        shape: object,
        vector: Vector,
        denies: Callable[[bytes], bool],
        agrees: Callable[[str, bytes, float], Awaitable[bool]],
    ) -> Key | None:
        """The flight of the nearest question that may share its answer and wants it in the same shape.

        `denies(key)`: whether the answer under that key was reported wrong for this question; `agrees(other, key,
        cosine)`: whether one answer serves this question and another one.
        """
        text = question.view.question
        asked = _living(self._asked.get(question.scope, []))
        if not asked or text is None:
            self._asked.pop(question.scope, None)
            return None
        vectors = [vector, *(other.vector for other in asked)]
        await asyncio.wait(vectors, timeout=WAIT_SECONDS)
        if not _is_made(vector):
            return None
        mine = vector.result()
        threshold = question.threshold(NEAR)
        near: list[tuple[float, _Asked]] = []
        for other in asked:
            if other.flight[1] != shape or not _is_made(other.vector) or denies(other.flight[0]):
                continue
            theirs = other.vector.result()
            assert mine is not None and theirs is not None
            cosine = mine.cosine(theirs)
            if cosine >= threshold:
                near.append((cosine, other))
        for cosine, other in sorted(near, key=lambda item: -item[0]):
            if await agrees(other.text, other.flight[0], cosine):
                return other.flight
        return None


def _living(asked: list[_Asked]) -> list[_Asked]:
    return [one for one in asked if one.under_way()]


def _is_made(vector: Vector) -> bool:
    return vector.done() and not vector.cancelled() and vector.exception() is None and vector.result() is not None
