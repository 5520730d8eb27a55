"""What an operator can ask of the answer cache: why, what, and away with it."""

from __future__ import annotations

import math
import time
from typing import Any

from gateway.cache.answers import Answers
from gateway.cache.evidence import Hit
from gateway.cache.key import Scope, key_digest
from gateway.cache.question import Question
from gateway.errors import StoreBusy, UnknownAnswer
from gateway.pipeline import Pipeline
from gateway.stores.contract import Entry, Selector
from gateway.tenant import Tenant
from policies import cacheability, volatility
from policies.cacheability import CacheRules

ELSEWHERE = 5
"""How many entries with the same question in other scopes an explanation names."""


class Control:
    """Purge, feedback, statistics and explanations of one gateway's answer cache. Faults of the store are raised."""

    def __init__(self, answers: Answers, pipeline: Pipeline) -> None:
        self._answers, self._pipeline = answers, pipeline

    async def purge(self, selector: Selector, dry_run: bool = False) -> dict[str, Any]:
        """Forget entries, here and wherever the store is shared: how many, and how many bytes of answers."""
        answers = self._answers
        # What waits to be written cannot be found yet, and what cannot be deleted comes back with the next start.
        if not await answers.settled():
            raise StoreBusy("the store takes no writes just now, so nothing was purged; see the log")
        found = await answers.aside(answers.store.find, selector)
        if found and not dry_run:
            answers.forget([(key, created) for key, created, _ in found])
            if not await answers.settled():
                raise StoreBusy("forgotten here, but the store takes no writes just now: it will be tried again")
        return {"entries": len(found), "bytes": sum(size for _, _, size in found), "dry_run": dry_run}

    async def bad_hit(self, entry: str, question: str | None, tenant: str | None = None) -> dict[str, Any]:
        """A wrong answer was served. Never again for this question; without one, or for its own, the entry goes.

        `entry`: the beginning of its key, as `x-hitherto-entry` told it, of any tenant or of one. Raises
        `UnknownAnswer`.
        """
        bad = await self._entry(entry, tenant)
        asked = None if question is None else key_digest(bad.scope, question)
        if asked is None or asked == bad.key or question == bad.question:
            await self.purge(Selector(entry=bad.key.hex()))
            return {"entry": _id(bad.key), "removed": True, "denied": False}
        semantic = self._answers.semantic
        if semantic is not None and question is not None and bad.question is not None:
            score = await semantic.score(question, bad.question)
            self._observe(Hit(bad.tenant, asked, bad.key, b"", bad.created, score), False)
        return await self._deny(bad.key, asked)

    async def report(self, tenant: str, entry: str, question: str, correct: bool) -> dict[str, Any]:
        """What a tenant says of an entry's answer to a question. Raises `UnknownAnswer`."""
        if not correct:
            return await self.bad_hit(entry, question, tenant)
        return {"entry": _id((await self._entry(entry, tenant)).key), "removed": False, "denied": False}

    async def report_served(self, tenant: str, request: str, correct: bool) -> dict[str, Any]:
        """What a tenant says of the stored answer that a request of its got, which is evidence. Raises
        `UnknownAnswer`."""
        answers = self._answers
        hit = answers.hits.reported(tenant, request)
        if hit is None:
            raise UnknownAnswer(
                f"this gateway process does not remember that request {request!r} got a stored answer, or has heard "
                f"of it"
            )
        self._observe(hit, correct)
        done = {"entry": _id(hit.entry), "removed": False, "denied": False}
        if correct or not answers.is_current(hit.entry, hit.created):
            return done  # another answer stands there now
        try:
            if hit.asked != hit.entry:
                return await self._deny(hit.entry, hit.asked)
            answers.forget([(hit.entry, hit.created)])
            if not await answers.settled():
                raise StoreBusy("forgotten here, but the store takes no writes just now: it will be tried again")
        except Exception:
            answers.hits.served(request, hit)  # whoever tries again shall be heard
            raise
        return {**done, "removed": True}

    def _observe(self, hit: Hit, correct: bool) -> None:
        """Let a report be evidence, unless that is known already."""
        answers = self._answers
        if hit.score is not None and answers.evidence is not None and (hit.asked, hit.entry) not in answers.denied:
            answers.learning.observe(hit, correct, "feedback")

    async def _deny(self, bad: bytes, asked: bytes) -> dict[str, Any]:
        """Never again serve an entry to that question."""
        answers = self._answers
        answers.deny(asked, bad)
        await answers.aside(answers.store.deny, asked, bad)
        alias = await answers.aside(answers.store.get, asked)
        if alias is not None and alias.target == bad:
            await self.purge(Selector(entry=asked.hex()))
        return {"entry": _id(bad), "removed": False, "denied": True}

    async def _entry(self, beginning: str, tenant: str | None) -> Entry:
        answers = self._answers
        await answers.settled()
        selector = Selector(entry=beginning, tenant=tenant or "")
        found = [key for key, _, _ in await answers.aside(answers.store.find, selector)]
        stored: list[Entry] = [one for key in found if (one := await answers.aside(answers.store.get, key)) is not None]
        targets = [one for one in stored if one.target is None]
        if len(targets) != 1:
            raise UnknownAnswer(f"{len(targets)} entries begin with {beginning!r}")
        return targets[0]

    def tenants(self) -> list[str]:
        """Whose semantic hits something is known of."""
        return self._answers.evidence.tenants() if self._answers.evidence is not None else []

    def risk(self, tenant: str, rules: CacheRules) -> dict[str, Any]:
        """What is known of a tenant's semantic hits, and what each `max_wrong_rate` would serve."""
        evidence = self._answers.evidence
        mode = "off" if evidence is None or not rules.semantic else "shadow" if rules.shadow else "serve"
        told = {"mode": mode, "max_wrong_rate": rules.max_wrong_rate, "audit": rules.audit}
        return told | (
            evidence.report(tenant, rules.max_wrong_rate, self._least(rules))
            if evidence is not None
            else {"tenant": tenant}
        )

    def _least(self, rules: CacheRules) -> float:
        semantic = self._answers.semantic
        assert semantic is not None
        return semantic.accept if semantic.verifier is not None else rules.threshold or semantic.threshold

    async def statistics(self) -> dict[str, Any]:
        """What is stored, and what of it is in memory."""
        answers = self._answers
        await answers.settled()
        stored = await answers.aside(answers.store.statistics)
        semantic = answers.semantic
        return {
            **stored,
            "in_memory": len(answers.memory),
            "bytes_with_overhead": answers.memory.bytes,
            "indexed": len(semantic) if semantic is not None else 0,
            "embedder": semantic.fingerprint if semantic is not None else "",
        }

    async def explain(self, body: bytes, headers: dict[str, str], tenant: Tenant) -> dict[str, Any]:
        """What a chat completion request would find in the cache, and why. Raises what the request would raise."""
        _, question, scope, _ = self._pipeline.understood(headers, body, "", tenant)
        answers = self._answers
        lookup = await answers.lookup(question)
        readable = cacheability.may_read(question.view, question.rules, question.controls)
        life, kind = volatility.lifetime(question.view.question, question.rules.volatile)
        considered = await answers.consider(question) if readable.semantic else []
        return {
            "outcome": lookup.tier,
            "reason": lookup.reason,
            "key": _id(question.key),
            "scope": _id(question.scope),
            "question": question.view.question,
            "no_question": question.view.no_question,
            "exact": readable.exact,
            "semantic": readable.semantic,
            "threshold": question.threshold(answers.semantic.threshold) if answers.semantic is not None else None,
            "would_live": cacheability.fresh_for(question.view, question.rules, question.controls),
            "volatile": kind if life < question.rules.ttl else "",
            "entry": _entry(lookup.entry) if lookup.entry is not None else None,
            "nearest": [
                {
                    "entry": _id(one.entry.key),
                    "question": one.wording,
                    "similarity": round(one.cosine, 4),
                    "score": _rounded(one.score),
                    "limit": _rounded(one.limit),
                    "refused": one.refused,
                }
                for one in considered
            ],
            "elsewhere": await self._elsewhere(question, scope),
        }

    async def _elsewhere(self, question: Question, scope: Scope) -> list[dict[str, Any]]:
        """Entries with the very same question that other fields keep away, with the names of those fields."""
        answers, text = self._answers, question.view.question
        if text is None:
            return []
        mine, found = scope.parts(), []
        for key, other, created in await answers.aside(answers.store.elsewhere, question.scope, text, ELSEWHERE):
            theirs = await answers.aside(answers.store.described, other)
            differing = sorted(name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name))
            found.append({"entry": _id(key), "age": round(time.time() - created, 1), "differs": differing})
        return found


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 3)


def _id(key: bytes) -> str:
    return key.hex()[:16]


def _entry(entry: Entry) -> dict[str, Any]:
    return {
        "entry": _id(entry.key),
        "question": entry.question,
        "model": entry.model,
        "backend": entry.backend,
        "tenant": entry.tenant,
        "tags": list(entry.tags),
        "age": round(time.time() - entry.created, 1),
        "expires_in": round(entry.expires - time.time(), 1),
    }
