"""The `backends:` section of `hitherto.yaml`, and the models they serve."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from backends.engine.config import EngineConfig
from backends.protocol import Duration, Secret


def _http_url(value: object) -> object:
    if not isinstance(value, str):
        raise ValueError("a URL is needed, like https://api.openai.com/v1")
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{value!r} is not an http:// or https:// URL")
    if parts.query or parts.fragment or parts.username:
        raise ValueError(f"{value!r} must not have credentials, a query or a fragment")
    return value.rstrip("/")


HttpUrl = Annotated[str, BeforeValidator(_http_url)]


class Timeouts(BaseModel):
    """How long we wait for a backend."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    connect: Duration = 5.0
    idle: Duration = 600.0
    """The longest silence: before the first byte, or between two."""


class OpenAIConfig(BaseModel):
    """`kind: openai`: any endpoint that speaks the OpenAI dialect."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    kind: Literal["openai"]
    url: HttpUrl
    """Base URL with the version path, like https://api.openai.com/v1."""
    key: Secret | None = None
    """Sent as `Authorization: Bearer`; without it none is sent."""
    timeout: Timeouts = Timeouts()


BackendConfig = Annotated[EngineConfig | OpenAIConfig, Field(discriminator="kind")]
