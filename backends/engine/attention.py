"""The attention function that Hugging Face models call, over our paged KV pool.

Registered through `transformers.AttentionInterface`. Queries, keys and values arrive after rotary embedding, packed
as one row of tokens from several sequences; which token belongs where stands in the current `Step`.

**Same numbers however it is cut.** A floating-point sum depends on its shape, so a prompt computed in one piece, in
chunks, behind a cached prefix or beside other requests would usually differ in the last bits, and now and then in a
token. Here it does not (measured, and checked at every load by `verify.py`), because only such shapes are used whose
rows have the same bits: keys are padded with masked slots to a number that `kernels.py` found safe, and query rows to
a multiple of `ROWS`. See docs/decisions/0002.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F

from backends.engine.kernels import ROWS, Scores, attend
from backends.engine.kv_pool import KVPool

NAME = "hitherto"


@dataclass(slots=True)
class Group:
    """Query rows that attend together: `sequences × length` packed rows, at `rows`, all to `keys` slots.

    `positions` is `[sequences, length]`, `pages` is what `KVPool.pages` says of their blocks.
    """

    rows: slice | torch.Tensor
    positions: torch.Tensor
    pages: torch.Tensor
    keys: int
    live: torch.Tensor | None = None
    """Which of the `sequences × length` rows count, where sequences of fewer rows were filled up; None: all."""
    _masks: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)

    def mask(self, group: int, window: int) -> torch.Tensor:
        """Additive mask `[sequences, 1, padded rows, keys]`; built once per step and window, used by every layer."""
        key = (group, window)
        if key not in self._masks:
            slots = torch.arange(self.keys, device=self.positions.device)
            hidden = slots > self.positions[..., None]
            if window:
                hidden |= slots <= self.positions[..., None] - window
            mask = torch.zeros(hidden.shape, device=slots.device).masked_fill_(hidden, float("-inf"))
            mask = mask.repeat(1, group, 1)  # the query heads of a group stand one below the other
            rows = mask.shape[1]
            self._masks[key] = F.pad(mask, (0, 0, 0, -rows % ROWS))[:, None]
        return self._masks[key]


@dataclass(slots=True)
class Ragged:
    """All rows of a step as sequences of different lengths, for a GPU kernel that takes them so.

    `ends_q` and `ends_k` `[sequences + 1]` (int32) are where each sequence's rows and keys end, `slots` `[keys]` where
    the keys are in the pool, `longest` the most rows and the most keys of one sequence.
    """

    ends_q: torch.Tensor
    ends_k: torch.Tensor
    slots: torch.Tensor
    longest: tuple[int, int]


@dataclass(slots=True)
class Step:
    """One forward pass: where its new KV goes and which rows attend to what."""

    pool: KVPool
    slots: torch.Tensor
    groups: list[Group]
    fused: bool
    ragged: Ragged | None = None


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
    layer = module.layer_idx
    step.pool.write(layer, step.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    queries = query[0].transpose(0, 1)  # [tokens, heads, dim]
    out = torch.zeros_like(queries)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, softcap, s_aux)
    if step.ragged is not None and scores.plain:
        return _ragged(queries, step.pool.tokens(layer, step.ragged.slots), step.ragged, sliding_window, scores)[
            None
        ], None
    for group in step.groups:
        keys, values = step.pool.gather(layer, group.pages)
        result = _attend(queries[group.rows], keys, values, group, sliding_window or 0, scores, step.fused)
        if group.live is None:
            out[group.rows] = result
        else:
            out[group.rows[group.live]] = result[group.live]  # type: ignore[index]
    return out[None], None


def _ragged(
    queries: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor],
    ragged: Ragged,
    window: int | None,
    scores: Scores,
) -> torch.Tensor:
    """One call of torch's flash attention over `queries` `[tokens, heads, dim]`; a row sees itself and what is before.

    `num_splits=1`: a row's bits do not depend on what else is in the batch (torch's documentation of `varlen_attn`).
    """
    from torch.nn.attention.varlen import varlen_attn

    result = varlen_attn(
        queries,
        *kv,
        ragged.ends_q,
        ragged.ends_k,
        *ragged.longest,
        scale=scores.scale,
        window_size=(window - 1 if window else -1, 0),
        enable_gqa=queries.shape[1] != kv[0].shape[1],
        num_splits=1,
    )
    assert isinstance(result, torch.Tensor)
    return result


def _attend(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    group: Group,
    window: int,
    scores: Scores,
    fused: bool,
) -> torch.Tensor:
    """Attention of `queries` `[sequences × length, heads, dim]`; the result has the same shape."""
    count, length = group.positions.shape
    _, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    per_kv = heads // kv_heads
    # The query heads that share a KV head become rows of one product: no copy of K and V per head.
    rows = queries.view(count, length, kv_heads, per_kv, dim).permute(0, 2, 3, 1, 4)
    rows = rows.reshape(count, kv_heads, per_kv * length, dim)
    mask = group.mask(per_kv, window)
    padding = mask.shape[2] - per_kv * length
    if padding:
        rows = F.pad(rows, (0, 0, 0, padding))
    result = attend(rows, keys, values, mask, replace(scores, length=length), fused)
    result = result[:, :, : per_kv * length].reshape(count, kv_heads, per_kv, length, dim)
    return result.permute(0, 3, 1, 2, 4).reshape(count * length, heads, dim)
