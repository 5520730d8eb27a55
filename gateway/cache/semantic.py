"""The semantic tier: the nearest stored questions of a scope, from an index that is rebuilt from the store."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from embedder.batcher import Batcher
from embedder.config import EmbedderConfig
from embedder.contract import Vectors
from embedder.index import ScopedIndex
from gateway.stores.contract import AnswerStore

CANDIDATES = 5


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The question's vector as float32 bytes, and the nearest (key, cosine) of its scope."""

    vector: bytes
    nearest: list[tuple[bytes, float]]


class Semantic:
    """Encoder and index on one thread of their own."""

    def __init__(self, batcher: Batcher) -> None:
        self._batcher = batcher
        self._index = ScopedIndex(batcher.encoder.dimensions)
        self._coming: Counter[bytes] = Counter()
        """Scopes with questions on their way into the index."""
        self.fingerprint = batcher.encoder.fingerprint

    def __len__(self) -> int:
        return len(self._index)

    def has(self, scope: bytes) -> bool:
        """Whether there is anything to find; cheap, so that a first question is not encoded before it is asked."""
        return scope in self._index or scope in self._coming

    def neighbours(self, scope: bytes, question: str) -> asyncio.Future[Neighbours | None]:
        """The nearest stored questions; None if the question is longer than the encoder's window."""

        def look(vector: Vectors) -> Neighbours:
            found = self._index.search(scope, vector, CANDIDATES)
            return Neighbours(vector.tobytes(), [(bytes(key), cosine) for key, cosine in found])  # type: ignore[call-overload]

        return self._batcher.encode_then(question, look)

    def add(self, scope: bytes, key: bytes, question: str, vector: bytes | None) -> asyncio.Future[bytes | None]:
        """Put a question into the index; its vector, which is made here unless it is known, or None if it does not fit.

        Whoever asks for neighbours after this call finds it: both wait in the same queue.
        """

        def insert(made: Vectors) -> bytes:
            known = bytes(made.tobytes()) if vector is None else vector
            self._index.add(scope, [key], _array([known]))
            return known

        if vector is None:
            future = self._batcher.encode_then(question, insert)
        else:
            future = self._batcher.run(lambda: insert(None))
        self._coming[scope] += 1
        future.add_done_callback(lambda _: self._arrived(scope))
        return future

    def _arrived(self, scope: bytes) -> None:
        self._coming[scope] -= 1
        if not self._coming[scope]:
            del self._coming[scope]

    def remove(self, keys: list[bytes]) -> asyncio.Future[None]:
        def drop() -> None:
            for key in keys:
                self._index.remove(key)

        return self._batcher.run(drop)

    async def rebuild(self, store: AnswerStore, is_live: Callable[[bytes], bool]) -> int:
        """Fill the index from the store; how many vectors it holds then."""

        def fill() -> int:
            by_scope: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
            for key, scope, vector in store.vectors(self.fingerprint):
                if is_live(key):
                    keys, vectors = by_scope.setdefault(scope, ([], []))
                    keys.append(key)
                    vectors.append(vector)
            for scope, (keys, vectors) in by_scope.items():
                self._index.add(scope, keys, _array(vectors))
            return len(self._index)

        return await self._batcher.run(fill)

    async def warm(self) -> None:
        """One encoding before the first request, since a first pass through a model is slow."""
        await self._batcher.encode_then("What is this?", lambda vector: None)

    def close(self) -> None:
        self._batcher.close()


def load(config: EmbedderConfig) -> Semantic:
    """The semantic tier over a sentence-transformers model; takes seconds. Raises ImportError or `EncoderNotFound`."""
    from embedder.sentence import SentenceEncoder

    return Semantic(Batcher(SentenceEncoder(config.model, config.threads)))


def _array(vectors: list[bytes]) -> Any:
    import numpy

    return numpy.frombuffer(b"".join(vectors), dtype=numpy.float32).reshape(len(vectors), -1)
