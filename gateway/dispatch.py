"""From a request to an upstream's response head: candidates in order, the next one only before the first byte."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from backends.dialects import openai_chat
from backends.dialects.openai_chat import MalformedRequest
from backends.protocol import Backend, BackendError, Call, Reply
from backends.upstream import HOP_BY_HOP
from gateway.api.auth import Tenant, is_credential
from gateway.errors import UnknownModel
from policies import routing
from policies.routing import Target

log = logging.getLogger("hitherto.dispatch")

_NOT_FORWARDED = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect"}
_TRY_NEXT = frozenset({429, 500, 502, 503, 504})


@dataclass(frozen=True, slots=True)
class Dispatched:
    """A response that is under way, and who gives it. `fallback`: not the first candidate."""

    reply: Reply
    backend: str
    kind: str
    model: str
    fallback: bool


class Dispatch:
    """Knows the backends and which model runs where."""

    def __init__(
        self, backends: Mapping[str, Backend], routes: Mapping[str, Sequence[Target]], salt_key: bytes
    ) -> None:
        self.backends = backends
        self.routes = routes
        self._salt_key = salt_key

    def candidates(self, model: str) -> Sequence[Target]:
        """Where a model may run. Raises `UnknownModel`."""
        found = routing.candidates(model, self.routes)
        if not found:
            raise UnknownModel(f"the model {model!r} does not exist here; GET /v1/models lists those that do")
        return found

    def identity(self, model: str) -> tuple[str, str, str]:
        """What decides the answer beside the request: the first candidate's backend, its identity, the model there."""
        target = self.candidates(model)[0]
        backend = self.backends[target.backend]
        return target.backend, backend.identity, target.model or model

    async def open(
        self, path: str, query: str, headers: Mapping[str, str], body: bytes, model: str, tenant: Tenant
    ) -> Dispatched:
        """The first candidate that answers, or the last one's failure. Raises a `BackendError`."""
        targets = self.candidates(model)
        for number, target in enumerate(targets):
            backend, last = self.backends[target.backend], number == len(targets) - 1
            sent = body if target.model in (None, model) else openai_chat.with_model(body, str(target.model))
            call = Call("POST", path, query, self._headers(headers, backend, tenant), sent)
            try:
                reply = await backend.open(call)
            except BackendError as error:
                if last:
                    raise
                log.warning("%s; trying %s", error, targets[number + 1].backend)
                continue
            if reply.status in _TRY_NEXT and not last:
                log.warning(
                    "backend %r answered %d; trying %s", target.backend, reply.status, targets[number + 1].backend
                )
                await reply.close()
                continue
            return Dispatched(reply, target.backend, backend.kind, target.model or model, number > 0)
        raise AssertionError("candidates() never returns an empty list")

    async def relay(
        self, backend: str, method: str, path: str, query: str, headers: Mapping[str, str], body: bytes, tenant: Tenant
    ) -> Reply:
        """Pass any other request on as it is."""
        _refuse_dot_segments(path)
        target = self.backends[backend]
        return await target.open(Call(method, path, query, self._headers(headers, target, tenant), body))

    def _headers(self, headers: Mapping[str, str], backend: Backend, tenant: Tenant) -> dict[str, str]:
        sent = {**forwarded(headers), **tenant.credentials}
        if backend.kind == "engine":
            sent["x-hitherto-salt"] = self.salt(tenant)
        return sent

    def salt(self, tenant: Tenant) -> str:
        """Prefix KV is as private as answers are. Keyed, so that a tenant's name cannot be guessed into its salt."""
        return hmac.new(self._salt_key, tenant.name.encode(), hashlib.sha256).hexdigest()


def forwarded(headers: Mapping[str, str]) -> dict[str, str]:
    """The client's headers without what belongs to its own connection, its credentials, or us."""
    return {
        name: value
        for name, value in headers.items()
        if name not in _NOT_FORWARDED and not name.startswith("x-hitherto-") and not is_credential(name)
    }


def _refuse_dot_segments(path: str) -> None:
    """`/v1/../admin` is no path of the API; an upstream that resolves it would be asked outside of its base URL."""
    if any(unquote(segment) in (".", "..") for segment in re.split(r"/|%2f|\\|%5c", path, flags=re.IGNORECASE)):
        raise MalformedRequest(f"the path /v1{path} has . or .. segments")
