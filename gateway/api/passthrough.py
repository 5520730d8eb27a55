"""Any other `/v1/*` path: relayed as it is, metered and uncached.

What only computes (text completions, embeddings) goes to where its model runs; everything else, which may make things
that later requests name, to the default backend.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator

import orjson

from backends.dialects import openai_chat, sse
from backends.dialects.openai_chat import USAGE_COMMENT
from backends.protocol import Answer, Reply, Usage
from gateway.api.auth import OpenAuth, TransparentAuth
from gateway.api.endpoint import Endpoint
from gateway.dispatch import Dispatch
from gateway.errors import UnknownModel
from gateway.exchange import COPY_LIMIT, Incoming, Served
from gateway.metrics import Metrics

BY_MODEL = frozenset({"/completions", "/embeddings"})
"""Paths that are routed by the model that their body names."""


class Passthrough(Endpoint):
    """Relays whole requests. The default backend is the first one that is not the built-in engine, if there is one."""

    surface = "passthrough"

    def __init__(self, dispatch: Dispatch, auth: OpenAuth | TransparentAuth, metrics: Metrics, body_limit: int) -> None:
        super().__init__(auth, metrics, body_limit)
        self._dispatch = dispatch
        remote = [name for name, backend in dispatch.backends.items() if backend.kind != "engine"]
        self._backend = remote[0] if remote else next(iter(dispatch.backends), "")

    async def serve(self, request: Incoming) -> Served:
        started = time.perf_counter()
        scope, tenant = request.scope, request.tenant
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        path = raw_path.decode("latin-1").partition("?")[0].removeprefix("/v1")
        model = _model(request) if scope["method"] == "POST" and path in BY_MODEL else ""
        if not self._backend:
            raise UnknownModel(f"no backend is configured that /v1{path} could be passed on to")
        if model:
            self._dispatch.candidates(model)  # a model that is not routed goes nowhere: somebody may have mistyped it
        overhead = time.perf_counter() - started
        request.watch.start()
        if model:
            dispatched = await self._dispatch.open(path, request.query, request.headers, request.body, model, tenant)
            reply, backend = dispatched.reply, dispatched.backend
        else:
            backend = self._backend
            reply = await self._dispatch.relay(
                backend, scope["method"], path, request.query, request.headers, request.body, tenant
            )
        head = [(name, value) for name, value in reply.headers if name not in (b"date", b"x-request-id")]
        head += [(b"x-hitherto-cache", b"bypass"), (b"x-hitherto-backend", backend.encode())]
        served = Served(reply.status, head, tenant=tenant.name, model=model, backend=backend, cache="bypass")
        served.backend_kind = self._dispatch.backends[backend].kind
        served.started, served.overhead, served.reason = started, overhead, "not-cacheable"
        served.chunks = _body(reply, served)
        return served


def _model(request: Incoming) -> str:
    """The model that a JSON body names; empty if there is none."""
    try:
        model = orjson.loads(request.body)["model"]
    except (ValueError, TypeError, KeyError):
        return ""
    return model if isinstance(model, str) else ""


async def _body(reply: Reply, served: Served) -> AsyncGenerator[bytes, None]:
    """The bytes as they come; what they say of tokens is noted at the end."""
    copy, kept = bytearray(), bool(served.model)
    try:
        async for chunk in reply.chunks():
            kept = kept and len(copy) + len(chunk) <= COPY_LIMIT
            if kept:
                copy += chunk
            yield chunk
        usage = _usage(bytes(copy)) if kept else None
        served.answer = Answer({}, (), usage) if usage is not None else None
    finally:
        await reply.close()


def _usage(body: bytes) -> Usage | None:
    """What an answer, whole or streamed, says of its tokens."""
    whole = body.lstrip().startswith(b"{")
    told = [body] if whole else [*reversed([*sse.data_fields(body)])]
    told += [b'{"usage":' + line[len(USAGE_COMMENT) :] + b"}" for line in sse.comments(body)
             if not whole and line.startswith(USAGE_COMMENT)]  # fmt: skip
    for text in told:
        try:
            value = orjson.loads(text)
        except orjson.JSONDecodeError:
            continue
        if isinstance(value, dict) and (usage := openai_chat.usage_of(value)) is not None:
            return usage
    return None
