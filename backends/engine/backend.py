"""The engine as the gateway sees it: a supervised process behind a unix socket. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from backends.engine import models
from backends.engine.config import EngineConfig
from backends.engine.epoch import Epoch
from backends.engine.supervisor import Supervisor
from backends.protocol import BackendError, BackendRefused, BackendStarting, Call, PromptCacheStyle
from backends.upstream import Upstream


class EngineBackend:
    """`kind: engine`."""

    kind = "engine"
    prompt_cache: PromptCacheStyle = "none"
    asks_for_usage = False  # it tells it in every stream, as a comment

    def __init__(self, name: str, config: EngineConfig, data: Path) -> None:
        self.name = name
        self._config, self._epoch = config, Epoch.of(data, name)
        self._identity: tuple[int, str] | None = None
        self.supervisor = Supervisor(name, config, data)
        self._upstream = Upstream(
            name,
            "engine",
            "http://engine/v1",
            socket=self.supervisor.socket,
            starting=self._starting,
        )
        # What operators do stands beside the API, out of reach of clients whose requests are passed on.
        self._admin = Upstream(
            name, "engine", "http://engine/admin", socket=self.supervisor.socket, starting=self._starting
        )

    @property
    def identity(self) -> str:
        """Changes with a reload, in every gateway process: what the model's files hold is looked at again then."""
        mark = self._epoch.mark()
        if self._identity is None or self._identity[0] != mark:
            model = models.identity(self._config.model)
            self._identity = (mark, f"engine {model} {self._config.dtype} {self._epoch.read()}")
        return self._identity[1]

    async def start(self) -> None:
        await self._upstream.start()
        await self._admin.start()
        self.supervisor.start()

    async def stop(self) -> None:
        await self._upstream.stop()
        await self._admin.stop()
        await self.supervisor.stop()

    def places(self, affinity: bytes) -> tuple[Upstream]:
        return (self._upstream,)

    async def state(self) -> dict[str, Any] | None:
        """What the engine tells of itself; None while it does not answer."""
        return await self._ask("/state")

    async def doctor(self) -> dict[str, Any] | None:
        """Why prefixes were not reused; None while it does not answer."""
        return await self._ask("/doctor")

    async def _ask(self, path: str) -> dict[str, Any] | None:
        try:
            value = await self._admin.get_json(path)
        except BackendError:
            return None
        return value if isinstance(value, dict) else None

    async def purge(self) -> None:
        """Forget all KV that no running request holds, in every tier. Raises a `BackendError`."""
        await self._order("/kv/purge")

    async def warm(self, messages: Sequence[Mapping[str, Any]], salt: str) -> dict[str, Any]:
        """Compute the KV of a conversation's beginning in the background, and keep it. Raises a `BackendError`."""
        return await self._order("/kv/warm", {"messages": messages}, {"x-hitherto-salt": salt})

    async def reload(self) -> None:
        """Start the engine over with the model as it is on disk now; KV of before is not found again. Raises a
        `BackendError`."""
        await self._order("/reload")

    async def _order(
        self, path: str, body: Mapping[str, Any] | None = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        sent = {"content-type": "application/json", **(headers or {})}
        reply = await self._admin.open(Call("POST", path, "", sent, orjson.dumps(body or {})))
        try:
            answer = orjson.loads(b"".join([chunk async for chunk in reply.chunks()]))
            refusal = str(answer["error"]["message"]) if reply.status >= 400 else ""
        except (orjson.JSONDecodeError, TypeError, KeyError) as error:
            raise BackendError(self.name, f"POST {path} was answered with {reply.status} and no JSON") from error
        finally:
            await reply.close()
        if refusal:
            raise (BackendRefused if reply.status < 500 else BackendError)(self.name, refusal)
        return dict(answer)

    def _starting(self) -> str:
        return self.supervisor.failure or "the engine is starting"

    async def ready(self) -> str:
        try:
            await self._upstream.get_json("/models")
        except BackendStarting as error:
            return error.detail
        except BackendError as error:
            return str(error)
        return ""
