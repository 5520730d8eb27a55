"""What an operator sees of a running gateway beside the ledger: budgets, breakers, files, engines, stored questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from backends.engine.backend import EngineBackend
from backends.protocol import Backend
from gateway.admission import Admission
from gateway.cache.answers import Answers
from gateway.places import Places
from gateway.reload import Registry
from gateway.tenant import Tenant


@dataclass(frozen=True, slots=True)
class Views:
    """Asks the parts when somebody wants to know."""

    answers: Answers
    admission: Admission
    tenants: Callable[[], Iterable[Tenant]]
    places: Places
    backends: Mapping[str, Backend]
    registry: Registry | None
    notes: Callable[[], Mapping[str, str]]

    async def question(self, entry: str, tenant: str) -> str | None:
        """The question of a tenant's stored answer, by the hexadecimal digits of its key; None if it is gone."""
        try:
            found = await self.answers.aside(self.answers.store.get, bytes.fromhex(entry))
        except Exception:  # an entry that cannot be read is as good as gone
            return None
        return found.question if found is not None and found.tenant == tenant else None

    async def budgets(self, tenant: str) -> list[dict[str, Any]]:
        """What a tenant, or each of all, has spent of its budgets."""
        chosen = [one for one in self.tenants() if not tenant or one.name == tenant]
        standing = await self.admission.standing(chosen)
        return [{"tenant": name, **one} for name, periods in standing.items() for one in periods]

    async def state(self) -> dict[str, Any]:
        """Breakers, notes, files that are not in force, what is stored, and what engines say of their prefixes."""
        engines = {name: one for name, one in self.backends.items() if isinstance(one, EngineBackend)}
        reasons = await asyncio.gather(*(backend.ready() for backend in self.backends.values()))
        doctors = await asyncio.gather(*(engine.doctor() for engine in engines.values()))
        return {
            "version": version("hitherto"),
            "backends": [
                {"name": name, "kind": backend.kind, "ready": reason or "ready"}
                for (name, backend), reason in zip(self.backends.items(), reasons, strict=True)
            ],
            "breakers": self.places.states(),
            "notes": dict(self.notes()),
            "wrong": dict(self.registry.wrong) if self.registry is not None else {},
            "tenants": len(list(self.tenants())),
            "answers": {"entries": len(self.answers.memory), "bytes": self.answers.memory.bytes},
            "prefixes": dict(zip(engines, doctors, strict=True)),
        }
