"""The semantic tier: the nearest stored questions of a scope, from an index that is rebuilt from the store."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice

import numpy

from embedder.batcher import Batcher
from embedder.build import build
from embedder.config import EmbedderConfig
from embedder.contract import Vectors
from embedder.index import ScopedIndex, pack
from embedder.verifier import Unreadable, Verifier
from embedder.verifier import build as build_verifier
from gateway.stores.contract import Vector

CANDIDATES = 5
PIECE = 10_000
MARGIN = 0.1
ALONE = 0.85
"""The cosine that a stored question must reach where only the guards decide (docs/hit-quality.md)."""
PROPOSED = 0.5
"""Where the verifier decides, the cosine only proposes."""
UNRELATED = (
    "How do I bake bread?",
    "What is the best way to learn chess?",
    "Who invented the telephone?",
    "Which visa do I need for Japan?",
    "Why is my laptop so slow?",
    "What does a notary cost?",
    "How tall is Mount Everest?",
    "Can dogs eat grapes?",
)
"""Questions that share no answer: an encoder that puts them close together needs a higher threshold."""


@dataclass(frozen=True, slots=True)
class Neighbours:
    """The question's vector, and the nearest (key, cosine) of its scope."""

    vector: Vectors
    nearest: list[tuple[bytes, float]]

    @property
    def packed(self) -> bytes:
        """The vector as it is stored."""
        return pack(self.vector[None])[0]

    def cosine(self, other: Neighbours) -> float:
        """How near two questions are."""
        return float(numpy.dot(self.vector, other.vector))


class Semantic:
    """Encoder and index on one thread of their own."""

    def __init__(
        self,
        batcher: Batcher,
        verifier: Verifier | None = None,
        threshold: float = ALONE,
        languages: str = "any",
        accept: float = 0.98,
    ) -> None:
        """`threshold`: the cosine from which on a question is a candidate, where nobody asks for more; `accept`: the
        probability that a verifier without calibration must find."""
        self._batcher, self.threshold, self.languages = batcher, threshold, languages
        self.accept = math.log(accept / (1 - accept))
        self.verifier = verifier
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
            return Neighbours(vector, [(bytes(key), cosine) for key, cosine in found])  # type: ignore[call-overload]

        return self._batcher.encode_then(question, look)

    async def score(self, question: str, other: str) -> float | None:
        """The verifier's log-odds that one answer serves both questions; None where it cannot tell, or there is
        none."""
        verifier = self.verifier
        if verifier is None:
            return None
        try:
            score = await self._batcher.run(lambda: verifier.score(question, other))
        except Unreadable:
            return None
        return score if math.isfinite(score) else None

    def vector(self, text: str) -> asyncio.Future[Vectors | None]:
        """The vector of a text that is no question; None if it does not fit."""
        return self._batcher.encode_then(text, lambda vector: vector)

    def add(self, scope: bytes, key: bytes, question: str, packed: bytes | None) -> asyncio.Future[bytes | None]:
        """Put a question into the index; its vector, which is made here unless it is known, or None if it does not fit.

        Whoever asks for neighbours after this call finds it: both wait in the same queue.
        """

        def insert(made: Vectors) -> bytes:
            known = pack(made[None])[0] if packed is None else packed
            self._index.add(scope, [key], [known])
            return known

        if packed is None:
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

    async def fill(self, vectors: Iterable[Vector], is_live: Callable[[bytes, float], bool]) -> None:
        """Put stored vectors in; those of another size are left out."""
        size = self._index.dimensions + 4

        def put(some: list[Vector]) -> None:
            by_scope: dict[bytes, tuple[list[bytes], list[bytes]]] = {}
            for vector in some:
                if is_live(vector.key, vector.created) and len(vector.packed) == size:
                    keys, rows = by_scope.setdefault(vector.scope, ([], []))
                    keys.append(vector.key)
                    rows.append(vector.packed)
            for scope, (keys, rows) in by_scope.items():
                self._index.add(scope, keys, rows)

        rest = iter(vectors)
        # Piece by piece: a million vectors as Python objects would double the memory for good.
        while some := await self._batcher.run(lambda: list(islice(rest, PIECE))):
            await self._batcher.run(partial(put, some))

    def close(self) -> None:
        self._batcher.close()


class TooNear(ValueError):
    """An encoder that cannot be used with a threshold; the text says why."""


def load(config: EmbedderConfig, threshold: float | None) -> Semantic:
    """The semantic tier over the configured encoder and verifier; takes seconds.

    `threshold`: the cosine that the config asks for; None: what suits the encoder. Raises ImportError,
    `EncoderNotFound`, or `TooNear` where the encoder puts unrelated questions so close together that the threshold
    tells nothing.
    """
    encoder, verifier = build(config), build_verifier(config.verifier, config.threads)
    made = encoder.encode(UNRELATED)
    nearest = float((made @ made.T)[~numpy.eye(len(made), dtype=bool)].max())
    suits = nearest + MARGIN
    if threshold is None and verifier is not None:
        threshold = max(PROPOSED, suits)
    if suits > min(0.99, ALONE if threshold is None else threshold):
        raise TooNear(
            f"the embedding model puts unrelated questions at a cosine of {nearest:.2f}, too near for "
            f"cache.semantic.threshold {ALONE if threshold is None else threshold:g}; with this model it must be "
            f"over {suits:.2f}"
        )
    return Semantic(
        Batcher(encoder), verifier, ALONE if threshold is None else threshold, config.languages, config.accept
    )
