"""The `backends:` section of `hitherto.yaml`, and the models they serve."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator, Field, model_validator

from backends.engine.config import EngineConfig
from backends.protocol import Duration, PromptCacheStyle, Secret, Section


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


class Timeouts(Section):
    """How long we wait for a backend."""

    connect: Duration = 5.0
    """The longest wait for a connection."""
    idle: Duration = 600.0
    """The longest silence: before the first byte, or between two."""


class Tls(Section):
    """How an https:// URL is trusted, where the system's authorities will not do."""

    ca: Path | None = None
    """A PEM file with the authorities to trust in place of the system's."""
    cert: Path | None = None
    """A PEM file with our own certificate and its key, for servers that ask for one."""
    verify: bool = True
    """False trusts anybody; for a test only."""

    def context(self) -> ssl.SSLContext | None:
        """None: the usual one. Raises OSError or ssl.SSLError for files that cannot be used."""
        if self == Tls():
            return None
        context = ssl.create_default_context(cafile=str(self.ca.expanduser()) if self.ca else None)
        if not self.verify:
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if self.cert is not None:
            context.load_cert_chain(self.cert.expanduser())
        return context


class _Remote(Section):
    """What every backend that is reached over a network has."""

    key: Secret | None = None
    """`env:NAME`; sent as `Authorization: Bearer` (to Anthropic as `x-api-key`). Without it none is sent."""
    timeout: Timeouts = Timeouts()
    """How long we wait for it."""
    tls: Tls = Tls()
    """How an https:// URL is trusted."""
    stream_usage: bool = True
    """Ask streams for their usage (`stream_options`) where the client does not, and keep it from the client; `false`
    for a server that refuses the field: what its streams take is then guessed."""


class OpenAIConfig(_Remote):
    """`kind: openai`: any endpoint that speaks the OpenAI dialect."""

    kind: Literal["openai"]
    url: HttpUrl
    """Base URL with the version path, like https://api.openai.com/v1."""
    prompt_cache: PromptCacheStyle | Literal["auto"] = "auto"
    """How the provider's prompt cache is used; `auto`: `key` for OpenAI and Azure, else `none`."""

    @property
    def style(self) -> PromptCacheStyle:
        if self.prompt_cache != "auto":
            return self.prompt_cache
        host = urlsplit(self.url).hostname or ""
        return "key" if host == "openai.com" or host.endswith((".openai.com", ".openai.azure.com")) else "none"


class AnthropicConfig(_Remote):
    """`kind: anthropic`: the Messages API."""

    kind: Literal["anthropic"]
    url: HttpUrl = "https://api.anthropic.com"
    """Base URL, with or without the version path."""
    version: str = "2023-06-01"
    """The `anthropic-version` of requests that name none."""

    @property
    def base(self) -> str:
        """With the version path."""
        return self.url if self.url.endswith("/v1") else f"{self.url}/v1"


class VllmConfig(_Remote):
    """`kind: vllm`: one or more vLLM servers with the same model."""

    kind: Literal["vllm"]
    replicas: tuple[HttpUrl, ...] = Field(min_length=1)
    """Base URLs with the version path."""
    slack: float = Field(default=1.25, ge=1.0)
    """A replica may carry so many times its share of the requests under way before those that belong there go to the
    next."""

    @model_validator(mode="after")
    def _different(self) -> VllmConfig:
        if len(set(self.replicas)) != len(self.replicas):
            raise ValueError("replicas: one stands there twice")
        return self


BackendConfig = Annotated[EngineConfig | OpenAIConfig | AnthropicConfig | VllmConfig, Field(discriminator="kind")]
