"""Nearest vectors, one partition per scope. FAISS inside a partition; never a search across two."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Any

from embedder.contract import Vectors


class ScopedIndex:
    """Exact inner-product search over unit vectors (so the score is the cosine), per scope.

    Not thread-safe: all calls come from one thread. Keys are the caller's; adding a key again replaces its vector.
    """

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self._partitions: dict[Hashable, _Partition] = {}
        self._scope_of: dict[Hashable, Hashable] = {}

    def __len__(self) -> int:
        return len(self._scope_of)

    def __contains__(self, scope: Hashable) -> bool:
        return scope in self._partitions

    def add(self, scope: Hashable, keys: Iterable[Hashable], vectors: Vectors) -> None:
        """`vectors` `[keys, dimensions]`, float32, unit length."""
        keys = list(keys)
        for key in keys:
            self.remove(key)
        if scope not in self._partitions:
            self._partitions[scope] = _Partition(self.dimensions)
        self._partitions[scope].add(keys, vectors)
        self._scope_of.update(dict.fromkeys(keys, scope))

    def remove(self, key: Hashable) -> None:
        """Forget a key; unknown keys are ignored."""
        scope = self._scope_of.pop(key, None)
        if scope is None:
            return
        partition = self._partitions[scope]
        partition.remove(key)
        if not partition.keys:
            del self._partitions[scope]

    def search(self, scope: Hashable, vector: Vectors, k: int) -> list[tuple[Hashable, float]]:
        """Up to `k` (key, cosine), most similar first; `vector` is `[dimensions]`."""
        partition = self._partitions.get(scope)
        return partition.search(vector, k) if partition else []


class _Partition:
    """One scope: a flat FAISS index whose slot i holds `keys[i]`. A removed slot is filled from the end."""

    def __init__(self, dimensions: int) -> None:
        import faiss

        self._index: Any = faiss.IndexFlatIP(dimensions)
        self.keys: list[Hashable] = []
        self._slot: dict[Hashable, int] = {}

    def add(self, keys: list[Hashable], vectors: Vectors) -> None:
        self._index.add(vectors)
        for key in keys:
            self._slot[key] = len(self.keys)
            self.keys.append(key)

    def remove(self, key: Hashable) -> None:
        import faiss

        slot, last = self._slot.pop(key), len(self.keys) - 1
        stored = faiss.rev_swig_ptr(self._index.get_xb(), self._index.ntotal * self._index.d)
        stored = stored.reshape(self._index.ntotal, self._index.d)
        if slot != last:
            stored[slot] = stored[last]
            self.keys[slot] = self.keys[last]
            self._slot[self.keys[slot]] = slot
        self.keys.pop()
        self._index.codes.resize(last * self._index.code_size)
        self._index.ntotal = last

    def search(self, vector: Vectors, k: int) -> list[tuple[Hashable, float]]:
        scores, slots = self._index.search(vector.reshape(1, -1), min(k, len(self.keys)))
        return [(self.keys[slot], float(score)) for slot, score in zip(slots[0], scores[0], strict=True) if slot >= 0]
