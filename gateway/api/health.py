"""`/health` (is the process up), `/ready` (can it serve), `/metrics`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from fastapi import APIRouter, Response
from fastapi.responses import JSONResponse

from backends.engine.backend import EngineBackend
from backends.protocol import Backend
from gateway.metrics import Metrics


def router(backends: Mapping[str, Backend], notes: Callable[[], Mapping[str, str]], metrics: Metrics) -> APIRouter:
    """`notes` are things an operator should know although requests are served (a tier that is off, and why)."""
    api = APIRouter()

    @api.get("/health")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @api.get("/ready")
    async def ready() -> JSONResponse:
        reasons = await asyncio.gather(*(backend.ready() for backend in backends.values()))
        state = {name: reason or "ready" for name, reason in zip(backends, reasons, strict=True)}
        # One backend that works is enough to be useful; the others are told.
        up = not backends or any(not reason for reason in reasons)
        body = {"status": "ready" if up else "not ready", "backends": state, "notes": dict(notes())}
        return JSONResponse(body, status_code=200 if up else 503, headers={} if up else {"retry-after": "2"})

    @api.get("/metrics", response_model=None)
    async def render() -> Response:
        for name, backend in backends.items():
            if isinstance(backend, EngineBackend) and (state := await backend.state()) is not None:
                metrics.engine_state(name, state)
        return Response(metrics.render(), media_type="text/plain; version=0.0.4; charset=utf-8")

    return api
