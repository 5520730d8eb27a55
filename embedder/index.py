"""Nearest vectors, one partition per scope; never a search across two.

A vector is kept as 8-bit codes (`pack`), its cosines right to about 0.001. A small partition is compared code by code.
In a large one FAISS first scans the signs of all components (Hamming distance, 48 bytes a vector) for candidates, whose
codes then decide: two stages as in Yamada et al. 2021 (arXiv:2106.00882, section 3). Removing is O(1): the last vector
takes the free slot.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy

from embedder.contract import Vectors

SMALL = 500
"""A partition up to this size is compared whole: a scan of signs would not be faster."""
CANDIDATES = 500
"""How many nearest sign patterns are looked at more closely."""


def pack(vectors: Vectors) -> list[bytes]:
    """Unit vectors `[n, dimensions]` as bytes: dimensions 8-bit codes, then their scale as float32."""
    scales = numpy.maximum(numpy.abs(vectors).max(axis=1, keepdims=True), 1e-12) / 127
    codes = numpy.rint(vectors / scales).astype(numpy.int8)
    # The scale brings the decoded vector to length 1, so that a vector's cosine with itself is 1.
    lengths = numpy.linalg.norm(codes.astype(numpy.float32), axis=1)
    whole = numpy.divide(1, lengths, out=numpy.zeros_like(lengths), where=lengths > 0)
    return [row.tobytes() + scale.tobytes() for row, scale in zip(codes, whole, strict=True)]


class ScopedIndex:
    """The nearest packed vectors of a scope. Not thread-safe: all calls come from one thread.

    Keys are the caller's; adding a key again replaces its vector.
    """

    def __init__(self, dimensions: int, small: int = SMALL) -> None:
        """`small`: the largest partition that is compared whole."""
        self.dimensions = dimensions
        self._small = small
        self._partitions: dict[Hashable, _Partition] = {}
        self._scope_of: dict[Hashable, _Partition] = {}

    def __len__(self) -> int:
        return len(self._scope_of)

    def __contains__(self, scope: Hashable) -> bool:
        return scope in self._partitions

    def add(self, scope: Hashable, keys: Sequence[Hashable], packed: Iterable[bytes]) -> None:
        """Put vectors in, as `pack` makes them; those of another size are refused with ValueError."""
        rows = list(packed)
        if any(len(row) != self.dimensions + 4 for row in rows):
            raise ValueError(f"a packed vector of {self.dimensions} dimensions has {self.dimensions + 4} bytes")
        for key in keys:
            self.remove(key)
        partition = self._partitions.get(scope)
        if partition is None:
            partition = self._partitions[scope] = _Partition(scope, self.dimensions, self._small)
        partition.add(keys, rows)
        self._scope_of.update(dict.fromkeys(keys, partition))

    def remove(self, key: Hashable) -> None:
        """Forget a key; unknown keys are ignored."""
        partition = self._scope_of.pop(key, None)
        if partition is None:
            return
        partition.remove(key)
        if not partition.keys:
            del self._partitions[partition.scope]

    def search(self, scope: Hashable, vector: Vectors, k: int) -> list[tuple[Hashable, float]]:
        """Up to `k` (key, cosine), most similar first; `vector` is `[dimensions]`, float32, unit length."""
        partition = self._partitions.get(scope)
        return partition.search(vector, k) if partition else []


class _Partition:
    """One scope: slot i holds `keys[i]`, its codes and scale, and in a large partition its signs, in a FAISS index."""

    __slots__ = ("_codes", "_signs", "_slots", "_small", "dimensions", "keys", "scope")

    def __init__(self, scope: Hashable, dimensions: int, small: int) -> None:
        self._small = small
        self.scope = scope
        self.dimensions = dimensions
        self.keys: list[Hashable] = []
        self._slots: dict[Hashable, int] | None = None  # a few keys are found as fast by looking at each
        self._codes = numpy.empty((0, dimensions + 4), numpy.int8)
        self._signs: Any = None

    def add(self, keys: Sequence[Hashable], rows: list[bytes]) -> None:
        count, more = len(self.keys), len(rows)
        fresh = numpy.frombuffer(b"".join(rows), numpy.int8).reshape(more, self.dimensions + 4)
        if count + more > len(self._codes):
            capacity = max(count + more, len(self._codes) * 3 // 2 if count > 8 else count + more)
            grown = numpy.empty((capacity, self.dimensions + 4), numpy.int8)
            grown[:count] = self._codes[:count]
            self._codes = grown
        self._codes[count : count + more] = fresh
        self.keys.extend(keys)
        if self._slots is not None:
            self._slots.update({key: count + number for number, key in enumerate(keys)})
        elif len(self.keys) > 64:
            self._slots = {key: slot for slot, key in enumerate(self.keys)}
        if self._signs is not None:
            self._signs.add(_signs(fresh[:, : self.dimensions]))
        elif len(self.keys) > self._small:
            import faiss

            self._signs = faiss.IndexBinaryFlat(self.dimensions // 8 * 8)
            self._signs.add(_signs(self._codes[: len(self.keys), : self.dimensions]))

    def remove(self, key: Hashable) -> None:
        slot = self.keys.index(key) if self._slots is None else self._slots.pop(key)
        last = len(self.keys) - 1
        moved = self.keys.pop()
        if slot != last:
            self.keys[slot] = moved
            self._codes[slot] = self._codes[last]
            if self._slots is not None:
                self._slots[moved] = slot
        if self._signs is not None:
            self._drop_signs(slot, last)

    def _drop_signs(self, slot: int, last: int) -> None:
        import faiss

        width = self._signs.code_size
        view = faiss.rev_swig_ptr(self._signs.xb.data(), self._signs.ntotal * width).reshape(-1, width)
        if slot != last:
            view[slot] = view[last]
        self._signs.xb.resize(last * width)
        self._signs.ntotal = last

    def search(self, vector: Vectors, k: int) -> list[tuple[Hashable, float]]:
        count = len(self.keys)
        if self._signs is None:
            slots = None
            rows = self._codes[:count]
        else:
            wanted = min(max(CANDIDATES, 4 * k), count)
            _, found = self._signs.search(_signs(vector.reshape(1, -1)), wanted)
            slots = found[0]
            rows = self._codes[slots]
        scales = numpy.ascontiguousarray(rows[:, self.dimensions :]).view(numpy.float32)[:, 0]
        cosines = (rows[:, : self.dimensions].astype(numpy.float32) @ vector) * scales
        cosines[~numpy.isfinite(cosines)] = -1.0  # what has no direction is near to nothing
        best = numpy.argsort(-cosines, kind="stable")[:k]
        return [
            (self.keys[place if slots is None else slots[place]], min(1.0, float(cosines[place]))) for place in best
        ]


def _signs(vectors: Any) -> Any:
    """One bit per component, `[n, dimensions / 8]` bytes."""
    whole = vectors.shape[1] // 8 * 8
    return numpy.packbits(vectors[:, :whole] > 0, axis=1)
