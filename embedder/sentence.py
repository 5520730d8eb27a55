"""sentence-transformers models from an installed package, a folder or the hub; on a GPU where there is one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from embedder.contract import EncoderNotFound, Vectors, fingerprint, package_folder


class SentenceEncoder:
    """An `Encoder` over sentence-transformers."""

    def __init__(self, spec: str, threads: int) -> None:
        import torch
        from sentence_transformers import SentenceTransformer

        path = model_path(spec)
        torch.set_num_threads(threads)
        try:
            self._model: Any = SentenceTransformer(path, device="cuda" if torch.cuda.is_available() else "cpu")
        except (OSError, ValueError) as error:
            raise EncoderNotFound(f"embedding model {spec!r}: {error}") from error
        self.dimensions = int(self._model.get_embedding_dimension())
        self._window = int(self._model.max_seq_length or 512)
        self._unknown = self._model.tokenizer.unk_token_id
        files = _files(Path(path))
        self.fingerprint = fingerprint(files, f"{'' if files else spec} {self.dimensions}")

    def fits(self, text: str) -> bool:
        if len(text) > 20 * self._window:
            return False  # no tokenizer makes so few tokens of so many characters; do not even try
        tokens = self._model.tokenizer.encode(text)
        # Words that the vocabulary does not know all become one token, so different texts would look the same.
        return len(tokens) <= self._window and self._unknown not in tokens

    def encode(self, texts: Sequence[str]) -> Vectors:
        return self._model.encode(list(texts), normalize_embeddings=True, show_progress_bar=False, batch_size=64)


class SentenceVerifier:
    """A `Verifier` over a cross-encoder of sentence-transformers that tells one number for a pair: from the hub or a
    folder.

    It has no calibration, so what it says is believed only where the config says from which probability on.
    """

    calibration: Sequence[tuple[float, bool]] = ()

    def __init__(self, spec: str, threads: int) -> None:
        import torch
        from sentence_transformers import CrossEncoder

        path = model_path(spec)
        torch.set_num_threads(threads)
        try:
            self._model: Any = CrossEncoder(path, activation_fn=torch.nn.Identity())
        except (OSError, ValueError) as error:
            raise EncoderNotFound(f"verifier {spec!r}: {error}") from error
        if self._model.num_labels != 1:
            raise EncoderNotFound(f"verifier {spec!r}: it tells {self._model.num_labels} numbers for a pair, not one")
        self.fingerprint = fingerprint(_files(Path(path)), spec)

    def score(self, question: str, other: str) -> float:
        """The model's own logit, the mean over both orders. Raises `Unreadable`."""
        from embedder.verifier import Unreadable

        tokenizer = self._model.tokenizer
        ids = tokenizer(question, other)["input_ids"]
        if len(ids) > (self._model.max_length or 512) or tokenizer.unk_token_id in ids:
            raise Unreadable(f"{len(ids)} tokens, or unknown words")
        return float(self._model.predict([(question, other), (other, question)], show_progress_bar=False).mean())


def _files(folder: Path) -> list[Path]:
    """What a model is made of, where it is a folder."""
    return [
        path
        for path in (sorted(folder.rglob("*")) if folder.is_dir() else [])
        if path.is_file() and path.suffix in (".json", ".safetensors", ".bin")
    ]


def model_path(spec: str) -> str:
    if not spec.startswith("package:"):
        return spec
    root = package_folder(spec)
    for folder in (root, *(path for path in root.iterdir() if path.is_dir())):
        if (folder / "modules.json").is_file() or (folder / "config.json").is_file():
            return str(folder)
    raise EncoderNotFound(f"embedding model {spec!r}: the package holds no sentence-transformers model")
