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
from policies.cacheability import Judge
from policies.similarity.language import is_english

if TYPE_CHECKING:
    from gateway.cache.answers import Answers
    from gateway.cache.semantic import Semantic

VERIFIED = 3
"""So many candidates are shown to the verifier: each takes about as long as encoding the question."""
CLOSE = 0.1
"""Those whose cosine is so much lower than that of the first one shown are not worth that time."""
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
        verified, first, best = 0, 0.0, None
        for key, cosine in nearest:
            if cosine < self._least(question) or verified == VERIFIED or (verified and cosine < first - CLOSE):
                break
            found, unfit = await self._answers.fetched(key, question)
            if found is None or found.wording is None or found.entry.scope != question.scope:
                lookup.reason = lookup.reason or unfit
                continue
            if key == question.key and not found.stale and not (found.alias and question.rules.shadow):
                return Lookup("alias" if found.alias else "exact", entry=found.entry)  # stored since we looked
            one = await self._considered(question, text, found, cosine, question.rules.judge)
            if one.score is not None:
                verified, first = verified + 1, first or cosine
                best = one.score if best is None else max(best, one.score)
            if not one.refused:
                self._accept(lookup, question, one)
                break
            self._refuse(lookup, one)
        if nearest:
            self._evidence.looked(question.tenant, best)
        lookup.reason = lookup.reason or ("" if lookup.entry is not None else "below-threshold")
        return lookup

    async def agrees(self, question: Question, text: str, other: str, key: bytes, cosine: float) -> bool:
        """Whether a question whose answer is under way, to be stored under a key, may lend it: nothing speaks against
        it."""
        judge = question.rules.judge
        if (judge is not None and judge.hits) or self._foreign(text) or self._foreign(other):
            return False
        if similarity.veto(text, other):
            return False
        score = cosine if self._semantic.verifier is None else await self._semantic.score(text, other)
        return score is not None and score >= self._limit(question, key)

    async def consider(self, question: Question, text: str, nearest: list[tuple[bytes, float]]) -> list[Considered]:
        """Every candidate, whether it would be served or not."""
        considered = []
        for key, cosine in nearest:
            found, _ = await self._answers.fetched(key, question)
            if found is not None and found.wording is not None:
                considered.append(await self._considered(question, text, found, cosine, None))
        return considered

    async def _considered(
        self, question: Question, text: str, found: Found, cosine: float, judge: Judge | None
    ) -> Considered:
        wording, limit, score = found.wording or "", None, None
        refused = self._objection(question, text, found, cosine)
        if not refused and cosine < question.threshold(self._semantic.threshold):
            refused = "below-threshold"
        if not refused:
            limit, score = self._limit(question, found.entry.key), cosine
            if self._semantic.verifier is not None:
                score = await self._semantic.score(text, wording)
            if score is None:
                refused = "unreadable"
            elif judge is not None and judge.hits:
                refused = await self._judged(question, found)
            elif not score >= limit:
                locked = self._evidence.locked(question, found.entry.key)
                refused = "evidence" if locked or self._semantic.verifier is None else "verifier"
        return Considered(found.entry, wording, cosine, score, limit, refused)

    async def _judged(self, question: Question, found: Found) -> str:
        """What speaks against an entry where the tenant's judge has the last word."""
        if self._evidence.locked(question, found.entry.key):
            return "evidence"
        answer = openai_chat.text_of(found.entry.body)
        return "" if answer and await self._answers.arbiter.serves(question, found.wording or "", answer) else "judge"

    def _limit(self, question: Question, entry: bytes) -> float:
        """The score that an entry must reach: by evidence, or before there is any what the config says."""
        semantic = self._semantic
        least = question.threshold(semantic.threshold) if semantic.verifier is None else semantic.accept
        return self._evidence.limit(question, group_digest(question), entry, least)

    def _least(self, question: Question) -> float:
        """The cosine of what is looked at: also what is under the threshold, and might become an alias."""
        threshold, grey = question.threshold(self._semantic.threshold), question.rules.grey
        if self._semantic.verifier is None:
            return threshold - grey
        return max(min(threshold, self._semantic.threshold), threshold - grey)

    def _objection(self, question: Question, text: str, found: Found, cosine: float) -> str:
        """What speaks against giving this question that entry's answer, whatever the verifier says."""
        wording = found.wording or ""
        if self._answers.denies(question, found.entry.key):
            return "veto-reported"
        if self._foreign(wording):
            return "veto-language"
        guards = similarity.GUARDS if self._semantic.verifier is None else similarity.hard(cosine)
        if veto := similarity.veto(text, wording, guards):
            return f"veto-{veto}"
        if similarity.answer_tells(text, wording, openai_chat.text_of(found.entry.body)):
            return "veto-answer"
        return ""

    def _foreign(self, text: str) -> bool:
        return self._semantic.languages == "en" and not is_english(text)

    def _accept(self, lookup: Lookup, question: Question, one: Considered) -> None:
        lookup.similarity, lookup.score, lookup.nearest, lookup.reason = one.cosine, one.score, one.entry.key, ""
        lookup.near = None  # of one that was refused before
        if question.rules.shadow:
            lookup.reason, lookup.near, lookup.source = "shadow", one.entry.key, "shadow"
        else:
            lookup.tier, lookup.entry = "semantic", one.entry

    def _refuse(self, lookup: Lookup, one: Considered) -> None:
        """Note why, and whether the fresh answer is worth comparing with this one."""
        lookup.reason = lookup.reason or one.refused
        if one.refused == "below-threshold" and lookup.near is None:  # what may become an alias
            lookup.near = one.entry.key
            lookup.score = one.cosine if self._semantic.verifier is None else None
        elif one.score is not None:  # the verifier, the evidence or a judge
            if one.score >= WORTH_COMPARING and (lookup.near is None or one.score > (lookup.score or 0.0)):
                lookup.near, lookup.score = one.entry.key, one.score
            elif lookup.score is None:
                lookup.score = one.score
