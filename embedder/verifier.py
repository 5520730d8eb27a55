"""A second opinion on two questions that the encoder finds alike: how probable is it that one answer serves both?

A bi-encoder reads the two questions apart and cannot tell which difference matters; a cross-encoder reads them
together. The one that is shipped is MiniLM tuned by `scripts/train_verifier.py`; docs/hit-quality.md has its model
card.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from embedder.contract import EncoderNotFound
from embedder.onnx import session

SHIPPED = Path(__file__).parent / "weights"
LONGEST = 192
"""Tokens of both questions together; longer pairs are not judged."""


class Verifier(Protocol):
    """Says how probable it is that one answer serves two questions. Called from the encoder's thread only."""

    fingerprint: str
    """Changes whenever the same pair could get another score."""

    @property
    def calibration(self) -> Sequence[tuple[float, bool]]:
        """Scores of pairs that it was not trained on, each with whether one answer serves both; empty if there are
        none."""
        ...

    def score(self, question: str, other: str) -> float:
        """The log-odds that one answer serves both, the same in both orders. It may raise: then nothing is served."""
        ...


class Unreadable(ValueError):
    """The model would not see the two questions whole: too long, or with words that its vocabulary does not know."""


class CrossEncoder:
    """A sequence classifier with one logit, run by onnxruntime on the CPU."""

    def __init__(self, model: Path, tokenizer: Path, threads: int = 1) -> None:
        from tokenizers import Tokenizer

        self._tokenizer: Any = Tokenizer.from_file(str(tokenizer))
        self._tokenizer.no_truncation()
        self._tokenizer.enable_padding()
        self._unknown = self._tokenizer.token_to_id("[UNK]")
        self._session: Any = session(model, threads)
        self._inputs = {item.name for item in self._session.get_inputs()}

    def logit(self, question: str, other: str) -> float:
        """The mean over both orders. Raises `Unreadable`."""
        import numpy

        if len(question) + len(other) > 20 * LONGEST:
            raise Unreadable("too long")  # no tokenizer makes so few tokens of so many characters; do not even try
        encoded = self._tokenizer.encode_batch([(question, other), (other, question)])
        if len(encoded[0].ids) > LONGEST or self._unknown in encoded[0].ids:
            raise Unreadable(f"{len(encoded[0].ids)} tokens, or unknown words")
        feed = {
            "input_ids": numpy.array([item.ids for item in encoded], numpy.int64),
            "attention_mask": numpy.array([item.attention_mask for item in encoded], numpy.int64),
            "token_type_ids": numpy.array([item.type_ids for item in encoded], numpy.int64),
        }
        made = self._session.run(None, {name: feed[name] for name in self._inputs})[0]
        return float(made.mean())


class ShippedVerifier:
    """A `Verifier` in a folder as `scripts/train_verifier.py` writes it: weights, tokenizer, calibration."""

    def __init__(self, folder: Path, threads: int = 1) -> None:
        """Raises `EncoderNotFound`."""
        card = folder / "verifier.json"
        if not card.is_file():
            raise EncoderNotFound(
                f"verifier {str(folder)!r}: there is no verifier.json (make verifier makes one; verifier: none does "
                f"without)"
            )
        said = json.loads(card.read_text())
        self._model = CrossEncoder(folder / "verifier.onnx", folder / "tokenizer.json", threads)
        self._slope, self._offset = float(said["slope"]), float(said["offset"])
        scale = hashlib.blake2b(f"{self._slope} {self._offset}".encode(), digest_size=4).hexdigest()
        self.fingerprint = f"{said['fingerprint']}-{scale}"
        self.calibration = [(self._calibrated(logit), bool(same)) for logit, same in said["calibration"]]

    def score(self, question: str, other: str) -> float:
        return self._calibrated(self._model.logit(question, other))

    def _calibrated(self, logit: float) -> float:
        return self._slope * logit + self._offset


def build(spec: str, threads: int) -> Verifier | None:
    """The verifier that the config names: `shipped`, `none`, a folder as above, or a cross-encoder of the hub.

    Raises `EncoderNotFound` or ImportError.
    """
    if spec == "none":
        return None
    if spec == "shipped":
        return ShippedVerifier(SHIPPED, threads)
    if (Path(spec).expanduser() / "verifier.json").is_file():
        return ShippedVerifier(Path(spec).expanduser(), threads)
    from embedder.sentence import SentenceVerifier

    return SentenceVerifier(spec, threads)
