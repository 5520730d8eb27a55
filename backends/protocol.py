"""The vocabulary: what is asked, what is answered, and what can go wrong between.

The one module of `backends` that `policies` may import. Plain values only.
"""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, BeforeValidator, ConfigDict

_DURATION_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_duration(value: object) -> object:
    """`"250ms"`, `"10s"`, `"5m"`, `"24h"`, `"7d"` → seconds. Numbers are refused: the unit lives in the value."""
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(ms|s|m|h|d)\s*", value)
        if match:
            return float(match[1]) * _DURATION_UNITS[match[2]]
    if isinstance(value, float):  # a default, already in seconds
        return value
    shown = repr(value) if isinstance(value, str | int) else type(value).__name__
    raise ValueError(
        f"a duration needs a number and one of the units ms, s, m, h, d (like 250ms or 24h), not {shown[:80]}"
    )


Duration = Annotated[float, BeforeValidator(parse_duration)]
"""Seconds, written in config files with their unit."""


def _secret(value: object) -> object:
    """`env:NAME`, where the variable is set. The secret itself never stands in a file, nor in the settings."""
    if not isinstance(value, str) or not value.startswith("env:"):
        raise ValueError("a key is given by the name of an environment variable, like env:OPENAI_API_KEY")
    if not reveal(value):
        raise ValueError(f"the environment variable {value.removeprefix('env:')} is not set")
    return value


def reveal(secret: str) -> str:
    """The value behind `env:NAME`; empty if the variable is not set."""
    return os.environ.get(secret.removeprefix("env:"), "")


Secret = Annotated[str, BeforeValidator(_secret)]
"""The name of an environment variable, as `env:NAME`."""


class Section(BaseModel):
    """A part of a configuration file: frozen, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


@dataclass(frozen=True, slots=True)
class View:
    """What the gateway needs to know of a request; the bytes themselves stay as they came.

    `question` is the text that may differ in wording between two requests that share an answer (the last user
    turn), or None, and then `no_question` says why. `scope_fields` is everything else that decides the answer.
    """

    surface: str
    model: str
    stream: bool
    include_usage: bool
    question: str | None
    no_question: str
    scope_fields: Mapping[str, Any]
    temperature: float | None = None
    choices: int = 1
    wants_logprobs: bool = False


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one answer. `prompt` includes `cached`; `cached` is None where the backend does not tell."""

    prompt: int
    completion: int
    cached: int | None = None
    sources: Mapping[str, int] = field(default_factory=dict)
    """Of `cached`, how many were found in which KV tier, where the backend tells."""
    written: int | None = None
    """Of `prompt`, how many a provider wrote to its prompt cache, and for an hour `written_hour` of them."""
    written_hour: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """One complete answer, independent of how it was or will be sent.

    `body` is the answer object of the dialect without `id` and `created`, which every delivery makes anew.
    `finish_reasons` holds one word per choice. `flaw` names what makes it unfit for reuse (empty when it is fit).
    """

    body: Mapping[str, Any]
    finish_reasons: tuple[str, ...]
    usage: Usage | None
    flaw: str = ""


PromptCacheStyle = Literal["key", "breakpoints", "none"]


@dataclass(frozen=True, slots=True)
class Call:
    """One HTTP request towards a backend: `path` starts after `/v1`, `query` has no leading `?`."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes


def content_type(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """What a body is; empty if nobody says."""
    for name, value in headers:
        if name == b"content-type":
            return value
    return b""


class Reply(Protocol):
    """An upstream's answer whose head has arrived and whose body is still to come. Always close it."""

    status: int
    headers: list[tuple[bytes, bytes]]
    """Names in lower case, without those of a single connection."""
    whole: bytes | None
    """The body, where it is here already."""

    def chunks(self) -> AsyncIterator[bytes]:
        """The body as it arrives. Raises `BackendInterrupted` when it ends before its end."""
        ...

    async def close(self) -> None:
        """Give the connection back; cancels the computation when the body was not read to its end."""
        ...


class Response(Reply, Protocol):
    """A reply of which nothing has been read."""

    async def begin(self, most: int) -> tuple[list[bytes], bool]:
        """The pieces of the body until there are `most` bytes or its end, and whether that is the end. Raises as
        `chunks`, which then gives the rest."""
        ...


class Server(Protocol):
    """One place that takes requests: a backend, or one replica of it."""

    name: str
    kind: str
    in_flight: int
    """Requests that it has now."""

    async def open(self, call: Call) -> Response:
        """Send, and return when the response head is there. Raises a `BackendError`."""
        ...


class Backend(Protocol):
    """Something that computes answers, in one place or several.

    `identity` changes whenever the same request could get a different answer for a reason that the request does
    not show (another URL, another model file), so that stored answers do not outlive what made them.
    """

    name: str
    kind: str

    prompt_cache: PromptCacheStyle
    """How the provider's prompt cache is used: a key in the request, marked places, or nothing that can be done."""

    asks_for_usage: bool
    """Whether streams are asked to tell their usage (`stream_options`), for the ledger."""

    @property
    def identity(self) -> str: ...

    def places(self, affinity: bytes) -> Sequence[Server]:
        """Where a request may be sent, best first; requests with the same `affinity` share what is cached there."""
        ...

    async def ready(self) -> str:
        """Empty when requests can be served now, else the reason why not."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...


@dataclass
class BackendError(Exception):
    """No answer from a backend, and none of its bytes were passed on."""

    backend: str
    detail: str
    retry_after: float | None = field(default=None)

    def __str__(self) -> str:
        return f"backend {self.backend!r}: {self.detail}"


class BackendUnreachable(BackendError):
    """No connection, or it broke before the response head."""


@dataclass
class BackendTimeout(BackendError):
    """The backend did not answer within its time; `connected`: it had got the request."""

    connected: bool = True


class BackendStarting(BackendError):
    """The backend is known to be on its way up (again); come back after `retry_after` seconds."""


class BackendRefused(BackendError):
    """The backend says that it cannot do what it was told to; telling it again will not help."""


class BackendInterrupted(BackendError):
    """The body broke off in the middle."""


class NobodyLeft(BackendError):
    """Every candidate has failed so often that it is not asked for a while; come back after `retry_after` seconds."""
