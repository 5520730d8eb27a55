"""Any other `/v1/*` path: relayed as it is, metered and uncached.

What only computes (text completions, messages) goes to where its model runs; everything else, which may make things
that later requests name, to the default backend. Tenants with keys of ours share the gateway's account there, so what
lists or names such things is not for them unless their file says so.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator
from typing import Any

import orjson

from backends.dialects import sse, usage
from backends.dialects.openai_chat import USAGE_COMMENT
from backends.protocol import Answer, Usage
from gateway.api.endpoint import Door, Endpoint
from gateway.dispatch import Ask, Dispatch, Dispatched
from gateway.errors import ModelNotAllowed, NotForTenants, UnknownModel
from gateway.exchange import COPY_LIMIT, Body, Incoming, Served
from policies import routing

BY_MODEL = frozenset({"/completions", "/embeddings"})
"""Paths that are routed by the model that their body names."""
BY_KNOWN_MODEL = frozenset({"/messages", "/messages/count_tokens"})
"""The same where that model is routed; else they go to the default backend."""
_COMPUTES = re.compile(
    r"/(completions|embeddings|messages(/count_tokens)?|responses(/input_tokens)?|moderations|rerank|score|classify"
    r"|tokenize|detokenize|images/(generations|edits|variations)|audio/(speech|transcriptions|translations))"
)
_FORM_MODEL = re.compile(rb'name="model"\r\n(?:[^\r\n]+\r\n)*\r\n([^\r\n]*)\r\n')


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
        posted = scope["method"] == "POST"
        body = _json(request.body) if posted else {}
        model = _model(request.body, body) if posted else ""
        self._check(request, path, model)
        if not self._backend:
            raise UnknownModel(f"no backend is configured that /v1{path} could be passed on to")
        routed = posted and model and (path in BY_MODEL or (path in BY_KNOWN_MODEL and self._knows(model, request)))
        if routed:
            self._dispatch.route(model, tenant)  # one that is not routed goes nowhere: somebody may have mistyped it
        request.ticket = await self.door.admission.enter(tenant, tenant.user(request.headers, body), model)
        overhead = time.perf_counter() - started
        request.watch.start()
        ask = Ask(path, request.query, request.headers, request.body, model, tenant)
        relay = None if routed else (self._backend, scope["method"])
        served = _served(await self.door.admission.open(request.ticket, ask, relay), told=bool(model))
        served.tenant, served.started, served.overhead = tenant.name, started, overhead
        served.model = model if routed else ""
        return served

    def _check(self, request: Incoming, path: str, model: str) -> None:
        """Raise `NotForTenants` or `ModelNotAllowed` for what a tenant may not do."""
        tenant = request.tenant
        if not tenant.key:
            return
        computes = request.scope["method"] == "POST" and _COMPUTES.fullmatch(path)
        if not computes and tenant.policy.relay != "all":
            raise NotForTenants(
                f"{request.scope['method']} /v1{path} could reach what other tenants keep at the provider; it is "
                "passed on only for a tenant whose file says relay: all"
            )
        if model and tenant.policy.models != ("*",) and not routing.allows(tenant.policy.models, model):
            raise ModelNotAllowed(f"the model {model!r} is not one of yours; GET /v1/models lists those")

    def _knows(self, model: str, request: Incoming) -> bool:
        try:
            self._dispatch.route(model, request.tenant)
        except UnknownModel:
            return False
        return True


def _served(dispatched: Dispatched, told: bool) -> Served:
    """`told`: the answer may say what it took."""
    reply = dispatched.reply
    head = [(name, value) for name, value in reply.headers if name not in (b"date", b"x-request-id")]
    head += [(b"x-hitherto-cache", b"bypass"), (b"x-hitherto-backend", dispatched.backend.encode())]
    if dispatched.prompt_cache:
        head.append((b"x-hitherto-prompt-cache", dispatched.prompt_cache.encode()))
    served = Served(reply.status, head, backend=dispatched.backend, cache="bypass", reason="not-cacheable")
    served.backend_kind = dispatched.kind
    passing = _Passing(dispatched, served, told)
    served.chunks = Body(passing.chunks(), passing.end)
    return served


class _Passing:
    """Passes a body on; what it says of tokens is noted at the end."""

    def __init__(self, dispatched: Dispatched, served: Served, told: bool) -> None:
        self._dispatched, self._served, self._told = dispatched, served, told
        self._size = 0

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        copy, kept = bytearray(), self._told
        try:
            async for chunk in self._dispatched.reply.chunks():
                self._size += len(chunk)
                kept = kept and len(copy) + len(chunk) <= COPY_LIMIT
                if kept:
                    copy += chunk
                yield chunk
        finally:
            used = usage_in(bytes(copy)) if kept else None
            self._served.answer = Answer({}, (), used) if used is not None else None
            await self.end()

    async def end(self) -> None:
        """Settle what it took, and let the backend go."""
        used = self._served.answer.usage if self._served.answer is not None else None
        self._dispatched.settle(used, self._size if self._told else 0)
        await self._dispatched.reply.close()


def _json(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _model(raw: bytes, body: dict[str, Any]) -> str:
    """The model that a JSON body or a form names; empty if there is none."""
    model = body.get("model")
    if isinstance(model, str):
        return model
    found = _FORM_MODEL.search(raw) if not body else None
    return found[1].decode("utf-8", "replace") if found is not None else ""


def usage_in(body: bytes) -> Usage | None:
    """What an answer, whole or streamed, says of its tokens; a stream may tell it in several events."""
    if body.lstrip().startswith(b"{"):
        return usage.read(_told(_json(body)))
    told: dict[str, Any] = {}
    for text in sse.data_fields(body + b"\n\n"):
        if b'"usage"' in text:
            told = usage.merged(told, _told(_json(text)))
    for line in sse.comments(body):
        if line.startswith(USAGE_COMMENT):
            told = usage.merged(told, _json(line[len(USAGE_COMMENT) :]))
    return usage.read(told)


def _told(value: dict[str, Any]) -> dict[str, Any]:
    """The usage of an answer or an event: at the top, or in the message or response that it carries."""
    for holder in (value, value.get("message"), value.get("response")):
        found = holder.get("usage") if isinstance(holder, dict) else None
        if isinstance(found, dict):
            return found
    return {}
