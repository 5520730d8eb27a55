"""Any other `/v1/*` path: relayed, metered and uncached.

What only computes goes to where its model runs, if that is configured; everything else, which may make things that
later requests name, to the default backend. Tenants with keys of ours share the gateway's account there, so what lists
or names such things is not for them unless their file says so, and their requests must say which model they use.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import orjson

from backends.dialects import forms, sse, usage
from backends.dialects.hidden_usage import HiddenUsage
from backends.dialects.openai_chat import USAGE_COMMENT, MalformedRequest
from backends.protocol import Answer, Usage
from gateway.api.endpoint import Door, Endpoint
from gateway.ask import EVENT_BYTES, Ask
from gateway.dispatch import Dispatch, Dispatched, Told
from gateway.errors import ModelNotAllowed, NotForTenants, UnknownModel
from gateway.exchange import COPY_LIMIT, Body, Incoming, Served
from policies import routing

BY_MODEL = frozenset({"/completions", "/embeddings"})
"""Paths that go nowhere but to where their model runs."""
_COMPUTES = re.compile(
    r"/(completions|embeddings|messages(/count_tokens)?|responses(/input_tokens)?|moderations|rerank|score|classify"
    r"|tokenize|detokenize|images/(generations|edits|variations)|audio/(speech|transcriptions|translations))"
)
"""Paths that compute, so that their model decides where they go."""
TAIL = 4096
"""Bytes at the end of an answer that are kept when the whole is not."""
_NO_MODEL_NEEDED = frozenset({"/moderations", "/images/generations", "/images/edits", "/images/variations"})


class Passthrough(Endpoint):
    """Relays whole requests. The default backend is the first one that is not the built-in engine, if there is one."""

    surface = "passthrough"

    def __init__(self, dispatch: Dispatch, door: Door) -> None:
        super().__init__(door)
        self._dispatch = dispatch
        remote = [name for name, backend in dispatch.backends.items() if backend.kind != "engine"]
        self._backend = remote[0] if remote else next(iter(dispatch.backends), "")

    async def serve(self, request: Incoming) -> Served:
        started = time.perf_counter()
        scope, tenant = request.scope, request.tenant
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        path = raw_path.decode("latin-1").partition("?")[0].removeprefix("/v1")
        computes = scope["method"] == "POST" and _COMPUTES.fullmatch(path) is not None
        if tenant.key:
            self._refuse_what_is_shared(request, path, computes)
        downgraded = False
        if computes:
            request.body, downgraded = await self.door.admission.afford(request)
        fields = _json(request.body) if computes else {}
        model = _model(request, fields) if computes else ""
        if tenant.key and computes:
            _refuse_unnamed(request, path, fields, model, tenant.policy.models)
        if not self._backend:
            raise UnknownModel(f"no backend is configured that /v1{path} could be passed on to")
        routed = bool(model) and (path in BY_MODEL or self._knows(model, request))
        if routed:
            self._dispatch.route(model, tenant)  # one that is not routed goes nowhere: somebody may have mistyped it
        user = tenant.user(request.headers, fields)
        ticket = await self.door.admission.enter(request, user, model, downgraded)
        overhead = time.perf_counter() - started
        request.watch.start()
        ask = Ask(path, request.query, request.headers, request.body, model, tenant, fields)
        relay = None if routed else (self._backend, scope["method"])
        served = _served(await self.door.admission.open(ticket, ask, relay), told=computes)
        served.tenant, served.started, served.overhead = tenant.name, started, overhead
        served.model, served.stream = model if routed else "", ask.stream
        return served

    def _refuse_what_is_shared(self, request: Incoming, path: str, computes: bool) -> None:
        if not computes and request.tenant.policy.relay != "all":
            raise NotForTenants(
                f"{request.scope['method']} /v1{path} could reach what other tenants keep at the provider; it is "
                "passed on only for a tenant whose file says relay: all"
            )

    def _knows(self, model: str, request: Incoming) -> bool:
        try:
            self._dispatch.route(model, request.tenant)
        except UnknownModel:
            return False
        return True


def _refuse_unnamed(
    request: Incoming, path: str, fields: Mapping[str, Any], model: str, allowed: tuple[str, ...]
) -> None:
    """A tenant's body must be readable here: what cannot be read cannot be limited, charged or allowed."""
    if request.headers.get("content-encoding", "identity") != "identity":
        raise MalformedRequest("a compressed body cannot be read here; send it plain")
    if not fields and not _is_form(request):
        raise MalformedRequest("the body must be a JSON object or a form")
    if not model and (path not in _NO_MODEL_NEEDED or allowed != ("*",)):
        raise MalformedRequest("model must be a string, once", "model")
    if model and allowed != ("*",) and not routing.allows(allowed, model):
        raise ModelNotAllowed(f"the model {model!r} is not one of yours; GET /v1/models lists those", model)


def _served(dispatched: Dispatched, told: bool) -> Served:
    """`told`: the answer may say what it took."""
    reply = dispatched.reply
    head = [(name, value) for name, value in dispatched.headers() if name not in (b"date", b"x-request-id")]
    head += [(b"x-hitherto-cache", b"bypass"), (b"x-hitherto-backend", dispatched.backend.encode())]
    if dispatched.prompt_cache:
        head.append((b"x-hitherto-prompt-cache", dispatched.prompt_cache.encode()))
    served = Served(reply.status, head, backend=dispatched.backend, cache="bypass", reason="not-cacheable")
    served.backend_kind, served.priced = dispatched.kind, dispatched.priced
    passing = _Passing(dispatched, served, told)
    served.chunks = Body(passing.chunks(), passing.end)
    return served


class _Passing:
    """Passes a body on; what it says of tokens is noted at the end."""

    def __init__(self, dispatched: Dispatched, served: Served, told: bool) -> None:
        self._dispatched, self._served, self._told = dispatched, served, told
        self._size = self._deltas = 0
        self._whole, self._tail = False, b""
        self._hidden = HiddenUsage() if dispatched.hides_usage else None

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        reply, hidden = self._dispatched.reply, self._hidden
        copy, kept = bytearray(), self._told
        try:
            if reply.whole is not None and hidden is None:
                self._size, self._whole = len(reply.whole), True
                copy += reply.whole if self._told and len(reply.whole) <= COPY_LIMIT else b""
                self._tail = reply.whole[-TAIL:]
                self._note(bytes(copy))
                self._served.headers += self._settle()
                yield reply.whole
                return
            async for chunk in reply.chunks():
                self._size += len(chunk)
                self._deltas += sse.deltas(chunk)
                kept = kept and len(copy) + len(chunk) <= COPY_LIMIT
                if kept:
                    copy += chunk
                else:
                    self._tail = (self._tail + chunk)[-TAIL:]
                if chunk := chunk if hidden is None else hidden.passed(chunk):
                    yield chunk
            self._whole = True
            if hidden is not None and (rest := hidden.ended()):
                yield rest
        finally:
            if self._served.answer is None:
                self._note(bytes(copy) if kept else b"")
            await self.end()

    def _note(self, copy: bytes) -> None:
        """Keep what a body, or the beginning of one, says of its tokens."""
        used = usage_in(copy) if copy else usage_at_the_end(self._tail)
        if (
            used is not None and not self._whole
        ):  # what a stream says of its answer at its beginning is not the end of it
            used = replace(used, completion=max(used.completion, self._deltas or self._size // EVENT_BYTES))
        self._served.answer = Answer({}, (), used) if used is not None else None

    async def end(self) -> None:
        """Settle what it took, and let the backend go."""
        try:
            self._settle()
        finally:
            await self._dispatched.reply.close()

    def _settle(self) -> list[tuple[bytes, bytes]]:
        used = self._served.answer.usage if self._served.answer is not None else None
        told = Told(used, self._size, self._deltas, self._whole) if self._told else Told(None)
        return self._dispatched.settle(told)


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _is_form(request: Incoming) -> bool:
    return forms.is_form(request.headers.get("content-type", ""))


def _model(request: Incoming, fields: Mapping[str, Any]) -> str:
    """The model that a JSON body or a form names; empty if there is none, or more than one."""
    if fields or not _is_form(request):
        model = fields.get("model")
        return model if isinstance(model, str) else ""
    found = forms.values(request.body, request.headers["content-type"], "model")
    return found[0] if len(found) == 1 else ""


def usage_in(body: bytes) -> Usage | None:
    """What an answer, whole or streamed, says of its tokens; a stream may tell it in several events."""
    if body.lstrip().startswith(b"{"):
        return usage.read(_told(_json(body)))
    told: dict[str, Any] = {}
    for text in sse.data_fields(body + b"\n\n"):
        if b'"usage' in text:
            told = usage.merged(told, _told(_json(text)))
    for line in sse.comments(body):
        if line.startswith(USAGE_COMMENT):
            told = usage.merged(told, _json(line[len(USAGE_COMMENT) :]))
    return usage.read(told)


def usage_at_the_end(tail: bytes) -> Usage | None:
    """What the last bytes of an answer that is too long to be kept say of its tokens."""
    _, found, rest = tail.rpartition(b'"usage"')
    if not found:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(rest.decode(errors="replace").lstrip(" \t\r\n:"))
    except ValueError:
        return None
    return usage.read(value)


def _told(value: dict[str, Any]) -> dict[str, Any]:
    """The usage of an answer or an event: at the top, or in the message or response that it carries."""
    for holder in (value, value.get("message"), value.get("response")):
        for name in ("usage", "usageMetadata"):
            found = holder.get(name) if isinstance(holder, dict) else None
            if isinstance(found, dict):
                return found
    return {}
