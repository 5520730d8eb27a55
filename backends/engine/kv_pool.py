"""Where KV lives on the device: one tensor, reserved when the engine starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of `block_size` tokens in every layer."""
    return layers * 2 * block_size * kv_heads * head_dim * dtype.itemsize


class KVPool:
    """KV of `blocks` blocks of `block_size` tokens.

    Laid out `[block, layer, K|V, head, slot, dim]`, so that a block is one contiguous piece of memory (what the lower
    tiers copy), and one head of a layer is too: what attention gathers, into what matrix products want. Block 0 is the
    padding block.
    """

    def __init__(
        self,
        blocks: int,
        layers: int,
        kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.blocks, self.layers, self.block_size = blocks, layers, block_size
        self.kv_heads, self.head_dim = kv_heads, head_dim
        # Zeros, not empty: padded positions are read with weight 0, and 0 × NaN would be NaN.
        self.data = torch.zeros((blocks, layers, 2, kv_heads, block_size, head_dim), dtype=dtype, device=device)
        self._rows = self.data.view(-1, head_dim)
        self._pages = self.data.view(-1, block_size * head_dim)
        self._heads = torch.arange(kv_heads, device=device)
        self._halves = torch.arange(2 * kv_heads, device=device)

    def slots(self, table: list[int], start: int, end: int) -> list[int]:
        """Row numbers (of layer 0, K, head 0) where tokens `start … end-1` of a sequence with this block table go."""
        size = self.block_size
        stride = self.layers * 2 * self.kv_heads * size
        return [table[position // size] * stride + position % size for position in range(start, end)]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store `key` and `value`, each `[tokens, heads, dim]`, at `slots` `[tokens]` of `layer`."""
        half = self.kv_heads * self.block_size
        rows = slots[:, None] + (self._heads * self.block_size + layer * 2 * half)
        self._rows.index_copy_(0, rows.reshape(-1), key.reshape(-1, self.head_dim))
        self._rows.index_copy_(0, (rows + half).reshape(-1), value.reshape(-1, self.head_dim))

    def read_block(self, block: int) -> Callable[[], bytes]:
        """A copy of a block as it is now; the call that gives its bytes may be made on any thread.

        From a GPU it travels while computing goes on: through pinned memory, behind what is queued already.
        """
        source = self.data[block]
        if source.device.type != "cuda":
            content = source.view(torch.uint8).numpy().tobytes()
            return lambda: content
        staging = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        staging.copy_(source, non_blocking=True)
        arrived: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()

        def content_of() -> bytes:
            arrived.synchronize()
            return staging.view(torch.uint8).numpy().tobytes()

        return content_of

    def write_block(self, block: int, payload: memoryview) -> None:
        """Fill a block with bytes that `read_block` gave."""
        source = torch.frombuffer(bytearray(payload), dtype=self.data.dtype).view(self.data[block].shape)
        on_gpu = self.data.device.type == "cuda"
        self.data[block].copy_(source.pin_memory() if on_gpu else source, non_blocking=on_gpu)

    def tokens(self, layer: int, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `layer` at `slots` `[tokens]`, each `[tokens, heads, dim]`."""
        half = self.kv_heads * self.block_size
        rows = slots[:, None] + (self._heads * self.block_size + layer * 2 * half)
        shape = (len(slots), self.kv_heads, self.head_dim)
        keys, values = (self._rows.index_select(0, part.reshape(-1)).view(shape) for part in (rows, rows + half))
        return keys, values

    def pages(self, tables: torch.Tensor) -> torch.Tensor:
        """Page numbers (of layer 0) `[K|V, sequences, heads, n]` of block tables `[sequences, n]`, for `gather`."""
        halves = self._halves.view(2, 1, self.kv_heads, 1)
        return tables[None, :, None] * (self.layers * 2 * self.kv_heads) + halves

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `layer`, each `[sequences, heads, n × block_size, dim]`, contiguous."""
        _, count, heads, length = pages.shape
        numbers = pages.reshape(-1) + layer * 2 * heads
        found = self._pages.index_select(0, numbers)
        kv = found.view(2, count, heads, length * self.block_size, self.head_dim)
        return kv[0], kv[1]
