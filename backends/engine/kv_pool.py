"""Where KV lives on the device: one tensor, reserved when the engine starts."""

from __future__ import annotations

import torch


def block_bytes(layers: int, kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block: K and V of `block_size` tokens in every layer."""
    return layers * 2 * block_size * kv_heads * head_dim * dtype.itemsize


class KVPool:
    """KV of `blocks` blocks of `block_size` tokens.

    Laid out `[block, layer, K|V, slot, head, dim]`, so that a block is one contiguous piece of memory (what the lower
    tiers copy) and one layer of it is contiguous too (what attention gathers). Block 0 is the padding block.
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
        self.data = torch.zeros((blocks, layers, 2, block_size, kv_heads, head_dim), dtype=dtype, device=device)
        self._rows = self.data.view(blocks * layers * 2 * block_size, kv_heads * head_dim)
        self._pages = self.data.view(blocks * layers * 2, block_size * kv_heads * head_dim)

    def slots(self, table: list[int], start: int, end: int) -> list[int]:
        """Row numbers (for layer 0, K) where tokens `start … end-1` of a sequence with this block table go."""
        stride = self.layers * 2 * self.block_size
        return [
            table[position // self.block_size] * stride + position % self.block_size for position in range(start, end)
        ]

    def write(self, layer: int, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store `key` and `value`, each `[tokens, heads, dim]`, at `slots` `[tokens]` of `layer`."""
        offset = layer * 2 * self.block_size
        width = self.kv_heads * self.head_dim
        self._rows.index_copy_(0, slots + offset, key.reshape(-1, width))
        self._rows.index_copy_(0, slots + (offset + self.block_size), value.reshape(-1, width))

    def read_block(self, block: int) -> bytes:
        """The bytes of a block."""
        return self.data[block].view(torch.uint8).cpu().numpy().tobytes()

    def write_block(self, block: int, payload: memoryview) -> None:
        """Fill a block with bytes that `read_block` gave."""
        source = torch.frombuffer(bytearray(payload), dtype=self.data.dtype)
        self.data[block].copy_(source.view(self.data[block].shape))

    def gather(self, layer: int, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of `layer` for block tables `[sequences, n]`, each as `[sequences, heads, n × block_size, dim]`."""
        count, length = tables.shape
        pages = tables.reshape(-1) * (self.layers * 2) + layer * 2
        shape = (count, length * self.block_size, self.kv_heads, self.head_dim)
        keys = self._pages.index_select(0, pages).view(shape)
        values = self._pages.index_select(0, pages + 1).view(shape)
        return keys.transpose(1, 2), values.transpose(1, 2)
