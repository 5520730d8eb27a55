"""`GET /v1/models`: what can be asked for here."""

from __future__ import annotations

import orjson
from fastapi import APIRouter, Request, Response

from gateway.api.auth import OpenAuth, TransparentAuth
from gateway.api.passthrough import Passthrough
from gateway.dispatch import Dispatch


def router(dispatch: Dispatch, auth: OpenAuth | TransparentAuth, passthrough: Passthrough) -> APIRouter:
    """The configured names; in transparent mode the upstream's own list."""
    api = APIRouter()

    @api.get("/v1/models", response_model=None)
    async def models(request: Request) -> Response:
        if isinstance(auth, TransparentAuth):
            return await passthrough.serve(request)
        cards = [
            {"id": name, "object": "model", "created": 0, "owned_by": targets[0].backend}
            for name, targets in dispatch.routes.items()
            if "*" not in name
        ]
        return Response(orjson.dumps({"object": "list", "data": cards}), media_type="application/json")

    @api.get("/v1/models/{name:path}", response_model=None)
    async def model(name: str, request: Request) -> Response:
        if isinstance(auth, TransparentAuth):
            return await passthrough.serve(request)
        target = dispatch.candidates(name)[0]
        card = {"id": name, "object": "model", "created": 0, "owned_by": target.backend}
        return Response(orjson.dumps(card), media_type="application/json")

    return api
