"""The one table from exceptions to what the caller is told, in OpenAI's error shape."""

from __future__ import annotations

import math
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
    NobodyLeft,
)
from policies import rate_limit
from policies.controls import MalformedControl
from policies.rate_limit import State


class UnknownModel(Exception):
    """The configuration routes no such model."""

    def __init__(self, message: str, model: str = "") -> None:
        super().__init__(message)
        self.model = model


class UnknownKey(Exception):
    """No key was shown, or none that is known and still good."""


class ModelNotAllowed(Exception):
    """The tenant may not ask for this model."""

    def __init__(self, message: str, model: str = "") -> None:
        super().__init__(message)
        self.model = model


class NotForTenants(Exception):
    """A path that reaches what several tenants keep in one account."""


class Unable(Exception):
    """No candidate of the model can do what the request needs."""


class BudgetSpent(Exception):
    """The tenant has no money left."""


class Limited(Exception):
    """A limit is reached; `wait` seconds until it is not, `states` for the headers."""

    def __init__(self, message: str, wait: float, states: list[State]) -> None:
        super().__init__(message)
        self.retry_after, self.states = wait, states


class NotCached(Exception):
    """`Cache-Control: only-if-cached`, and nothing was found."""


class UnknownAnswer(Exception):
    """Nobody knows the stored answer that is meant."""


class StoreBusy(Exception):
    """The store does not take what a command needs it to take."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """How a failed request is answered."""

    status: int
    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: float | None = None
    more: tuple[tuple[bytes, bytes], ...] = ()
    """Further headers."""

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return orjson.dumps({"error": error})

    def body_for(self, path: str) -> bytes:
        """In the words of the API that a path belongs to."""
        if not path.startswith("/v1/messages"):
            return self.body()
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return orjson.dumps({"type": "error", "error": {"type": kind, "message": self.message}})

    def headers(self) -> list[tuple[bytes, bytes]]:
        if self.retry_after is None:
            return [*self.more]
        return [(b"retry-after", str(max(1, math.ceil(self.retry_after))).encode()), *self.more]


_ANTHROPIC = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

# exception → (status, kind, code); subclasses before their parents
_TABLE: tuple[tuple[type[Exception], int, str, str | None], ...] = (
    (MalformedRequest, 400, "invalid_request_error", None),
    (MalformedControl, 400, "invalid_request_error", "invalid_cache_control"),
    (asgi.BodyTooLarge, 413, "invalid_request_error", "request_too_large"),
    (UnknownKey, 401, "invalid_request_error", "invalid_api_key"),
    (NotForTenants, 403, "invalid_request_error", "not_for_tenants"),
    (ModelNotAllowed, 403, "invalid_request_error", "model_not_allowed"),
    (UnknownModel, 404, "invalid_request_error", "model_not_found"),
    (Unable, 400, "invalid_request_error", "no_backend_can"),
    (Limited, 429, "rate_limit_error", "rate_limit_exceeded"),
    (BudgetSpent, 402, "insufficient_quota", "budget_spent"),
    (NotCached, 504, "cache_error", "not_cached"),
    (UnknownAnswer, 404, "invalid_request_error", "unknown_answer"),
    (StoreBusy, 503, "cache_error", "store_busy"),
    (NobodyLeft, 503, "server_error", "backends_unavailable"),
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
            retry_after = error.retry_after if isinstance(error, BackendError | Limited) else None
            more = tuple(rate_limit.headers(error.states)) if isinstance(error, Limited) else ()
            message = str(error) or kind.__name__
            return Refusal(status, name, message, getattr(error, "param", None), code, retry_after, more)
    return Refusal(500, "server_error", "an internal error; the gateway's log has the details", code="internal_error")


def known() -> list[type[Exception]]:
    """The exceptions that have a word of their own."""
    return [kind for kind, *_ in _TABLE]
