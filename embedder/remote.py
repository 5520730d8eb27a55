"""An OpenAI-compatible `/v1/embeddings` endpoint as encoder."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from embedder.contract import EncoderNotFound, Vectors, fingerprint

WINDOW_BYTES = 800
"""Texts up to this length are sent: no tokenizer makes more than the usual 512 tokens of them, but of mere digits."""
TIMEOUT = 5.0


class RemoteEncoder:
    """An `Encoder` over HTTP. `key` names the environment variable that holds the API key."""

    def __init__(self, url: str, model: str, key: str = "") -> None:
        import httpx

        headers = {"authorization": f"Bearer {os.environ.get(key.removeprefix('env:'), '')}"} if key else {}
        # The encoder's thread makes one call at a time, so plain httpx is enough here.
        self._client: Any = httpx.Client(base_url=url.rstrip("/") + "/", headers=headers, timeout=TIMEOUT)
        self._model = model
        try:
            probe = self.encode(["What is this?"])[0]
        except (httpx.HTTPError, KeyError, ValueError, IndexError) as error:
            raise EncoderNotFound(f"embedding model {model!r} at {url}: {error}") from error
        self.dimensions = len(probe)
        self.fingerprint = fingerprint([], f"remote {url} {model} {self.dimensions}")

    def fits(self, text: str) -> bool:
        return len(text.encode("utf-8", "replace")) <= WINDOW_BYTES

    def encode(self, texts: Sequence[str]) -> Vectors:
        import numpy

        reply = self._client.post("embeddings", json={"model": self._model, "input": list(texts)})
        reply.raise_for_status()
        rows = sorted(reply.json()["data"], key=lambda item: item["index"])
        vectors = numpy.array([row["embedding"] for row in rows], numpy.float32)
        if len(vectors) != len(texts):
            raise ValueError(f"{len(vectors)} embeddings for {len(texts)} texts")
        lengths = numpy.linalg.norm(vectors, axis=1, keepdims=True)
        if not (numpy.isfinite(lengths).all() and (lengths > 0).all()):
            raise ValueError("an embedding has no direction: its components are zero, null or not finite")
        return vectors / lengths
