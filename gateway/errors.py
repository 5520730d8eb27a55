"""The one table from exceptions to what the caller is told, in OpenAI's error shape."""

from __future__ import annotations

from dataclasses import dataclass

import orjson

from backends import asgi
from backends.dialects.openai_chat import MalformedRequest
from backends.protocol import (
    BackendError,
    BackendInterrupted,
    BackendRefused,
    BackendStarting,
    BackendTimeout,
    BackendUnreachable,
)
from policies.controls import MalformedControl


class UnknownModel(Exception):
    """The configuration routes no such model."""


class NotCached(Exception):
    """`Cache-Control: only-if-cached`, and nothing was found."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a failed request is answered."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.retry_after is None:
            return []
        return [(b"retry-after", str(max(1, round(self.retry_after))).encode())]


# exception → (status, kind, code); subclasses before their parents
_TABLE: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (MalformedRequest, 400, "invalid_request_error", None),
    (MalformedControl, 400, "invalid_request_error", "invalid_cache_control"),
    (asgi.BodyTooLarge, 413, "invalid_request_error", "request_too_large"),
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (NotCached, 504, "cache_error", "not_cached"),
    (BackendStarting, 503, "server_error", "backend_starting"),
    (BackendTimeout, 504, "server_error", "upstream_timeout"),
    (BackendInterrupted, 502, "server_error", "upstream_interrupted"),
    (BackendUnreachable, 502, "server_error", "upstream_unreachable"),
    (BackendRefused, 409, "invalid_request_error", "backend_refused"),
    (BackendError, 502, "server_error", "upstream_failed"),
)


def refusal(error: Exception) -> Refusal:
    """What to tell the caller; an unforeseen exception is a 500 that tells nothing of our inside."""
    for kind, status, name, code in _TABLE:
        if isinstance(error, kind):
            retry_after = error.retry_after if isinstance(error, BackendError) else None
            message = str(error) or kind.__name__
            return Refusal(status, name, message, getattr(error, "param", None), code, retry_after)
    return Refusal(500, "server_error", "an internal error; the gateway's log has the details", code="internal_error")


def known() -> list[type[Exception]]:
    """The exceptions that have a word of their own."""
    return [kind for kind, *_ in _TABLE]
