"""Runs the model over the planned chunks and returns the logits of the rows that need sampling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from backends.engine import attention
from backends.engine.attention import SPAN, Group, Step, round_up
from backends.engine.kv_pool import KVPool
from backends.engine.packing import PackedLinear


@dataclass(frozen=True, slots=True)
class Piece:
    """Token ids from position `start` of a sequence whose blocks are `table`; logits of its last `wanted` rows."""

    ids: Seq[int]
    start: int
    table: list[int]
    wanted: int

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


class Runner:
    """A model, its KV pool, and the packing of several sequences' tokens into one forward pass."""

    def __init__(self, model: Any, pool: KVPool) -> None:
        self.model = model
        self.pool = pool
        self.device = pool.data.device
        self.safe_rows = _safe_rows(model) if self.device.type == "cpu" else None

    @torch.inference_mode()
    def run(self, pieces: Seq[Piece]) -> torch.Tensor:
        """Logits `[sum of wanted rows, vocabulary]`, float32, in the order of the pieces."""
        ids = [token for piece in pieces for token in piece.ids]
        positions = [position for piece in pieces for position in range(piece.start, piece.end)]
        slots = [slot for piece in pieces for slot in self.pool.slots(piece.table, piece.start, piece.end)]
        ends: list[int] = []
        row = 0
        for piece in pieces:
            row += len(piece.ids)
            ends += range(row - piece.wanted, row)
        padding = self._padded(len(ids)) - len(ids)
        wanted = ends + [ends[-1]] * (self._padded(len(ends)) - len(ends)) if ends else [0]
        # Padding rows write to block 0 and belong to no group, so nobody sees them.
        step = Step(self.pool, self._tensor(slots + [0] * padding), self._groups(pieces))
        with attention.running(step):
            output = self.model(
                input_ids=self._tensor(ids + [0] * padding)[None],
                position_ids=self._tensor(positions + [0] * padding)[None],
                use_cache=False,
                logits_to_keep=self._tensor(wanted),
            )
        logits: torch.Tensor = output.logits[0, : len(ends)].float()
        return logits

    def _groups(self, pieces: Seq[Piece]) -> list[Group]:
        """Rows that can share one attention call: each stretch of a prompt within a span, and all decodes of a span."""
        groups: list[Group] = []
        decodes: dict[int, list[tuple[int, int, list[int]]]] = defaultdict(list)
        row = 0
        for piece in pieces:
            if len(piece.ids) == 1:
                decodes[round_up(piece.end, SPAN)].append((row, piece.start, piece.table))
            else:
                start = piece.start
                while start < piece.end:
                    span = round_up(start + 1, SPAN)
                    end = min(piece.end, span)
                    offset = row + start - piece.start
                    positions = torch.arange(start, end, device=self.device)[None]
                    groups.append(
                        Group(slice(offset, offset + end - start), positions, self._tables([piece.table], span), span)
                    )
                    start = end
            row += len(piece.ids)
        for span, members in decodes.items():
            positions = self._tensor([start for _, start, _ in members])[:, None]
            tables = self._tables([table for *_, table in members], span)
            groups.append(Group(self._tensor([row for row, *_ in members]), positions, tables, span))
        return groups

    def _tables(self, tables: Seq[list[int]], span: int) -> torch.Tensor:
        length = span // self.pool.block_size
        return self._tensor([(table + [0] * length)[:length] for table in tables])

    def _tensor(self, values: Seq[Any]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _padded(self, rows: int) -> int:
        """The next row count at which a matrix product gives each row the same bits as in a large one."""
        if self.safe_rows is None:
            return rows
        while rows < len(self.safe_rows) and not self.safe_rows[rows]:
            rows += 1
        return rows


@torch.inference_mode()
def _safe_rows(model: Any) -> list[bool]:
    """For n = 0 … 31 rows: do this model's linear layers give each row the same bits among n rows as among many?

    Small products run on other kernels on some processors (AVX512 here: float32 differs at 1–3, 5–7 and 9–11 rows,
    bfloat16 at 1). Measured once at load, on one layer of each shape, for every place a row can have.
    """
    limit, rows = 32, 256
    safe = [True] * limit
    linear = [module for module in model.modules() if isinstance(module, torch.nn.Linear | PackedLinear)]
    layers = {(module.in_features, module.out_features): module for module in linear}
    generator = torch.Generator().manual_seed(0)
    for layer in layers.values():
        if layer.out_features > 8 * layer.in_features and len(layers) > 1:
            continue  # the head over the vocabulary: large, and the same kernels as the others
        inputs = torch.randn((1, rows, layer.in_features), generator=generator).to(model.dtype)
        reference = layer(inputs)
        for count in range(1, limit):
            starts = range(0, rows - count + 1, count)
            safe[count] = safe[count] and all(
                torch.equal(layer(inputs[:, start : start + count]), reference[:, start : start + count])
                for start in starts
            )
    return safe
