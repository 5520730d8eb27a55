"""`GET /v1/models`: what can be asked for here. In transparent mode the upstream's own list is relayed instead."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from gateway.api.auth import Auth
from gateway.dispatch import Dispatch
from gateway.tenant import Tenant
from policies import routing


def router(dispatch: Dispatch, auth: Auth) -> APIRouter:
    """The names that a tenant may ask for."""
    api = APIRouter()

    @api.get("/v1/models")
    async def models(request: Request) -> dict[str, Any]:
        tenant = auth.tenant(request.headers)
        names = dict.fromkeys((*dispatch.routes, *tenant.policy.routes))
        allowed = [name for name in names if "*" not in name and routing.allows(tenant.policy.models, name)]
        return {"object": "list", "data": [_card(name, dispatch, tenant) for name in allowed]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> dict[str, Any]:
        return _card(name, dispatch, auth.tenant(request.headers))

    return api


def _card(name: str, dispatch: Dispatch, tenant: Tenant) -> dict[str, Any]:
    backend = dispatch.route(name, tenant).targets[0].backend
    return {"id": name, "object": "model", "created": 0, "owned_by": backend}
