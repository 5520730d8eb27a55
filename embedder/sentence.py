"""sentence-transformers models from an installed package, a folder or the hub."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embedder.contract import Vectors


class EncoderNotFound(ValueError):
    """The embedding model cannot be loaded; the text says what was looked for."""


class SentenceEncoder:
    """An `Encoder` over sentence-transformers."""

    def __init__(self, spec: str, threads: int) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        path = _path(spec)
        torch.set_num_threads(threads)
        try:
            self._model: Any = SentenceTransformer(path, device="cuda" if torch.cuda.is_available() else "cpu")
        except (OSError, ValueError) as error:
            raise EncoderNotFound(f"embedding model {spec!r}: {error}") from error
        self.dimensions = int(self._model.get_embedding_dimension())
        self._window = int(self._model.max_seq_length or 512)
        self._unknown = self._model.tokenizer.unk_token_id
        self.fingerprint = _fingerprint(Path(path), spec, self.dimensions)

    def fits(self, text: str) -> bool:
        if len(text) > 20 * self._window:
            return False  # no tokenizer makes so few tokens of so many characters; do not even try
        tokens = self._model.tokenizer.encode(text)
        # Words that the vocabulary does not know all become one token, so different texts would look the same.
        return len(tokens) <= self._window and self._unknown not in tokens

    def encode(self, texts: Sequence[str]) -> Vectors:
        return self._model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False, batch_size=64)


def _path(spec: str) -> str:
    if not spec.startswith("package:"):
        return spec
    package, _, inner = spec.removeprefix("package:").partition("/")
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise EncoderNotFound(
            f"embedding model {spec!r}: the package {package!r} is not installed; "
            f"install it with: pip install {package.replace('_', '-')}"
        )
    root = Path(found.submodule_search_locations[0], inner)
    for folder in (root, *(path for path in root.iterdir() if path.is_dir())):
        if (folder / "modules.json").is_file() or (folder / "config.json").is_file():
            return str(folder)
    raise EncoderNotFound(f"embedding model {spec!r}: the package holds no sentence-transformers model")


def _fingerprint(folder: Path, spec: str, dimensions: int) -> str:
    """Names, sizes and heads of the model's files; for a hub id the id itself."""
    digest = hashlib.blake2b(f"{spec if not folder.is_dir() else ''} {dimensions}".encode(), digest_size=16)
    for path in sorted(folder.rglob("*")) if folder.is_dir() else []:
        if path.is_file() and path.suffix in (".json", ".safetensors", ".bin"):
            digest.update(f"{path.relative_to(folder)} {path.stat().st_size}".encode())
            with path.open("rb") as file:
                digest.update(file.read(1 << 16))
    return digest.hexdigest()
