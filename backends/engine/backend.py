"""The engine as the gateway sees it: a supervised process behind a unix socket. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from backends.engine import models
from backends.engine.config import EngineConfig
from backends.engine.supervisor import Supervisor
from backends.protocol import BackendError, BackendStarting, Call, Reply
from backends.upstream import Upstream


class EngineBackend:
    """`kind: engine`."""

    kind = "engine"

    def __init__(self, name: str, config: EngineConfig, data: Path) -> None:
        self.name = name
        self.identity = f"engine {models.identity(config.model)} {config.dtype}"
        self.supervisor = Supervisor(name, config, data)
        self._upstream = Upstream(
            name,
            "engine",
            "http://engine/v1",
            socket=self.supervisor.socket,
            starting=lambda: self.supervisor.failure or "the engine is starting",
        )

    async def start(self) -> None:
        await self._upstream.start()
        self.supervisor.start()

    async def stop(self) -> None:
        await self._upstream.stop()
        await self.supervisor.stop()

    async def open(self, call: Call) -> Reply:
        return await self._upstream.open(call)

    async def state(self) -> dict[str, Any] | None:
        """What the engine tells of itself; None while it does not answer."""
        return await self._ask("/state")

    async def doctor(self) -> dict[str, Any] | None:
        """Why prefixes were not reused; None while it does not answer."""
        return await self._ask("/doctor")

    async def _ask(self, path: str) -> dict[str, Any] | None:
        try:
            value = await self._upstream.get_json(path)
        except BackendError:
            return None
        return value if isinstance(value, dict) else None

    async def purge(self) -> None:
        """Forget all KV that no running request holds, in every tier. Raises a `BackendError`."""
        reply = await self._upstream.open(Call("POST", "/kv/purge", "", {}, b""))
        await reply.close()

    async def ready(self) -> str:
        try:
            await self._upstream.get_json("/models")
        except BackendStarting as error:
            return error.detail
        except BackendError as error:
            return str(error)
        return ""
