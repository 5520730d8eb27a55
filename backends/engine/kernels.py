"""Attention over gathered keys and values, and which of its shapes give a row the same bits (docs/decisions/0002)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

ROWS = 4
"""Query rows come in multiples of this; with fewer, matrix products switch to other kernels."""
PERIOD = 512
"""Keys that torch's fused CPU kernel takes at a time."""
TILE = 128
"""Query positions of a prompt that are computed together: fewer waste less on masked keys, more need fewer calls."""
_STEP = 64


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores become weights: `scale × q·k`, soft-capped by `cap × tanh(score / cap)` where there is a `softcap`
    (Gemma 2), beside `sinks` `[heads]` where there are any: logits of a key that is nowhere (GPT-OSS)."""

    scale: float
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    length: int = 1
    """Rows of one head that stand together."""

    @property
    def plain(self) -> bool:
        return self.softcap is None and self.sinks is None


def attend(
    rows: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scores: Scores, fused: bool
) -> torch.Tensor:
    """`rows` `[sequences, kv heads, rows, dim]`, `keys` and `values` `[sequences, kv heads, keys, dim]`, `mask`
    `[sequences, 1, rows, keys]` (additive, float32) → the shape of `rows`.

    `fused` asks for torch's own kernel. In bfloat16 on a CPU spelling it out takes half the time, since that goes to
    oneDNN's products and the fused kernel does not; scores are rounded to bfloat16 on the way, as in the models' own
    "eager" attention (KL to float32 0.0016 a token instead of 0.0015).
    """
    if fused and scores.plain:
        spread = mask.to(rows.dtype).expand(-1, keys.shape[1], -1, -1)
        return F.scaled_dot_product_attention(rows, keys, values, attn_mask=spread, scale=scores.scale)
    products = torch.matmul(rows, keys.transpose(2, 3))
    if scores.softcap is None:
        weighed = torch.add(mask, products, alpha=scores.scale)
    else:
        weighed = scores.softcap * torch.tanh(products.float() * (scores.scale / scores.softcap)) + mask
    if scores.sinks is None:
        return torch.matmul(torch.softmax(weighed, dim=-1).to(values.dtype), values)
    weights = torch.softmax(torch.cat([weighed, _sink_column(weighed, scores)], dim=-1), dim=-1)
    return torch.matmul(weights[..., :-1].to(values.dtype), values)


def _sink_column(weighed: torch.Tensor, scores: Scores) -> torch.Tensor:
    """The sink of each row's head as one more key; the `length` rows of one head stand together, padding behind all."""
    assert scores.sinks is not None
    count, kv_heads, rows, _ = weighed.shape
    column = scores.sinks.float().view(kv_heads, -1, 1).expand(-1, -1, scores.length).reshape(kv_heads, -1)
    return F.pad(column, (0, rows - column.shape[1]))[None, :, :, None].expand(count, -1, -1, 1)


class KeyLengths:
    """To how many keys the keys of a row are padded.

    `tails` are the lengths of a last, partial `PERIOD` of keys at which a row has the same bits as with a whole one;
    the last is `PERIOD` itself. `free`: a row's bits do not change with more periods of masked keys either, so that
    rows of different positions may share a call.
    """

    def __init__(self, tails: Sequence[int] = (PERIOD,), free: bool = False) -> None:
        self.tails, self.free = tuple(tails), free

    def padded(self, keys: int) -> int:
        whole, rest = divmod(keys - 1, PERIOD)
        return whole * PERIOD + next(tail for tail in self.tails if tail > rest)

    def cuts(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Positions `start … end-1` in pieces that are padded alike: (first, end, keys)."""
        while start < end:
            last = start - start % TILE + TILE
            yield start, min(end, last), self.padded(last)
            start = last


@dataclass(frozen=True, slots=True)
class Kernel:
    """The kernel to use, and its safe lengths."""

    fused: bool = True
    lengths: KeyLengths = field(default_factory=KeyLengths)


@torch.inference_mode()
def find_kernel(head_dim: int, dtype: torch.dtype) -> Kernel:
    """Look which kernel is fast and keeps its bits on this CPU, and at which lengths."""
    fastest = dtype == torch.float32
    good = (fused for fused in (fastest, not fastest) if _Probe(head_dim, dtype, fused).rows_are_independent())
    fused = next(good, fastest)
    return Kernel(fused, _Probe(head_dim, dtype, fused).lengths())


class _Probe:
    """Random queries against random keys, of which a few at the end are masked."""

    def __init__(self, head_dim: int, dtype: torch.dtype, fused: bool) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn((*shape, head_dim), generator=generator).to(dtype)

        self._fused = fused
        self._keys, self._values = random(4, 2, 2 * PERIOD), random(4, 2, 2 * PERIOD)
        self._queries = random(4, 2, 192)

    def _attend(self, sequences: int, rows: int, valid: int, length: int) -> torch.Tensor:
        mask = torch.zeros((sequences, 1, rows, length))
        mask[..., valid:] = float("-inf")
        keys, values = self._keys[:sequences, :, :length], self._values[:sequences, :, :length]
        queries = self._queries[:sequences, :, :rows]
        return attend(queries, keys.contiguous(), values.contiguous(), mask, Scores(0.125), self._fused)

    def rows_are_independent(self) -> bool:
        """Of how many there are, and of how many sequences."""
        for length in (_STEP, PERIOD):
            many = self._attend(4, 192, length, length)
            for sequences in (1, 2, 3):
                for rows in range(ROWS, 193, ROWS):
                    if not torch.equal(self._attend(sequences, rows, length, length), many[:sequences, :, :rows]):
                        return False
        return True

    def lengths(self) -> KeyLengths:
        """On the machine this was written on, all multiples of 64 for products, and all but 256 and 320 when fused."""

        def same(valid: int, length: int, other: int) -> bool:
            shapes = ((1, ROWS), (4, 3 * ROWS), (1, 64), (2, 192))
            return all(
                torch.equal(self._attend(*shape, valid, length), self._attend(*shape, valid, other)) for shape in shapes
            )

        tails = [
            tail
            for tail in range(_STEP, PERIOD, _STEP)
            if all(same(valid, tail, PERIOD) for valid in (tail - _STEP + 1, tail - _STEP // 2, tail))
        ]
        longer = [PERIOD + tail for tail in (*tails, PERIOD)]
        free = all(same(valid, PERIOD, length) for valid in (1, 100, 300, PERIOD) for length in longer)
        return KeyLengths([*tails, PERIOD], free)
