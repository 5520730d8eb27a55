"""Which of the nearest stored questions lends its answer, if any does: guards, then the verifier, then the limit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from backends.dialects import openai_chat
from gateway.cache.evidence import Evidence
from gateway.cache.key import group_digest
from gateway.cache.lookup import Found, Lookup
from gateway.cache.question import Question
from gateway.stores.contract import Entry
from policies import similarity
from policies.similarity.language import is_english

if TYPE_CHECKING:
    from gateway.cache.answers import Answers
    from gateway.cache.semantic import Semantic

VERIFIED = 3
"""So many candidates are shown to the verifier: each takes about as long as encoding the question."""
WORTH_COMPARING = 0.0
"""Log-odds from which on a refused candidate's answer is compared with the fresh one: it may be the same."""


@dataclass(frozen=True, slots=True)
class Considered:
    """A stored question near the one that is asked, and what speaks against its answer; empty: nothing."""

    entry: Entry
    wording: str
    cosine: float
    score: float | None
    limit: float | None
    refused: str


class Chooser:
    """Decides for one gateway's answer cache."""

    def __init__(self, answers: Answers, semantic: Semantic, evidence: Evidence) -> None:
        self._answers, self._semantic, self._evidence = answers, semantic, evidence

    async def choose(self, question: Question, text: str, nearest: list[tuple[bytes, float]]) -> Lookup:
        """The first candidate that may serve; else the reason why the best one was refused."""
        lookup = Lookup("miss", similarity=nearest[0][1], nearest=nearest[0][0]) if nearest else Lookup("miss")
        verified, best = 0, None
        for key, cosine in nearest:
            if cosine < self._least(question) or verified == VERIFIED:
                break
            found, unfit = await self._answers.fetched(key, question)
            if found is None or found.wording is None or found.entry.scope != question.scope:
                lookup.reason = lookup.reason or unfit
                continue
            one = await self._considered(question, text, found, cosine)
            verified += one.score is not None
            if one.score is not None:
                best = one.score if best is None else max(best, one.score)
            if not one.refused:
                self._accept(lookup, question, one)
                break
            self._refuse(lookup, one)
        if nearest:
            self._evidence.looked(question.tenant, best)
        lookup.reason = lookup.reason or ("" if lookup.entry is not None else "below-threshold")
        return lookup

    async def agrees(self, question: Question, text: str, other: str) -> bool:
        """Whether a question whose answer is under way may lend it: no guard and not the verifier speaks against it."""
        if similarity.veto(text, other):
            return False
        score = await self._semantic.score(text, other)
        return score is None or score >= self._limit(question, b"")

    async def consider(self, question: Question, text: str, nearest: list[tuple[bytes, float]]) -> list[Considered]:
        """Every candidate, whether it would be served or not."""
        considered = []
        for key, cosine in nearest:
            found, _ = await self._answers.fetched(key, question)
            if found is not None and found.wording is not None:
                considered.append(await self._considered(question, text, found, cosine))
        return considered

    async def _considered(self, question: Question, text: str, found: Found, cosine: float) -> Considered:
        wording = found.wording or ""
        refused, score, limit = self._objection(question, text, found, cosine), None, None
        if not refused and cosine < question.threshold(self._semantic.threshold):
            refused = "below-threshold"
        judge = question.rules.judge
        if not refused and judge is not None and judge.hits:
            answer = openai_chat.text_of(found.entry.body)
            refused = "" if await self._answers.arbiter.serves(question, wording, answer) else "judge"
        elif not refused:
            limit = self._limit(question, found.entry.key)
            score = await self._semantic.score(text, wording)
            score = cosine if score is None else score
            if score < limit:
                refused = "evidence" if self._semantic.verifier is None else "verifier"
        return Considered(found.entry, wording, cosine, score, limit, refused)

    def _limit(self, question: Question, entry: bytes) -> float:
        """The score that an entry must reach: by evidence, or before there is any what the config says."""
        semantic = self._semantic
        least = question.threshold(semantic.threshold) if semantic.verifier is None else semantic.accept
        return self._evidence.limit(question, group_digest(question), entry, least)

    def _least(self, question: Question) -> float:
        """The cosine of what is looked at: without a verifier also what might become an alias."""
        grey = question.rules.grey if self._semantic.verifier is None else 0.0
        return question.threshold(self._semantic.threshold) - grey

    def _objection(self, question: Question, text: str, found: Found, cosine: float) -> str:
        """What speaks against giving this question that entry's answer, whatever the verifier says."""
        wording = found.wording or ""
        if self._answers.denies(question, found.entry.key):
            return "veto-reported"
        if self._semantic.languages == "en" and not is_english(wording):
            return "veto-language"
        guards = similarity.GUARDS if self._semantic.verifier is None else similarity.hard(cosine)
        if veto := similarity.veto(text, wording, guards):
            return f"veto-{veto}"
        if similarity.answer_tells(text, wording, openai_chat.text_of(found.entry.body)):
            return "veto-answer"
        return ""

    def _accept(self, lookup: Lookup, question: Question, one: Considered) -> None:
        lookup.similarity, lookup.score, lookup.nearest, lookup.reason = one.cosine, one.score, one.entry.key, ""
        lookup.near = None  # of one that was refused before
        if question.rules.shadow:
            lookup.reason, lookup.near = "shadow", one.entry.key
        else:
            lookup.tier, lookup.entry = "semantic", one.entry

    def _refuse(self, lookup: Lookup, one: Considered) -> None:
        """Note why, and whether the fresh answer is worth comparing with this one."""
        lookup.reason = lookup.reason or one.refused
        if one.refused == "below-threshold" and lookup.near is None:  # without a verifier: what may become an alias
            lookup.near, lookup.score = one.entry.key, one.cosine
        elif one.score is not None and one.refused == "verifier":
            if one.score >= WORTH_COMPARING and (lookup.near is None or one.score > (lookup.score or 0.0)):
                lookup.near, lookup.score = one.entry.key, one.score
            elif lookup.score is None:
                lookup.score = one.score
