"""`/admin/*`: for operators. Served on loopback only, until admin keys come."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter

from backends.engine.backend import EngineBackend
from backends.protocol import Backend


def router(backends: Mapping[str, Backend]) -> APIRouter:
    """What can be done to a running gateway."""
    api = APIRouter(prefix="/admin")

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

    return api
