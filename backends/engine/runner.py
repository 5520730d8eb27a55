"""Runs the model over the planned chunks and returns the logits of the rows that need sampling."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from backends.engine import attention
from backends.engine.attention import Group, Ragged, Step
from backends.engine.kernels import Kernel, find_kernel
from backends.engine.kv_pool import KVPool
from backends.engine.packing import PackedLinear


@dataclass(frozen=True, slots=True)
class Piece:
    """Token ids from position `start` of a sequence whose blocks are `table`; logits of its last `wanted` rows."""

    ids: Seq[int]
    start: int
    table: list[int]
    wanted: int
    owner: object = None
    """Stands for the sequence, should something be kept for it from piece to piece."""

    @property
    def end(self) -> int:
        return self.start + len(self.ids)


@dataclass(frozen=True, slots=True)
class Stretch:
    """Packed rows from `row` on that are positions `start … end-1` of a sequence whose blocks are `table`."""

    row: int
    start: int
    end: int
    table: list[int]


SHORT = 64
"""Stretches of so many rows or fewer share a call: for longer ones, filling up costs more than calls."""


class Runner:
    """A model, its KV pool, and the packing of several sequences' tokens into one forward pass."""

    paged = True

    def __init__(self, model: Any, pool: KVPool) -> None:
        self.model = model
        self.pool = pool
        self.device = pool.data.device
        self.blocks, self.block_size, self.block_bytes = pool.blocks, pool.block_size, pool.data[0].nbytes
        on_cpu = self.device.type == "cpu"
        self.takes_ragged = not on_cpu and pool.data.dtype in (torch.bfloat16, torch.float16)
        self.safe_rows = _safe_rows(model) if on_cpu else None
        self.kernel = find_kernel(pool.head_dim, pool.data.dtype) if on_cpu else Kernel()

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
        ragged = self._ragged(pieces) if self.takes_ragged else None
        groups = self._groups(pieces)
        step = Step(self.pool, self._tensor(slots + [0] * padding), groups, self.kernel.fused, ragged)
        with attention.running(step):
            output = self.model(
                input_ids=self._tensor(ids + [0] * padding)[None],
                position_ids=self._tensor(positions + [0] * padding)[None],
                use_cache=False,
                logits_to_keep=self._tensor(wanted),
            )
        logits: torch.Tensor = output.logits[0, : len(ends)].float()
        return logits

    def forget(self) -> None:
        """Overwrite what the pool holds."""
        self.pool.data.zero_()

    def _groups(self, pieces: Seq[Piece]) -> list[Group]:
        """Rows that can share one attention call: stretches of prompts that are padded alike, and decodes."""
        lengths = self.kernel.lengths
        longest = max(piece.end for piece in pieces)
        stretches: dict[tuple[int, bool], list[Stretch]] = defaultdict(list)
        groups: list[Group] = []
        row = 0
        for piece in pieces:
            if len(piece.ids) == 1:
                # Longer than needed costs less than another call, as long as it does not change the row's bits.
                keys = lengths.padded(longest if lengths.free else piece.end)
                stretches[keys, True].append(Stretch(row, piece.start, piece.end, piece.table))
            else:
                for start, end, keys in lengths.cuts(piece.start, piece.end):
                    stretch = Stretch(row + start - piece.start, start, end, piece.table)
                    if end - start <= SHORT:
                        stretches[keys, False].append(stretch)
                    else:
                        groups.append(self._group([stretch], keys))
            row += len(piece.ids)
        return groups + [self._group(members, keys) for (keys, _), members in stretches.items()]

    def _ragged(self, pieces: Seq[Piece]) -> Ragged:
        """The same for a GPU's kernel."""
        ends_q, ends_k = (
            self._tensor([0, *accumulate(counts)]).to(torch.int32)
            for counts in ([len(piece.ids) for piece in pieces], [piece.end for piece in pieces])
        )
        slots = [slot for piece in pieces for slot in self.pool.slots(piece.table, 0, piece.end)]
        longest = max(len(piece.ids) for piece in pieces), max(piece.end for piece in pieces)
        return Ragged(ends_q, ends_k, self._tensor(slots), longest)

    def _group(self, stretches: Seq[Stretch], keys: int) -> Group:
        """Stretches as one group; the shorter ones are filled up by repeating their first row."""
        length = max(stretch.end - stretch.start for stretch in stretches)
        rows: list[int] = []
        live: list[int] = []
        positions = []
        for index, stretch in enumerate(stretches):
            count = stretch.end - stretch.start
            steps = [*range(count), *[0] * (length - count)]
            rows += [stretch.row + step for step in steps]
            live += range(index * length, index * length + count)
            positions.append([stretch.start + step for step in steps])
        return Group(
            self._tensor(rows) if len(stretches) > 1 else slice(rows[0], rows[0] + length),
            self._tensor(positions),
            self._pages([stretch.table for stretch in stretches], keys),
            keys,
            self._tensor(live) if len(live) < len(rows) else None,
        )

    def _pages(self, tables: Seq[list[int]], keys: int) -> torch.Tensor:
        length = keys // self.pool.block_size
        return self.pool.pages(self._tensor([(table + [0] * length)[:length] for table in tables]))

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
