"""What the answer cache needs from an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Vectors = Any
"""A numpy float32 array `[texts, dimensions]` of unit length; numpy itself is an optional dependency."""


class Encoder(Protocol):
    """Turns texts into unit vectors. Called from one thread only."""

    fingerprint: str
    """Changes whenever the same text could get another vector: model files, dimensions, pooling."""
    dimensions: int

    def fits(self, text: str) -> bool:
        """Whether the model sees the whole text: within its window, and nothing that its vocabulary does not know."""
        ...

    def encode(self, texts: Sequence[str]) -> Vectors:
        """`[texts, dimensions]`, float32, each row of length 1."""
        ...
