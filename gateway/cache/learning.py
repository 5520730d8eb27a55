"""Learning from fresh answers: was the stored answer that was, or would have been, served in its place the same?

If it was, the question becomes an alias of the other one, so that it is an exact hit from then on. Either way it is
evidence for the limit (`evidence`).
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from backends.dialects import openai_chat
from gateway.cache.evidence import Hit
from gateway.cache.key import group_digest
from gateway.cache.lookup import Lookup
from gateway.cache.question import Question
from gateway.stores.contract import Entry, Observation, Source
from policies.similarity.answers import Verdict, compared

if TYPE_CHECKING:
    from gateway.cache.answers import Answers

WORDS = 60
"""Answers are embedded in parts of so many words, which fit every encoder."""
PARTS = 4
WAITING = 16
"""So many comparisons may wait; more are not made: they are no request's business."""


class Learning:
    """Compares answers aside, one after the other."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._waiting = 0
        self._one_at_a_time = asyncio.Lock()
        """No question that is looked up shall wait for the parts of several answers."""

    def takes(self, question: Question) -> bool:
        """Whether an audit of this question's answer would be compared at all."""
        return self._waiting < WAITING and question.text() == question.view.question

    async def compare(self, question: Question, lookup: Lookup, fresh: Entry) -> None:
        """Compare a fresh answer with that of `lookup.near`, and keep what that tells."""
        if self._waiting >= WAITING or lookup.near is None or lookup.near == fresh.key:
            return
        answers, source, rules = self._answers, lookup.source, question.rules
        # Hits are audited one in so many, so of refused candidates no more may count, or they would seem to be most.
        counts = lookup.score is not None and (source != "grey" or rules.shadow or random.random() < rules.audit)
        self._waiting += 1
        try:
            found, _ = await answers.fetched(lookup.near, question)
            if found is None or found.alias or found.entry.key == fresh.key:
                return
            old, new = (openai_chat.text_of(entry.body) for entry in (found.entry, fresh))
            if not old or not new:
                return  # calls of tools, say, which nobody can tell apart
            async with self._one_at_a_time:
                verdict = await self._rules_say(question.view.question or "", old, new)
            if verdict == "unsure" and counts:
                verdict = await answers.arbiter.compare(question, found.wording or "", old, new)
            if not self._still(question, found.entry, fresh):
                return
            if counts and lookup.score is not None:
                right = {"same": True, "different": False, "unsure": None}[verdict]
                group = group_digest(question)
                hit = Hit(question.tenant, question.key, found.entry.key, group, found.entry.created, lookup.score)
                self.observe(hit, right, source)
                if right is False and source == "audit":
                    answers.deny(question.key, found.entry.key)
                    await answers.aside(answers.store.deny, question.key, found.entry.key)
            if verdict == "same" and not rules.shadow:  # in which nothing but a request's own answer is served
                self._alias(fresh, found.entry)
        except Exception:
            answers.fault("alias")
        finally:
            self._waiting -= 1

    def _still(self, question: Question, stored: Entry, fresh: Entry) -> bool:
        """Whether both answers are what they were before they were compared, and nobody has reported the pair."""
        answers = self._answers
        current = all(answers.is_current(entry.key, entry.created) for entry in (stored, fresh))
        return current and not answers.denies(question, stored.key)

    def observe(self, hit: Hit, right: bool | None, source: Source) -> None:
        """Keep an observation of a hit with a score, here and in the store."""
        answers = self._answers
        assert answers.evidence is not None and hit.score is not None
        observation = Observation(
            at=time.time(),
            tenant=hit.tenant,
            group=hit.group,
            entry=hit.entry,
            created=hit.created,
            asked=hit.asked,
            score=hit.score,
            right=right,
            source=source,
            judge=answers.evidence.judge,
        )
        answers.evidence.add(observation, of_this_answer=answers.is_current(hit.entry, hit.created))
        answers.writer.observe(observation)
        told = {True: "right", False: "wrong", None: "unsure"}[right]
        answers.metrics.evidence.labels(source, told).inc()

    async def _rules_say(self, asked: str, old: str, new: str) -> Verdict:
        verdict = compared(old, new, asked, None)
        return compared(old, new, asked, await self._cosine(old, new)) if verdict == "unsure" else verdict

    async def _cosine(self, old: str, new: str) -> float | None:
        """How near two answers are: the cosine of the means of their parts' vectors."""
        import numpy  # which is there wherever a semantic tier is

        semantic = self._answers.semantic
        if semantic is None:
            return None
        means = []
        for text in (old, new):
            vectors = [vector for part in _parts(text) if (vector := await semantic.vector(part)) is not None]
            if not vectors:
                return None
            mean = numpy.mean(vectors, axis=0)
            means.append(mean / numpy.linalg.norm(mean))
        return float(means[0] @ means[1])

    def _alias(self, fresh: Entry, entry: Entry) -> None:
        answers = self._answers
        answers.keep(
            replace(fresh, body=b"", target=entry.key, expires=min(fresh.expires, entry.expires), cost=1.0,
                    stale_until=0.0, tags=tuple(dict.fromkeys((*fresh.tags, *entry.tags))))
        )  # fmt: skip
        answers.metrics.answer_writes.labels("alias", "").inc()


def _parts(text: str) -> Sequence[str]:
    words = text.split()
    parts = [" ".join(words[start : start + WORDS]) for start in range(0, len(words), WORDS)]
    return parts if len(parts) <= PARTS else [*parts[: PARTS - 1], parts[-1]]
