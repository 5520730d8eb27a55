"""`/admin/*`: for operators. Served on loopback only, until admin keys come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import JSONResponse

from backends.engine.backend import EngineBackend
from backends.protocol import Backend
from gateway.templates import Warmer


def _not_from_a_web_page(request: Request) -> None:
    """A page that somebody looks at on this machine may send requests here, too; browsers say where they come from."""
    if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise HTTPException(403, "administration is not for web pages")


def router(backends: Mapping[str, Backend], warmer: Warmer) -> APIRouter:
    """What can be done to a running gateway."""
    api = APIRouter(prefix="/admin", dependencies=[Depends(_not_from_a_web_page)])

    engines = {name: backend for name, backend in backends.items() if isinstance(backend, EngineBackend)}

    @api.get("/prefix")
    async def prefix() -> dict[str, dict[str, Any] | None]:
        """What share of prompt tokens was reused, and which small differences cost more, by engine."""
        return {name: await engine.doctor() for name, engine in engines.items()}

    @api.post("/kv/purge")
    async def purge() -> dict[str, list[str]]:
        """Forget all prefix KV, in every tier of every engine."""
        for engine in engines.values():
            await engine.purge()
        return {"purged": list(engines)}

    @api.post("/prefix/warm")
    async def warm() -> list[dict[str, Any]]:
        """Compute the templates' KV wherever it is not there yet."""
        return [asdict(done) for done in await warmer.warm()]

    @api.post("/engines/{name}/reload")
    async def reload(name: str) -> JSONResponse:
        """Start an engine over with the model as it is on disk now."""
        if name not in engines:
            known = ", ".join(engines) or "none"
            return JSONResponse({"error": {"message": f"there is no engine {name!r} (known: {known})"}}, 404)
        await engines[name].reload()
        return JSONResponse({"reloading": name}, 202)

    return api
