"""Who may see and change what an operator sees and changes, and the record of changes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import orjson
from fastapi import HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from gateway.api.auth import AdminKey, Auth, OpenAuth, shown_key
from gateway.config import is_loopback
from gateway.errors import UnknownKey, refusal

log = logging.getLogger("hitherto.audit")

NEEDED = "this needs the admin key, as Authorization: Bearer or x-api-key"
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip")
"""What a proxy adds that passes others' requests on."""
_DETAIL = 500
_TOLD = frozenset({"entry", "tag", "model", "tenant", "older_than", "all", "dry_run"})
"""Fields of what operators send that hold nothing of what clients said."""


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks: an operator, or somebody with a tenant's key."""

    admin: bool
    tenant: str = ""

    def of(self, tenant: str) -> str:
        """The tenant whose figures are shown when `tenant` was asked for; empty: all. Raises 403."""
        if self.admin:
            return tenant
        if tenant not in ("", self.tenant):
            raise HTTPException(403, f"this key sees the tenant {self.tenant!r} only")
        return self.tenant


def guard(key: AdminKey) -> Callable[[Request], None]:
    """Let only operators in."""

    def admit(request: Request) -> None:
        if not key.is_set:
            _not_from_another_page(request)
        elif not key.admits(request.headers):
            raise HTTPException(401, NEEDED)

    return admit


def operators(key: AdminKey) -> Callable[[Request], Viewer]:
    """Let only operators see."""
    admit = guard(key)

    def look(request: Request) -> Viewer:
        admit(request)
        return Viewer(True)

    return look


def viewing(key: AdminKey, auth: Auth, loopback: bool) -> Callable[[Request], Viewer]:
    """Let operators see all, and whoever shows a tenant's key that tenant; `loopback`: nobody else reaches us."""

    def look(request: Request) -> Viewer:
        headers = request.headers
        if key.is_set and key.admits(headers):
            return Viewer(True)
        if shown_key(headers) and not isinstance(auth, OpenAuth):
            try:
                return Viewer(False, auth.tenant(headers).name)
            except UnknownKey as error:
                raise HTTPException(401, str(error)) from error
        if key.is_set or not loopback:
            raise HTTPException(401, "the admin key or a tenant's key is needed, as Authorization: Bearer or x-api-key")
        _not_from_another_page(request)
        return Viewer(True)

    return look


def _not_from_another_page(request: Request) -> None:
    """A page that somebody looks at on this machine may send requests here, too; browsers say where they come from.

    A name that an attacker has pointed at 127.0.0.1 would be the same origin to the browser, so the name counts, too.
    """
    headers, host = request.headers, request.headers.get("host", "")
    if any(name in headers for name in _FORWARDED):
        raise HTTPException(401, f"{NEEDED}: behind a proxy anybody may ask, so set admin.key")
    origin = headers.get("origin")
    elsewhere = origin is not None and urlsplit(origin).netloc != host
    if elsewhere or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        raise HTTPException(403, "administration is not for other web pages")
    if not is_loopback(urlsplit(f"//{host}").hostname or ""):
        raise HTTPException(403, f"{host!r} is no name of this machine; set admin.key to administrate by other names")


Note = Callable[[str, str, str, str], Awaitable[None]]
"""(actor, action, detail, outcome)"""


def audited(note: Note) -> type[APIRoute]:
    """Routes that note every change that was asked for: by whom, what, and what came of it."""

    class Audited(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()
            if (self.methods or set()) <= {"GET", "HEAD"} or self.path.endswith("/explain"):
                return handle

            async def noted(request: Request) -> Response:
                outcome = "failed"
                try:
                    response = await handle(request)
                    outcome = "done" if response.status_code < 400 else f"refused ({response.status_code})"
                    return response
                except HTTPException as error:
                    outcome = f"refused ({error.status_code})"
                    if error.status_code in (401, 403):  # somebody else's try, who may try as often as he likes
                        log.warning("%s: %s", request.url.path, error.detail)
                        outcome = ""
                    raise
                except RequestValidationError:
                    outcome = "refused (422)"
                    raise
                except Exception as error:
                    if (status := refusal(error).status) < 500:
                        outcome = f"refused ({status})"
                    raise
                finally:
                    if outcome:
                        address = request.client.host if request.client else "a socket"
                        await note(f"admin at {address}", request.url.path, await _detail(request), outcome)

            return noted

    return Audited


async def _detail(request: Request) -> str:
    """What was asked for, without what clients said."""
    try:
        asked = orjson.loads(await request.body())
    except ValueError:
        return ""
    if not isinstance(asked, dict):
        return ""
    told = {name: value for name, value in asked.items() if name in _TOLD and value}
    return orjson.dumps(told, default=str).decode()[:_DETAIL] if told else ""
