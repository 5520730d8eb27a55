"""The life of a request, in order: understand it, look it up, compute it, remember it, say what happened."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import aclosing
from dataclasses import replace
from functools import partial

import orjson

from backends.dialects import openai_chat
from backends.dialects.openai_chat import MalformedRequest
from backends.protocol import BackendError
from gateway.admission import Admission
from gateway.ask import Ask
from gateway.cache.answers import Answers
from gateway.cache.key import Scope, key_digest
from gateway.cache.lookup import Lookup
from gateway.cache.question import Question, without_history
from gateway.computation import Computation
from gateway.dispatch import Dispatch, Told, forwarded
from gateway.errors import BudgetSpent, Limited, NotCached, Unable
from gateway.exchange import Incoming, Served, Ticket
from gateway.logs import new_id
from gateway.sharing import Sharing
from gateway.tenant import Tenant
from policies.cacheability import wants_variety
from policies.controls import is_litellm_control, parse_controls
from policies.retry import TRANSIENT

AUDITS = 16
"""So many answers are computed behind the back of those who are served, at a time; what is more is not audited."""
CONSULT_SECONDS = 30.0
"""A judge that takes longer has no say."""


class Pipeline:
    """Serves one chat request at a time, any number at once."""

    def __init__(self, answers: Answers, dispatch: Dispatch, admission: Admission) -> None:
        self._answers, self._dispatch, self._admission = answers, dispatch, admission
        self._sharing = Sharing(answers)
        self._behind: dict[bytes, asyncio.Task[None]] = {}

    async def serve(self, request: Incoming) -> Served:
        """The answer to a chat completion request, from the cache or a backend. Raises what `errors` has a word for."""
        started = time.perf_counter()
        sent, downgraded = await self._admission.afford(request)
        ask, question, scope, shape = self.understood(request.headers, sent, request.query, request.tenant)
        tags = question.controls.tags
        ticket = await self._admission.enter(request, question.user, question.view.model, downgraded, tags)
        lookup = await self._answers.lookup(question)
        ticket.looked = lookup.took
        flying = Computation(self._answers, self._admission, ticket, ask, question, lookup, scope, shape, started)
        if lookup.entry is not None:
            if (served := flying.replayed(lookup)) is not None:
                self._answers.note_served(request.id, question, lookup)
                if lookup.tier == "stale":
                    self._compute_behind(flying, Lookup("miss", "revalidate"), "refresh")
                elif lookup.tier == "semantic":
                    self._audit(flying, lookup)
                return served
            flying.lookup = lookup = Lookup("miss", "fault")
        if question.controls.only_if_cached:
            raise NotCached(f"only-if-cached: no stored answer ({lookup.reason})")
        overhead = time.perf_counter() - started
        request.watch.start()
        served = await self._computed_or_stale(flying)
        served.overhead = overhead
        return served

    def understood(
        self, headers: dict[str, str], sent: bytes, query: str, tenant: Tenant
    ) -> tuple[Ask, Question, Scope, bytes]:
        """The request for a backend, what is asked, what decides the answer beside that, and the stream's options."""
        rules = tenant.policy.rules
        body, raw = tenant.policy.templates.applied(openai_chat.parse(sent), sent, headers)
        controls = parse_controls(headers, body.get("cache"))
        ours = is_litellm_control(body.get("cache"))
        if ours:
            body = {name: value for name, value in body.items() if name != "cache"}
        view = openai_chat.view(body)
        fields = view.scope_fields
        ask = Ask("/chat/completions", query, headers, raw, view.model, tenant, fields, view.question)
        if rules.drops_history and not rules.shadow and not controls.exact_only:
            view = without_history(view)
        target = self._dispatch.identity(ask)
        user = tenant.user(headers, body)
        apart = user if rules.per_user else ""
        scope = Scope(view, tenant.name, target, forwarded(headers), query, controls.namespace, apart)
        try:
            digest = scope.digest()
            options = orjson.dumps(body.get("stream_options"), option=orjson.OPT_SORT_KEYS)
            if ours:
                ask.body = orjson.dumps(body)
        except (TypeError, RecursionError) as error:  # more than 254 levels: nothing that a model was ever asked
            raise MalformedRequest("the body is nested too deeply") from error
        key = key_digest(digest, view.question)
        if wants_variety(view, rules):
            key = key_digest(digest, view.question, self._answers.turn(key, rules.buckets))
        redacted = self._dispatch.redaction(tenant)
        consult = partial(self._consult, tenant) if rules.judge is not None else None
        question = Question(key, digest, tenant.name, view, controls, rules, user, consult, redacted)
        return ask, question, scope, options

    async def close(self) -> None:
        """Let the refreshing of stale answers go."""
        for task in list(self._behind.values()):
            task.cancel()
        await asyncio.gather(*self._behind.values(), return_exceptions=True)
        await self._sharing.close()

    async def _computed_or_stale(self, flying: Computation) -> Served:
        """What a backend says, or an old answer if none can say anything and the rules allow it."""
        try:
            served = await self._computed(flying)
        except BackendError:
            if (old := await self._stale(flying)) is None:
                raise
            return old
        if served.status in TRANSIENT:
            try:
                old = await self._stale(flying)
            except BaseException:  # the client has left
                await _let_go(served)
                raise
            if old is not None:
                await _let_go(served)
                return old
        return served

    async def _stale(self, flying: Computation) -> Served | None:
        entry = await self._answers.stale(flying.question)
        return flying.replayed(Lookup("stale", entry=entry)) if entry is not None else None

    async def _computed(self, flying: Computation) -> Served:
        if not flying.shareable:
            return flying.served(await flying.open())
        return await self._sharing.shared(flying)

    async def _consult(self, tenant: Tenant, model: str, prompt: str) -> str:
        """What a model says to a prompt, asked in a tenant's name. Raises what `Admission.open` raises, or
        TimeoutError."""
        fields = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        ask = Ask("/chat/completions", "", {}, orjson.dumps(fields), model, tenant, fields)
        if await self._admission.is_spent(tenant):
            raise BudgetSpent("the tenant's budget is spent")
        ticket = Ticket(tenant, holder=new_id(), surface=openai_chat.SURFACE, told=True, behind="judgement")
        async with asyncio.timeout(CONSULT_SECONDS):
            dispatched = await self._admission.open(ticket, ask)
            told = Told(None, 0, 0)
            try:
                reply = dispatched.reply
                body = reply.whole if reply.whole is not None else b"".join([chunk async for chunk in reply.chunks()])
                answer = openai_chat.answer_from_json(body)
                told = Told(answer.usage, len(body), 0)
            finally:
                dispatched.settle(told)
                await dispatched.reply.close()
        return openai_chat.text_of(orjson.dumps(answer.body))

    def _audit(self, flying: Computation, lookup: Lookup) -> None:
        """Have one of so many semantic hits computed as well, unless nobody would compare it or the budget is spent."""
        question = flying.question
        if random.random() >= question.rules.audit or len(self._behind) >= AUDITS or flying.ticket.downgraded:
            return
        if self._answers.learning.takes(question):
            audited = Lookup("miss", "audit", similarity=lookup.similarity, score=lookup.score, near=lookup.nearest)
            audited.source = "audit"
            self._compute_behind(flying, audited, "audit")

    def _compute_behind(self, flying: Computation, lookup: Lookup, why: str) -> None:
        """Compute a fresh answer behind the back of somebody who has got a stored one, once at a time."""
        key, controls = flying.question.key, flying.question.controls
        if controls.no_store or controls.ttl == 0:
            return  # the fresh answer would not be kept
        if key in self._behind or self._sharing.is_under_way(flying.key):
            return
        flying.lookup = lookup
        # What nobody has asked for takes nothing of what a user may ask for; budgets are another matter.
        limits = () if why == "audit" else flying.ticket.limits
        flying.ticket = replace(flying.ticket, limits=limits, bills=[], told=True, behind=why)
        flying.question = replace(flying.question, controls=replace(flying.question.controls, no_cache=True))

        async def fetch() -> None:
            try:
                served = await self._sharing.led(flying)
                assert served.chunks is not None
                async with aclosing(served.chunks) as chunks:
                    async for _ in chunks:
                        pass
            except (BackendError, Limited, BudgetSpent, Unable):
                pass  # the stale answer goes on serving for as long as it may
            except Exception:
                self._answers.fault("revalidate")
            finally:
                self._behind.pop(key, None)

        self._behind[key] = asyncio.create_task(fetch())


async def _let_go(served: Served) -> None:
    """Give up a response that nobody will read."""
    if served.chunks is not None:
        try:
            await served.chunks.aclose()
        except BackendError:
            pass
