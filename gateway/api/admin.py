"""`/admin/*`: for operators. Served on loopback only, until admin keys come."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import orjson
from fastapi import APIRouter, Depends, HTTPException, Request
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from backends.engine.backend import EngineBackend
from backends.protocol import Backend, Duration
from gateway.api.auth import OpenAuth, TransparentAuth
from gateway.cache.control import Control, StoreBusy
from gateway.stores.contract import Selector
from gateway.templates import Warmer


def _not_from_a_web_page(request: Request) -> None:
    """A page that somebody looks at on this machine may send requests here, too; browsers say where they come from."""
    if "origin" in request.headers or request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise HTTPException(403, "administration is not for web pages")


class Purge(BaseModel):
    """Which stored answers to forget; all conditions hold at once."""

    model_config = ConfigDict(extra="forbid")

    entry: str = Field(default="", pattern="^[0-9a-fA-F]*$")
    tag: str = ""
    model: str = ""
    tenant: str = ""
    older_than: Duration | None = None
    all: bool = False
    """Must be true where no other condition is given."""
    dry_run: bool = False


class Feedback(BaseModel):
    """A wrong answer: the entry that `x-hitherto-entry` named, and the question that it was given to."""

    model_config = ConfigDict(extra="forbid")

    entry: str = Field(pattern="^[0-9a-fA-F]{8,64}$")
    question: str | None = None


class Explain(BaseModel):
    """A chat completion request, and the headers that it would come with."""

    model_config = ConfigDict(extra="forbid")

    request: dict[str, Any]
    headers: dict[str, str] = {}


def router(backends: Mapping[str, Backend], warmer: Warmer) -> APIRouter:
    """What can be done to a running gateway's engines."""
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


def cache_router(control: Control, auth: OpenAuth | TransparentAuth) -> APIRouter:
    """What can be done to a running gateway's answer cache."""
    api = APIRouter(prefix="/admin", dependencies=[Depends(_not_from_a_web_page)])

    @api.get("/cache/stats")
    async def stats() -> dict[str, Any]:
        """What the answer cache holds."""
        return await control.statistics()

    @api.post("/cache/purge")
    async def purge_answers(purge: Purge) -> JSONResponse:
        """Forget stored answers; with `dry_run` only count them."""
        selector = Selector(purge.entry, purge.tag, purge.model, purge.tenant, purge.older_than)
        if selector == Selector() and not purge.all:
            message = "say what to purge: entry, tag, model, tenant or older_than; or all: true"
            return JSONResponse({"error": {"message": message}}, 400)
        try:
            return JSONResponse(await control.purge(selector, purge.dry_run))
        except StoreBusy as error:
            return JSONResponse({"error": {"message": str(error)}}, 503)

    @api.post("/cache/feedback")
    async def feedback(report: Feedback) -> JSONResponse:
        """A stored answer was wrong for a question, or altogether: it is not served so again."""
        try:
            return JSONResponse(await control.bad_hit(report.entry, report.question))
        except LookupError as error:
            return JSONResponse({"error": {"message": str(error)}}, 404)
        except StoreBusy as error:
            return JSONResponse({"error": {"message": str(error)}}, 503)

    @api.post("/explain")
    async def explain(asked: Explain) -> dict[str, Any]:
        """Why a request would hit or miss."""
        headers = {name.lower(): value for name, value in asked.headers.items()}
        return await control.explain(orjson.dumps(asked.request), headers, auth.tenant(headers))

    return api
