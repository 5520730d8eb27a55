"""For models whose layers keep more than KV of single tokens (linear attention, convolutions): the model's own cache.

Such state cannot be cut at any token, only copied at some. So each sequence runs by itself with the model's own cache,
and at every block boundary a snapshot is kept: the KV of that block's tokens, and the whole state of all other layers.
A prefix hit puts the model back to a boundary (as llama.cpp's context checkpoints do). Slower than the paged runner,
since nothing is computed together, and not the same bits whatever the cut; but right.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence as Seq
from typing import Any
from weakref import WeakKeyDictionary

import torch

from backends.engine.runner import Piece

SEQUENCES = 4
"""At once, since each keeps a cache of its own beside the snapshots."""
BLOCK = 128
"""Tokens between two snapshots, each of which costs as much as the state of all layers."""


class SnapshotRunner:
    """Runs pieces one after the other. Blocks of the scheduler's tables are snapshots here."""

    paged = False
    pool = None
    block_size = BLOCK

    def __init__(self, model: Any, room: int) -> None:
        """`room`: bytes for snapshots. Raises `ValueError` where the model's cache is not one that we know."""
        self.model = model
        self.device = model.device
        self._caches: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
        self._saved: dict[int, list[Any]] = {}
        window = getattr(model.config, "sliding_window", None) or 0  # layers with a window grow up to it
        length = BLOCK * max(1, min(window, 8192) // BLOCK)
        with torch.inference_mode():
            cache = self._fresh()
            self._forward(cache, [0] * length, 1)
            self.block_bytes = sum(_bytes(part) for part in _snapshot(cache, length - BLOCK))
        if cache.get_seq_length() != length or not self.block_bytes:
            raise ValueError("the model does not keep its state in the cache that it is given")
        self.blocks = room // self.block_bytes

    @torch.inference_mode()
    def run(self, pieces: Seq[Piece]) -> torch.Tensor:
        """Logits `[sum of wanted rows, vocabulary]`, float32, in the order of the pieces."""
        rows = [self._run(piece) for piece in pieces]
        return torch.cat(rows) if rows else torch.empty(0)

    def forget(self) -> None:
        """Drop all snapshots."""
        self._saved.clear()

    def _run(self, piece: Piece) -> torch.Tensor:
        cache = self._cache_at(piece)
        kept = []
        start = piece.start
        while start < piece.end:
            end = min(piece.end, start - start % BLOCK + BLOCK)
            wanted = max(0, end - max(start, piece.end - piece.wanted))
            logits = self._forward(cache, piece.ids[start - piece.start : end - piece.start], max(1, wanted))
            kept.append(logits[logits.shape[0] - wanted :])
            if end % BLOCK == 0:
                self._saved[piece.table[end // BLOCK - 1]] = _snapshot(cache, end - BLOCK)
            start = end
        return torch.cat(kept)

    def _cache_at(self, piece: Piece) -> Any:
        """The sequence's cache, which must stand at the piece's start: kept from its last piece, or put together."""
        owner = piece.owner
        cache = self._caches.get(owner) if owner is not None else None
        if cache is None or cache.get_seq_length() != piece.start:
            if piece.start % BLOCK:
                raise RuntimeError(f"no snapshot at token {piece.start}")
            cache = self._fresh()
            _restore(cache, [self._saved[block] for block in piece.table[: piece.start // BLOCK]])
            if owner is not None:
                self._caches[owner] = cache
        return cache

    def _fresh(self) -> Any:
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def _forward(self, cache: Any, ids: Seq[int], keep: int) -> torch.Tensor:
        tokens = torch.tensor([list(ids)], dtype=torch.int64, device=self.device)
        logits: torch.Tensor = self.model(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=keep
        ).logits[0]
        return logits.float()


def _is_growing(layer: Any) -> bool:
    """Whether a layer of the cache holds KV of every token, so that it can be kept in slices."""
    from transformers.cache_utils import DynamicLayer

    return type(layer) is DynamicLayer


def _snapshot(cache: Any, start: int) -> list[Any]:
    """Of each layer: keys and values from token `start` on, or a copy of its state."""
    return [
        (layer.keys[:, :, start:].clone(), layer.values[:, :, start:].clone())
        if _is_growing(layer)
        else copy.deepcopy(layer)
        for layer in cache.layers
    ]


def _restore(cache: Any, snapshots: Seq[list[Any]]) -> None:
    if not snapshots:
        return
    for index, layer in enumerate(cache.layers):
        parts = [snapshot[index] for snapshot in snapshots]
        if _is_growing(layer):
            layer.update(
                torch.cat([keys for keys, _ in parts], dim=2), torch.cat([values for _, values in parts], dim=2)
            )
        else:
            cache.layers[index] = copy.deepcopy(parts[-1])


def _bytes(part: Any) -> int:
    if isinstance(part, torch.Tensor):
        return part.nbytes
    if isinstance(part, dict):
        return sum(map(_bytes, part.values()))
    if isinstance(part, list | tuple):
        return sum(map(_bytes, part))
    return sum(map(_bytes, vars(part).values())) if hasattr(part, "__dict__") else 0
