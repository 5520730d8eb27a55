"""The attention function that Hugging Face models call, over our paged KV pool.

Registered through `transformers.AttentionInterface`. Queries, keys and values arrive after rotary embedding, packed
as one row of tokens from several sequences; which token belongs where stands in the current `Step`.

**Same numbers however it is cut.** A floating-point sum depends on its shape, so a prompt computed in one piece, in
chunks, behind a cached prefix or beside other requests would usually differ in the last bits, and now and then in a
token. Here it does not (measured, and checked at every load by `verify.py`), because the shape a row sees depends on
nothing but its own position: its keys are always padded with masked slots to the next multiple of `SPAN`, and query
rows to a multiple of `ROWS`, below which matrix products switch to other kernels. See docs/decisions/0002.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from backends.engine.kv_pool import KVPool

NAME = "hitherto"
SPAN = 256
ROWS = 4


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(slots=True)
class Group:
    """Query rows that attend together: `sequences × length` packed rows, at `rows`, all in one span of positions.

    `positions` is `[sequences, length]`, `tables` `[sequences, span / block_size]` padded with block 0.
    """

    rows: slice | torch.Tensor
    positions: torch.Tensor
    tables: torch.Tensor
    span: int
    _masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, group: int, window: int, dtype: torch.dtype) -> torch.Tensor:
        """Additive mask `[sequences, 1, padded rows, span]`; built once per step and window, used by every layer."""
        key = (group, window)
        if key not in self._masks:
            slots = torch.arange(self.span, device=self.positions.device)
            hidden = slots > self.positions[..., None]
            if window:
                hidden |= slots <= self.positions[..., None] - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=slots.device).masked_fill_(hidden, float("-inf"))
            mask = mask.repeat(1, group, 1)  # the query heads of a group stand one below the other
            rows = mask.shape[1]
            self._masks[key] = F.pad(mask, (0, 0, 0, round_up(rows, ROWS) - rows))[:, None]
        return self._masks[key]


@dataclass(slots=True)
class Step:
    """One forward pass: where its new KV goes and which rows attend to what."""

    pool: KVPool
    slots: torch.Tensor
    groups: list[Group]


# One engine thread runs one forward pass at a time. A module variable, and not a keyword argument, because several
# Hugging Face models do not hand unknown keyword arguments down to their attention layers.
_current: Step | None = None


class running:
    """`with running(step): model(...)`"""

    def __init__(self, step: Step) -> None:
        self.step = step

    def __enter__(self) -> None:
        global _current
        _current = self.step

    def __exit__(self, *exc: object) -> None:
        global _current
        _current = None


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """The hook: `query` `[1, heads, tokens, dim]`, `key` and `value` with `kv heads` → `[1, tokens, heads, dim]`."""
    step = _current
    if step is None:
        raise RuntimeError("the engine's attention was called outside of an engine step")
    if softcap is not None or s_aux is not None:
        raise NotImplementedError("attention with soft-capping or sinks is not supported by the built-in engine")
    layer = module.layer_idx
    step.pool.write(layer, step.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    queries = query[0].transpose(0, 1)  # [tokens, heads, dim]
    out = torch.zeros_like(queries)
    for group in step.groups:
        keys, values = step.pool.gather(layer, group.tables)
        out[group.rows] = _attend(queries[group.rows], keys, values, group, sliding_window or 0, scaling)
    return out[None], None


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: Group, window: int, scaling: float | None
) -> torch.Tensor:
    """Attention of `queries` `[sequences × length, heads, dim]`; the result has the same shape."""
    count, length = group.positions.shape
    _, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    per_kv = heads // kv_heads
    # The query heads that share a KV head become rows of one product: no copy of K and V per head.
    rows = queries.view(count, length, kv_heads, per_kv, dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(count, kv_heads, per_kv * length, dim)
    mask = group.mask(per_kv, window, queries.dtype)
    padding = mask.shape[2] - per_kv * length
    if padding:
        rows = F.pad(rows, (0, 0, 0, padding))
    result = F.scaled_dot_product_attention(
        rows, keys, values, attn_mask=mask.expand(count, kv_heads, -1, -1), scale=scaling
    )
    result = result[:, :, : per_kv * length].reshape(count, kv_heads, per_kv, length, dim)
    return result.permute(0, 3, 1, 2, 4).reshape(count * length, heads, dim)
