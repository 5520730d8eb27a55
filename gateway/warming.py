"""Keeping templates warm on the engines."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from backends.engine.backend import EngineBackend
from backends.protocol import BackendError, BackendRefused
from gateway.dispatch import Dispatch
from gateway.templates import Template
from gateway.tenant import Tenant

log = logging.getLogger("hitherto.templates")

LOOK_SECONDS, RETRY_SECONDS = 2.0, 15.0
MOST = 100
"""Templates are warmed for so many tenants and templates; more would push each other out."""
Wanted = list[tuple[Template, str]]


@dataclass(frozen=True, slots=True)
class Warmed:
    """What warming one template on one engine did; `error` is empty if it went well."""

    template: str
    backend: str
    tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    pinned: bool = False
    """It gives way last; False when templates have half of the memory already."""
    error: str = ""
    again: bool = False
    """It may work another time."""


class Warmer:
    """Keeps the templates warm on every engine: from the start, over restarts of engines and changes of tenants."""

    def __init__(self, tenants: Callable[[], Iterable[Tenant]], dispatch: Dispatch) -> None:
        """`tenants`: those that there are now; prefix KV is each one's own, so that each is warmed for."""
        self._tenants, self._dispatch = tenants, dispatch
        self._engines = {
            name: backend for name, backend in dispatch.backends.items() if isinstance(backend, EngineBackend)
        }
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> None:
        self._tasks = [
            asyncio.create_task(self._watch(name), name=f"warm templates on {name}") for name in self._engines
        ]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def warm(self) -> list[Warmed]:
        """Compute the templates' KV wherever it is not there yet."""
        lists = await asyncio.gather(*(self._warm(name, self._wanted()) for name in self._engines))
        return [done for items in lists for done in items]

    def _wanted(self) -> Wanted:
        """The templates to warm, each with the salt of a tenant that may call it."""
        pairs = (
            (one, self._dispatch.salt(tenant.name))
            for tenant in self._tenants()
            for one in tenant.policy.templates.warm
        )
        return list(islice(pairs, MOST))

    async def _warm(self, name: str, wanted: Wanted) -> list[Warmed]:
        engine, results = self._engines[name], []
        for template, salt in wanted:
            try:
                facts = await engine.warm([{"role": "system", "content": template.system}], salt)
            except BackendError as error:
                again = not isinstance(error, BackendRefused)
                results.append(Warmed(template.name, name, error=str(error), again=again))
            else:
                numbers = facts["tokens"], facts["cached_tokens"], facts["seconds"], facts["pinned"]
                results.append(Warmed(template.name, name, *numbers))
        return results

    async def _watch(self, name: str) -> None:
        """Warm the templates whenever the engine has started or tenants have changed, and again what did not work."""
        boot, done_for = "", list[tuple[Template, str]]()
        while True:
            pause, wanted = LOOK_SECONDS, self._wanted()
            try:
                state = await self._engines[name].state() if wanted else None
                if state is not None and (state["boot"] != boot or wanted != done_for):
                    results = await self._warm(name, wanted)
                    for done in results:
                        log.info("template %s on %s: %s", done.template, name, done.error or f"{done.tokens} tokens")
                    if any(done.again for done in results):
                        pause = RETRY_SECONDS
                    else:
                        boot, done_for = state["boot"], wanted
            except Exception:  # nobody else would hear of it
                log.exception("templates could not be warmed on %s", name)
                pause = RETRY_SECONDS
            await asyncio.sleep(pause)
