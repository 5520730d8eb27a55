"""An ONNX export of a sentence-transformers model on the CPU: MiniLM in 8 bits takes a fraction of torch's time.

The vector is the mean of the last hidden state over the tokens that are no padding, brought to length 1: what MiniLM
and most of its kin were trained with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from embedder.contract import EncoderNotFound, Vectors, fingerprint, package_folder

WINDOW = 256
"""Tokens that MiniLM was trained to see: its `max_seq_length`, for models that do not tell theirs."""


class ONNXEncoder:
    """An `Encoder` over onnxruntime. `spec` and `tokenizer` are folders or `package:NAME` of installed packages."""

    def __init__(self, spec: str, tokenizer: str, threads: int) -> None:
        from tokenizers import Tokenizer

        model = _find(spec, "*.onnx")
        files = [model, _find(tokenizer, "tokenizer.json")]
        self._tokenizer: Any = Tokenizer.from_file(str(files[1]))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._session: Any = session(model, threads)
        self._inputs = {item.name for item in self._session.get_inputs()}
        self.dimensions = int(self._session.get_outputs()[0].shape[-1])
        self._unknown = self._tokenizer.token_to_id("[UNK]")
        self._ids = lru_cache(maxsize=64)(lambda text: self._tokenizer.encode(text).ids)
        """Each text is first asked whether it fits, and then encoded."""
        self.fingerprint = fingerprint(files, f"onnx-mean {self.dimensions}")
        said = _said(files[1].parent, "sentence_bert_config.json")
        self._window = int(said.get("max_seq_length") or WINDOW)
        if not _said(files[1].parent / "1_Pooling", "config.json").get("pooling_mode_mean_tokens", True):
            raise EncoderNotFound(f"embedding model {spec!r}: only models with mean pooling are run from ONNX")

    def fits(self, text: str) -> bool:
        if len(text) > 20 * self._window:
            return False  # no tokenizer makes so few tokens of so many characters; do not even try
        ids = self._ids(text)
        # Words that the vocabulary does not know all become one token, so different texts would look the same.
        return len(ids) <= self._window and self._unknown not in ids

    def encode(self, texts: Sequence[str]) -> Vectors:
        import numpy

        encoded = [self._ids(text) for text in texts]
        ids = numpy.zeros((len(encoded), max(map(len, encoded))), numpy.int64)
        mask = numpy.zeros_like(ids)
        for row, tokens in enumerate(encoded):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = 1
        feed = {"input_ids": ids, "attention_mask": mask, "token_type_ids": numpy.zeros_like(ids)}
        hidden = self._session.run(None, {name: feed[name] for name in self._inputs})[0]
        vectors = (hidden * mask[:, :, None]).sum(axis=1)
        return (vectors / numpy.linalg.norm(vectors, axis=1, keepdims=True)).astype(numpy.float32)


def session(model: Path, threads: int) -> Any:
    """An onnxruntime session on the CPU."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    # Idle threads that spin take the time of the engine and of the event loop.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])


def _said(folder: Path, name: str) -> dict[str, Any]:
    """What a model's folder says of it, if it does."""
    path = folder / name
    said: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return said


def _find(spec: str, pattern: str) -> Path:
    folder = package_folder(spec) if spec.startswith("package:") else Path(spec).expanduser()
    found = folder if folder.is_file() else next(iter(sorted(folder.rglob(pattern))), None)
    if found is None:
        raise EncoderNotFound(f"embedding model {spec!r}: there is no {pattern} in {folder}")
    return found
