"""From settings to backends."""

from __future__ import annotations

from pathlib import Path

from backends.config import OpenAIConfig
from backends.engine.backend import EngineBackend
from backends.engine.config import EngineConfig
from backends.protocol import Backend, reveal
from backends.upstream import Upstream


def build(name: str, config: EngineConfig | OpenAIConfig, data: Path) -> Backend:
    """The backend of one entry under `backends:`; `data` is where an engine keeps its files."""
    if isinstance(config, EngineConfig):
        return EngineBackend(name, config, data)
    return Upstream(
        name,
        "openai",
        config.url,
        key=reveal(config.key) if config.key else None,
        connect_timeout=config.timeout.connect,
        idle_timeout=config.timeout.idle,
    )
