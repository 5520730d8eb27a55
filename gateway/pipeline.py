"""The life of a request, in order: understand it, look it up, compute it, remember it, say what happened."""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial

import orjson

from backends import asgi
from backends.dialects import openai_chat
from backends.dialects.openai_chat import MalformedRequest
from backends.protocol import Answer, BackendError, BackendInterrupted
from gateway.api.auth import Tenant
from gateway.cache.answers import Answers, Lookup, Question
from gateway.cache.key import key_digest, scope_digest
from gateway.dispatch import Dispatch, Dispatched, forwarded
from gateway.errors import NotCached, refusal
from gateway.flights import Flights, Key
from gateway.logs import new_id
from gateway.templates import Templates
from policies.cacheability import CacheRules, parse_controls

COPY_LIMIT = 4 << 20
"""Longer answers are relayed, but not remembered."""
_TRANSIENT = frozenset({408, 429, 500, 502, 503, 504, 529})
_TERMINAL = re.compile(rb"data: ?\[DONE\]\s*$")


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request whose body has arrived. Start `watch` before waiting for anybody else."""

    scope: asgi.Scope
    headers: dict[str, str]
    body: bytes
    tenant: Tenant
    watch: asgi.HangupWatch

    @property
    def query(self) -> str:
        query: bytes = self.scope["query_string"]
        return query.decode("latin-1")


@dataclass(slots=True)
class Served:
    """A response on its way: head, body, and what the log and the metrics will tell of it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes | None = None
    chunks: AsyncGenerator[bytes, None] | None = None
    tenant: str = ""
    model: str = ""
    backend: str = ""
    cache: str = "miss"
    reason: str = ""
    answer: Answer | None = None
    stored: str = ""
    """Why the answer was not stored, or "stored"."""
    backend_kind: str = ""
    started: float = field(default_factory=time.perf_counter)
    overhead: float = 0.0
    first: float | None = None
    """When the first body byte went out."""
    complete: bool = False
    """Whether the last one did."""


class Pipeline:
    """Serves one chat request at a time, any number at once."""

    def __init__(self, answers: Answers, dispatch: Dispatch, rules: CacheRules, templates: Templates) -> None:
        self._answers, self._dispatch, self._rules, self._templates = answers, dispatch, rules, templates
        self._flights: Flights[Served] = Flights()

    async def serve(self, request: Incoming) -> Served:
        """The answer to a chat completion request, from the cache or a backend. Raises what `errors` has a word for."""
        started = time.perf_counter()
        headers, tenant = request.headers, request.tenant
        body, raw = self._templates.applied(openai_chat.parse(request.body), request.body, headers)
        view = openai_chat.view(body)
        controls = parse_controls(headers)
        target = self._dispatch.identity(view.model)
        try:
            scope = scope_digest(view, tenant.name, target, forwarded(headers), request.query, controls.namespace)
        except (TypeError, RecursionError) as error:  # more than 254 levels: nothing that a model was ever asked
            raise MalformedRequest("the body is nested too deeply") from error
        question = Question(key_digest(scope, view.question), scope, tenant.name, view, controls, self._rules)
        lookup = await self._answers.lookup(question)
        if lookup.entry is not None:
            try:
                return self._replay(question, lookup, started)
            except Exception:  # an unreadable entry is a miss like any other cache fault
                self._answers.fault("replay")
                lookup = Lookup("miss", "fault")
        if controls.only_if_cached:
            raise NotCached(f"only-if-cached: no stored answer ({lookup.reason})")
        overhead = time.perf_counter() - started
        request.watch.start()
        open_ = partial(self._dispatch.open, "/chat/completions", request.query, headers, raw, view.model, tenant)
        if lookup.tier == "miss" and not (
            controls.no_store or controls.max_age is not None or controls.ttl is not None
        ):
            options = orjson.dumps(body.get("stream_options"), option=orjson.OPT_SORT_KEYS)
            served = await self._shared(question, lookup, (question.key, (view.stream, options)), open_, started)
        else:
            served = self._relayed(question, lookup, await open_(), started)
        served.overhead = overhead
        return served

    async def _shared(
        self, question: Question, lookup: Lookup, key: Key, open_: Callable[[], Awaitable[Dispatched]], started: float
    ) -> Served:
        """The answer that an identical request is getting just now, or one of our own that others may share.

        Whoever follows a request that fails tries once more, one for all of them; a second failure is theirs too, but
        for refusals: what is wrong with a request may stand in a field that does not decide the answer.
        """

        async def opening() -> tuple[Served, AsyncGenerator[bytes, None]]:
            served = self._relayed(question, lookup, await open_(), started)
            assert served.chunks is not None
            return served, served.chunks

        again = True
        while (flight := self._flights.find(key)) is not None:
            try:
                leader = await flight.head()
            except BackendError:
                if not again:
                    raise
                again = False
                continue
            if leader.status < 400 or (not again and leader.status in _TRANSIENT):
                self._answers.metrics.flights.labels("follower").inc()
                served = self._following(leader, started)
                served.chunks = flight.ride()
                return served
            await flight.leave()
            if not again:
                return self._relayed(question, lookup, await open_(), started)
            again = False
        flight = self._flights.start(key, opening())
        self._answers.metrics.flights.labels("leader").inc()
        served = await flight.head()
        if served.status >= 400:
            flight.close()
        served.chunks = flight.ride()
        return served

    def _following(self, leader: Served, started: float) -> Served:
        changed = {
            b"cache-status": b"hitherto; fwd=miss; collapsed; detail=collapsed",
            b"x-hitherto-reason": b"collapsed",
        }
        headers = [(name, changed.get(name, value)) for name, value in leader.headers]
        served = Served(leader.status, headers, started=started, tenant=leader.tenant, model=leader.model)
        served.backend, served.backend_kind = leader.backend, leader.backend_kind
        served.reason = served.stored = "collapsed"
        return served

    def _replay(self, question: Question, lookup: Lookup, started: float) -> Served:
        entry, view = lookup.entry, question.view
        assert entry is not None
        age, left = max(0, int(time.time() - entry.created)), int(entry.expires - time.time())
        headers = [
            (b"x-hitherto-cache", lookup.tier.encode()),
            (b"cache-status", f"hitherto; hit; ttl={left}; detail={lookup.tier}".encode()),
            (b"age", str(age).encode()),
            (b"x-hitherto-entry", entry.key.hex()[:16].encode()),
            (b"x-hitherto-model", entry.model.encode("latin-1", "replace")),
        ]
        if lookup.similarity is not None:
            headers.append((b"x-hitherto-similarity", f"{lookup.similarity:.4f}".encode()))
        served = Served(200, headers, started=started, tenant=question.tenant, model=view.model, cache=lookup.tier)
        id, created = f"chatcmpl-{new_id()}", int(time.time())
        if view.stream:
            headers.append((b"content-type", b"text/event-stream; charset=utf-8"))
            served.body = b"".join(openai_chat.render_stream(entry.body, id, created, view.include_usage))
        else:
            headers.append((b"content-type", b"application/json"))
            served.body = openai_chat.render_json(entry.body, id, created)
        served.overhead = time.perf_counter() - started
        return served

    def _relayed(self, question: Question, lookup: Lookup, dispatched: Dispatched, started: float) -> Served:
        reply, tier = dispatched.reply, lookup.tier
        reason = lookup.reason.encode()
        forwarded = "bypass" if tier == "bypass" else "miss"
        headers = [_renamed(name, value) for name, value in reply.headers if name != b"date"]
        headers += [
            (b"x-hitherto-cache", tier.encode()),
            (b"cache-status", f"hitherto; fwd={forwarded}; fwd-status={reply.status}; detail=".encode() + reason),
            (b"x-hitherto-reason", reason),
            (b"x-hitherto-backend", dispatched.backend.encode()),
            (b"x-hitherto-model", dispatched.model.encode("latin-1", "replace")),
        ]
        served = Served(reply.status, headers, started=started, tenant=question.tenant, model=question.view.model)
        served.backend, served.backend_kind = dispatched.backend, dispatched.kind
        served.cache, served.reason = tier, lookup.reason
        served.chunks = self._remembering(question, lookup, dispatched, served)
        return served

    async def _remembering(
        self, question: Question, lookup: Lookup, dispatched: Dispatched, served: Served
    ) -> AsyncGenerator[bytes, None]:
        """The upstream's bytes, those of a stream as they come. The answer is stored just before the bytes that end
        it are passed on, so that a client that has them and asks again finds it."""
        reply, types = dispatched.reply, dict(dispatched.reply.headers)
        stream = types.get(b"content-type", b"").startswith(b"text/event-stream")
        copy, kept, begun = bytearray(), b"content-encoding" not in types, False
        try:
            async for chunk in reply.chunks():
                if kept and len(copy) + len(chunk) <= COPY_LIMIT:
                    copy += chunk
                    if not stream:
                        continue  # sent in one piece, so that a body that breaks off becomes a proper error
                    if not served.stored and _TERMINAL.search(copy[-32:]):
                        self._remember(question, lookup, dispatched, bytes(copy), stream, served)
                elif kept:
                    kept, served.stored = False, served.stored or "too-long"
                    chunk = chunk if stream else bytes(copy) + chunk
                begun = True
                yield chunk
            if kept and not served.stored:
                self._remember(question, lookup, dispatched, bytes(copy), stream, served)
            if kept and not stream:
                yield bytes(copy)
        except BackendError as error:
            served.stored = "interrupted"
            if not stream or not begun:
                raise
            # The head is gone, so an SSE client learns of it by an error event instead of a silent end.
            yield b"data: " + refusal(BackendInterrupted(error.backend, error.detail)).body() + b"\n\n"
        finally:
            await reply.close()

    def _remember(
        self, question: Question, lookup: Lookup, dispatched: Dispatched, copy: bytes, stream: bool, served: Served
    ) -> None:
        try:
            answer = openai_chat.answer_from_stream(copy) if stream else openai_chat.answer_from_json(copy)
            served.answer = answer
            if dispatched.fallback:
                served.stored = "fallback"  # the key names the first candidate's answer, and this is another's
                return
            # A stream that was not asked for usage does not tell it; a whole body tells all that there is to tell.
            complete = answer.usage is not None or not stream
            status = dispatched.reply.status
            reason = self._answers.remember(question, lookup, dispatched.backend, status, answer, complete)
        except Exception:
            self._answers.fault("remember")
            reason = "fault"
        served.stored = reason or "stored"


def _renamed(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """The upstream's request id beside ours, not in its place."""
    return (b"x-upstream-request-id" if name == b"x-request-id" else name), value
