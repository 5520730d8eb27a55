"""From settings to backends."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from backends.config import AnthropicConfig, OpenAIConfig, VllmConfig
from backends.engine.backend import EngineBackend
from backends.engine.config import EngineConfig
from backends.protocol import Backend, reveal
from backends.upstream import Upstream
from backends.vllm import Ranking, VllmBackend


def build(
    name: str, config: EngineConfig | OpenAIConfig | AnthropicConfig | VllmConfig, data: Path, rank: Ranking
) -> Backend:
    """The backend of one entry under `backends:`; `data` is where an engine keeps its files, `rank` orders
    replicas. Raises OSError or ssl.SSLError for TLS files that cannot be used."""
    if isinstance(config, EngineConfig):
        return EngineBackend(name, config, data)
    common: dict[str, Any] = {
        "key": reveal(config.key) if config.key else None,
        "connect_timeout": config.timeout.connect,
        "idle_timeout": config.timeout.idle,
        "tls": config.tls.context(),
        "asks_for_usage": config.stream_usage,
    }
    if isinstance(config, VllmConfig):
        replicas = [Upstream(f"{name}/{_short(url)}", "vllm", url, **common) for url in config.replicas]
        return VllmBackend(name, replicas, rank, config.slack)
    if isinstance(config, AnthropicConfig):
        version = {"anthropic-version": config.version}
        return Upstream(name, "anthropic", config.base, headers=version, prompt_cache="breakpoints", **common)
    return Upstream(name, "openai", config.url, prompt_cache=config.style, **common)


def _short(url: str) -> str:
    """What tells replicas apart: host and port, and the path where it is not the usual one."""
    parts = urlsplit(url)
    return parts.netloc + parts.path.removesuffix("/v1")
