"""What every plain ASGI endpoint does: read, watch for a hang-up, send, refuse with the right words, account."""

from __future__ import annotations

import logging
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from backends import asgi
from gateway import errors, logs
from gateway.admission import Admission
from gateway.api.auth import Auth
from gateway.errors import UnknownKey
from gateway.exchange import Incoming, Served, Ticket
from gateway.metrics import Metrics, RequestSeries
from gateway.telemetry import Telemetry
from gateway.tenant import Tenant

log = logging.getLogger("hitherto")

_ACCOUNTS = (b"x-ratelimit-", b"anthropic-ratelimit-", b"openai-organization", b"openai-project", b"set-cookie",
             b"anthropic-organization-id")  # fmt: skip
"""Response headers that tell of the gateway's account at a provider, which is not its tenants' matter."""
_LAST_WORDS = tuple(word + end for word in (b"data: [DONE]", b'"message_stop"}') for end in (b"\n\n", b"\r\n\r\n"))
"""How the last event of a stream ends. Many clients hang up on it, or on the last byte of a body whose length they were
told, while its end is still under way: those have not left."""
BODY_MOST = 4000
"""Bytes of a body that are logged."""
CLIENT_GONE = 499
"""What the metrics and the log call a request whose client left before there was an answer, as nginx does."""


@dataclass(frozen=True, slots=True)
class Door:
    """What every endpoint asks before it serves, and tells after."""

    auth: Auth
    admission: Admission
    metrics: Metrics
    body_limit: int
    mask: Callable[[Tenant, str], str]
    """A text as it may be logged."""
    telemetry: Telemetry | None = None
    bodies: float = 0.0
    """The share of requests whose bodies are logged."""


class Endpoint(ABC):
    """One route of the hot path. Subclasses say how a request is served."""

    surface: str

    def __init__(self, door: Door) -> None:
        self.door, self._metrics = door, door.metrics
        self._series = lru_cache(maxsize=1024)(self._find_series)  # finding a series by its labels costs 10 µs

    @abstractmethod
    async def serve(self, request: Incoming) -> Served:
        """The response. Raises what `gateway.errors` has a word for."""

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        headers = asgi.header_map(scope)
        request_id = headers.get("x-request-id") or logs.new_id()
        try:
            tenant = self.door.auth.tenant(headers)  # before a stranger's body takes any memory
            body = await asgi.read_body(receive, self.door.body_limit)
        except asgi.ClientGone:
            return
        except UnknownKey as error:
            await self._refuse(error, request_id, time.perf_counter(), scope, send)
            return
        except asgi.BodyTooLarge:
            too_large = asgi.BodyTooLarge(f"the request body is over {self.door.body_limit} bytes")
            await self._refuse(too_large, request_id, time.perf_counter(), scope, send)
            return
        started = time.perf_counter()
        served: Served | None = None
        incoming: Incoming | None = None
        refused = False
        watch = asgi.HangupWatch(receive)
        try:
            async with watch:
                try:
                    headers.setdefault("x-request-id", request_id)  # whoever computes it logs the same
                    incoming = Incoming(scope, headers, body, tenant, watch, request_id, self.surface)
                    if self.door.telemetry is not None:
                        incoming.span = self.door.telemetry.begin(headers, self.surface)
                    served = await self.serve(incoming)
                    if tenant.key:
                        served.headers = [pair for pair in served.headers if not pair[0].startswith(_ACCOUNTS)]
                    if incoming.ticket is not None and incoming.ticket.states:
                        _tell_limits(served, incoming.ticket)
                    await _send(served, request_id, send)
                except Exception as error:
                    if served is not None and served.first is not None:
                        # The head is sent; the server cuts the connection of a response that does not end.
                        log.warning("request %s: the response broke off: %s", request_id, error)
                        served.stored = "interrupted"
                    else:
                        served, refused = None, True
                        await self._refuse(error, request_id, started, scope, send, incoming)
        finally:
            if incoming is not None and incoming.ticket is not None:
                self.door.admission.leave(incoming.ticket)
            if served is None and not refused:  # the client left, or we are being stopped
                served = Served(CLIENT_GONE, [], cache="none", started=started, tenant=tenant.name)
            if served is not None and incoming is not None:
                self._account(served, incoming, watch.gone)

    async def _refuse(
        self,
        error: Exception,
        request_id: str,
        started: float,
        scope: asgi.Scope,
        send: asgi.Send,
        incoming: Incoming | None = None,
    ) -> None:
        refusal = errors.refusal(error)
        tenant = incoming.tenant if incoming is not None else Tenant("")
        if refusal.status == 500:
            log.error("request %s: an unforeseen error", request_id, exc_info=error)
        self._series(tenant.name, "", "", "none", refusal.status).requests.inc()
        seconds = time.perf_counter() - started
        if incoming is not None:  # before anything is sent: whoever hangs up meanwhile has still been refused
            incoming.model = incoming.model or getattr(error, "model", "")
            why = refusal.code or refusal.kind
            row = self.door.admission.books.refused(incoming, refusal.status, why, seconds)
            if self.door.telemetry is not None:
                self.door.telemetry.end(incoming.span, row)
        head = [asgi.JSON, (b"x-request-id", request_id.encode("latin-1", "replace")), *refusal.headers()]
        await asgi.send_bytes(send, refusal.status, head, refusal.body_for(scope["path"]))
        line = {"request_id": request_id, "status": refusal.status, "error": self.door.mask(tenant, refusal.message)}
        logs.request_line({**line, "tenant": tenant.name, "seconds": round(seconds, 6)})

    def _account(self, served: Served, incoming: Incoming, gone: bool) -> None:
        now, request_id = time.perf_counter(), incoming.id
        left = gone and not served.complete
        status = CLIENT_GONE if left else served.status
        row = self.door.admission.books.answered(incoming, served, status, now - served.started)
        series = self._series(served.tenant, served.model, served.backend, served.cache, served.status)
        series.requests.inc()
        series.seconds.observe(now - served.started)
        self._metrics.overhead_seconds.observe(served.overhead)
        line: dict[str, Any] = {
            "request_id": request_id,
            "tenant": served.tenant,
            "model": served.model,
            "backend": served.backend,
            "cache": served.cache,
            "reason": served.reason,
            "stored": served.stored,
            "status": served.status,
            "seconds": round(now - served.started, 6),
        }
        if left:
            line["client_gone"] = True
        if served.first is not None and served.status == 200:
            (series.ttft_hit if row.cached else series.ttft_miss).observe(served.first - served.started)
            line["ttft"] = round(served.first - served.started, 6)
        if row.prompt or row.completion:
            line["prompt_tokens"], line["completion_tokens"] = row.prompt, row.completion
            line["cached_tokens"] = row.cached
        if row.cost is not None:
            line["cost_usd"] = row.cost / 1e9
        if saved := row.saved_answer + row.saved_prefix:
            line["saved_usd"] = saved / 1e9
        logs.request_line(line)
        if self.door.telemetry is not None:
            self.door.telemetry.end(incoming.span, row)
        if self.door.bodies and random.random() < self.door.bodies:
            self._log_bodies(incoming, served)

    def _log_bodies(self, incoming: Incoming, served: Served) -> None:
        """What was asked and answered, as far as it may be stored."""
        if not incoming.tenant.policy.redaction.text:
            return
        answer: Any = served.answer.body if served.answer is not None and served.answer.body else served.body
        told = {"request_id": incoming.id, "tenant": incoming.tenant.name}
        for name, body in (("request", incoming.body), ("response", answer)):
            if body:
                told[name] = self._as_logged(incoming.tenant, body)
        logs.request_line(told)

    def _as_logged(self, tenant: Tenant, body: Any) -> str:
        """Masked before it is cut, and without the backslashes of JSON, behind which a mask would not look."""
        text = body.decode(errors="replace") if isinstance(body, bytes) else repr(body)
        text = text[: 4 * BODY_MOST].replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r").replace('\\"', '"')
        return self.door.mask(tenant, text)[:BODY_MOST]

    def _find_series(self, tenant: str, model: str, backend: str, cache: str, status: int) -> RequestSeries:
        return self._metrics.request_series(tenant, self.surface, model, backend, cache, str(status))


def _tell_limits(served: Served, ticket: Ticket) -> None:
    """Our own limits in place of the upstream's, which are the gateway's matter."""
    served.headers = [pair for pair in served.headers if not pair[0].startswith(b"x-ratelimit-")] + ticket.headers()


async def _send(served: Served, request_id: str, send: asgi.Send) -> None:
    """Send a response; the head goes with the first chunk, so that a failure before it is still a proper error."""

    def start() -> asgi.Message:
        """The head, as it is known when the first byte of the body is there."""
        served.first = time.perf_counter()
        head = [*served.headers, (b"x-request-id", request_id.encode("latin-1", "replace"))]
        return {"type": "http.response.start", "status": served.status, "headers": head}

    if served.body is not None:
        head = start()["headers"]
        await asgi.send_bytes(send, served.status, head, served.body)
        served.complete = True
        return
    assert served.chunks is not None
    chunks, served.chunks = served.chunks, None  # they know it: a cycle would be the garbage collector's work
    left = next((int(value) for name, value in served.headers if name == b"content-length" and value.isdigit()), -1)
    tail = b""
    async with aclosing(chunks):
        async for chunk in chunks:
            if served.first is None:
                await send(start())
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
            left -= len(chunk)
            tail = chunk[-24:] if len(chunk) >= 24 else (tail + chunk)[-24:]
            served.complete = left == 0 or tail.endswith(_LAST_WORDS)
    if served.first is None:
        await send(start())
    await send({"type": "http.response.body", "body": b""})
    served.complete = True
