"""`GET /v1/models`: what can be asked for here. In transparent mode the upstream's own list is relayed instead."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from gateway.dispatch import Dispatch


def router(dispatch: Dispatch) -> APIRouter:
    """The configured names."""
    api = APIRouter()

    @api.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(name, dispatch) for name in dispatch.routes if "*" not in name]}

    @api.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        return _card(name, dispatch)

    return api


def _card(name: str, dispatch: Dispatch) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": dispatch.candidates(name)[0].backend}
