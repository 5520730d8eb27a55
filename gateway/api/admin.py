"""`/admin/*`: for operators, who show the admin key; without one it is served on loopback only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends, Query
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from backends.engine.backend import EngineBackend
from backends.protocol import Backend, Duration
from gateway.admission import Admission
from gateway.api.auth import AdminKey, Auth
from gateway.api.guards import Note, audited, guard
from gateway.cache.control import Control
from gateway.ledger import Ledger
from gateway.places import Places
from gateway.reload import Registry
from gateway.stores.contract import Selector
from gateway.tenant import Tenant
from gateway.tenants import File
from gateway.warming import Warmer
from policies.cacheability import CacheRules


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


def router(key: AdminKey, note: Note) -> APIRouter:
    """An empty one under `/admin`: for operators only, and what they change is noted."""
    return APIRouter(prefix="/admin", dependencies=[Depends(guard(key))], route_class=audited(note))


def prefix_routes(api: APIRouter, backends: Mapping[str, Backend], warmer: Warmer) -> None:
    """What can be done to a running gateway's engines."""
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


def tenant_routes(
    api: APIRouter, registry: Registry | None, places: Places, admission: Admission, ledger: Ledger
) -> None:
    """Who may do what, where it runs, what it costs, and who changed what."""

    @api.get("/breakers")
    async def breakers() -> list[dict[str, object]]:
        """How each backend, and each replica, stands."""
        return places.states()

    @api.get("/tenants")
    async def tenants() -> dict[str, Any]:
        """The tenants with their keys (not the keys themselves) and budgets, and files that are not in force."""
        if registry is None:
            return {"tenants": [], "wrong": {}}
        known = list(registry.tenants.files.values())
        spent = await admission.standing(file.tenant for file in known)
        return {"tenants": [_tenant(file, spent) for file in known], "wrong": registry.wrong}

    @api.post("/reload")
    async def reload() -> JSONResponse:
        """Read the tenants' files now."""
        if registry is None:
            return JSONResponse({"error": {"message": "no folder of tenants is configured (tenants: FOLDER)"}}, 404)
        changes = await registry.reload()
        return JSONResponse({"changes": changes, "wrong": registry.wrong})

    @api.get("/prices")
    async def prices(model: Annotated[list[str], Query()]) -> dict[str, Any]:
        """What models cost: by a name that is configured where it runs, by any other what the tables say of it."""
        return {name: admission.price_of(name) for name in model}

    @api.get("/audit")
    async def audit(limit: Annotated[int, Query(ge=1, le=10_000)] = 100) -> list[dict[str, Any]]:
        """What was changed, newest first."""
        return [] if ledger.store is None else await ledger.ask(ledger.store.audits, limit)


def _tenant(file: File, spent: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    keys = [
        {"id": key.id, "name": key.name, "expires": key.expires.isoformat() if key.expires else None}
        for key in file.config.keys
    ]
    facts = {"tenant": file.config.tenant, "file": str(file.path), "keys": keys, "models": file.config.models}
    return {**facts, "budget": spent.get(file.config.tenant, [])}


def cache_routes(
    api: APIRouter, control: Control, auth: Auth, tenants: Callable[[], Iterable[Tenant]], default: CacheRules
) -> None:
    """What can be done to a running gateway's answer cache; `default`: the rules of whoever has no file."""

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
        return JSONResponse(await control.purge(selector, purge.dry_run))

    @api.post("/cache/feedback")
    async def feedback(report: Feedback) -> dict[str, Any]:
        """A stored answer was wrong for a question, or altogether: it is not served so again."""
        return await control.bad_hit(report.entry, report.question)

    @api.get("/cache/risk")
    async def risk(tenant: str = "") -> list[dict[str, Any]]:
        """What is known of semantic hits, by tenant, and what each max_wrong_rate would serve."""
        rules = {one.name: one.policy.rules for one in tenants()}
        names = [tenant] if tenant else sorted({*rules, *control.tenants()})
        told = []
        for name in names:
            told.append(control.risk(name, rules.get(name, default)))
            await asyncio.sleep(0)  # each takes some milliseconds
        return told

    @api.post("/explain")
    async def explain(asked: Explain) -> dict[str, Any]:
        """Why a request would hit or miss."""
        headers = {name.lower(): value for name, value in asked.headers.items()}
        return await control.explain(orjson.dumps(asked.request), headers, auth.tenant(headers))
