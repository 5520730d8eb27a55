"""Any other `/v1/*` path: relayed as it is, metered and uncached, to where its model runs or else to the default."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import orjson

from backends.protocol import Reply
from gateway.api.auth import OpenAuth, TransparentAuth
from gateway.api.endpoint import Endpoint
from gateway.dispatch import Dispatch
from gateway.errors import UnknownModel
from gateway.metrics import Metrics
from gateway.pipeline import Incoming, Served


class Passthrough(Endpoint):
    """Relays whole requests. The default backend is the first one that is not the built-in engine, if there is one."""

    surface = "passthrough"

    def __init__(self, dispatch: Dispatch, auth: OpenAuth | TransparentAuth, metrics: Metrics, body_limit: int) -> None:
        super().__init__(auth, metrics, body_limit)
        self._dispatch = dispatch
        remote = [name for name, backend in dispatch.backends.items() if backend.kind != "engine"]
        self._backend = remote[0] if remote else next(iter(dispatch.backends), "")

    async def serve(self, request: Incoming) -> Served:
        scope, tenant = request.scope, request.tenant
        raw_path: bytes = scope.get("raw_path") or scope["path"].encode()
        path = raw_path.decode("latin-1").partition("?")[0].removeprefix("/v1")
        model = _model(request) if scope["method"] == "POST" else ""
        request.watch.start()
        if model and self._dispatch.knows(model):
            dispatched = await self._dispatch.open(path, request.query, request.headers, request.body, model, tenant)
            reply, backend = dispatched.reply, dispatched.backend
        else:
            if not self._backend:
                raise UnknownModel(f"no backend is configured that /v1{path} could be passed on to")
            backend = self._backend
            reply = await self._dispatch.relay(
                backend, scope["method"], path, request.query, request.headers, request.body, tenant
            )
        head = [(name, value) for name, value in reply.headers if name not in (b"date", b"x-request-id")]
        head += [(b"x-hitherto-cache", b"bypass"), (b"x-hitherto-backend", backend.encode())]
        served = Served(reply.status, head, tenant=tenant.name, model=model, backend=backend, cache="bypass")
        served.reason, served.chunks = "not-cacheable", _body(reply)
        return served


def _model(request: Incoming) -> str:
    """The model that a JSON body names; empty if there is none."""
    if not request.headers.get("content-type", "").startswith("application/json"):
        return ""
    try:
        model = orjson.loads(request.body)["model"]
    except (ValueError, TypeError, KeyError):
        return ""
    return model if isinstance(model, str) else ""


async def _body(reply: Reply) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in reply.chunks():
            yield chunk
    finally:
        await reply.close()
