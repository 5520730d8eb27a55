"""Any other `/v1/*` path: relayed to the default backend as it is, metered and uncached."""

from __future__ import annotations

from collections.abc import AsyncIterator

from fastapi import APIRouter, Request, Response
from fastapi.responses import StreamingResponse

from backends import asgi
from backends.protocol import Reply
from gateway.api.auth import OpenAuth, TransparentAuth
from gateway.dispatch import Dispatch
from gateway.errors import UnknownModel
from gateway.metrics import Metrics

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"]


class Passthrough:
    """Relays whole requests. The default backend is the first one that is not the built-in engine, if there is one."""

    def __init__(self, dispatch: Dispatch, auth: OpenAuth | TransparentAuth, metrics: Metrics, body_limit: int) -> None:
        self._dispatch, self._auth, self._metrics, self._body_limit = dispatch, auth, metrics, body_limit
        remote = [name for name, backend in dispatch.backends.items() if backend.kind != "engine"]
        self._backend = remote[0] if remote else next(iter(dispatch.backends), "")

    async def serve(self, request: Request) -> Response:
        if not self._backend:
            raise UnknownModel(f"no backend is configured that {request.url.path} could be passed on to")
        headers = asgi.header_map(request.scope)
        body = await asgi.read_body(request.receive, self._body_limit)
        raw_path: bytes = request.scope.get("raw_path") or request.url.path.encode()
        path = raw_path.decode("latin-1").partition("?")[0].removeprefix("/v1")
        tenant = self._auth.tenant(headers)
        reply = await self._dispatch.relay(
            self._backend, request.method, path, request.url.query, headers, body, tenant
        )
        self._metrics.requests.labels(tenant.name, "passthrough", "", self._backend, "none", str(reply.status)).inc()
        response = StreamingResponse(_body(reply), status_code=reply.status)
        response.raw_headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in reply.headers]
        response.headers["x-hitherto-cache"] = "bypass"
        response.headers["x-hitherto-backend"] = self._backend
        return response


async def _body(reply: Reply) -> AsyncIterator[bytes]:
    try:
        async for chunk in reply.chunks():
            yield chunk
    finally:
        await reply.close()


def router(passthrough: Passthrough) -> APIRouter:
    """The catch-all; include it last."""
    api = APIRouter()

    @api.api_route("/v1/{path:path}", methods=METHODS, response_model=None, include_in_schema=False)
    async def relay(request: Request) -> Response:
        return await passthrough.serve(request)

    return api
