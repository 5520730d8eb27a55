"""Linear layers with their weights laid out once for the CPU's matrix kernels, instead of at every call.

oneDNN reorders a plain bfloat16 weight on each call; for the few rows of a decode step that costs as much as the
product (the head over the vocabulary: 2.5 ms plain, 0.7 ms packed). And layers that read the same input (queries, keys
and values; gate and up) become one product: a decode step's products are so small that starting them counts. The result
has the same bits. The operators are those that torch's own inductor uses; where they are missing or differ, layers stay
as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

ROWS = 64
"""The row count that the layout is made for; measured, it serves 1 to 256 rows equally well."""
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Children of one module that are always called with the same input, in this order, by every model that has them."""


class PackedLinear(torch.nn.Module):
    """A `torch.nn.Linear` over a packed bfloat16 weight; inference only."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return result


class _Shared:
    """One product for several layers, computed when the first of them is called."""

    def __init__(self, whole: PackedLinear) -> None:
        self.whole = whole
        self._input: torch.Tensor | None = None
        self._output: torch.Tensor | None = None

    def of(self, rows: torch.Tensor, last: bool) -> torch.Tensor:
        if self._input is not rows or self._output is None:
            self._input, self._output = rows, self.whole(rows)
        output = self._output
        if last:
            self._input = self._output = None
        return output


class SharedLinear(torch.nn.Module):
    """Columns `start … end-1` of a product that it shares with its siblings."""

    def __init__(self, shared: _Shared, start: int, end: int, last: bool) -> None:
        super().__init__()
        self._shared, self._start, self._end, self._last = shared, start, end, last
        if start == 0:
            self.whole = shared.whole  # so that it is found among the model's modules

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._shared.of(rows, self._last)[..., self._start : self._end]


@torch.inference_mode()
def pack(model: Any) -> int:
    """Replace the linear layers of a bfloat16 model on the CPU; how many were replaced."""
    replaced = 0
    try:
        for parent in list(model.modules()):
            children = dict(parent.named_children())
            for names in TOGETHER:
                siblings = [children[name] for name in names if name in children]
                if len(siblings) == len(names) and all(map(_is_plain, siblings)):
                    replaced += _replace(parent, names, siblings)
            for name, layer in parent.named_children():
                if _is_plain(layer):
                    replaced += _replace(parent, [name], [layer])
    except (AttributeError, RuntimeError):  # an operator that this build of torch does not have
        pass
    return replaced


def _is_plain(layer: torch.nn.Module) -> bool:
    return type(layer) is torch.nn.Linear and layer.weight.dtype == torch.bfloat16


def _replace(parent: torch.nn.Module, names: Sequence[str], layers: Sequence[Any]) -> int:
    """Put packed layers in the place of these; 0 if they would not compute the same."""
    if len({layer.bias is None for layer in layers}) > 1:
        return 0
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    shared = _Shared(PackedLinear(torch.cat([layer.weight for layer in layers]), bias))
    if not _same(layers, shared.whole):
        return 0
    start = 0
    for name, layer in zip(names, layers, strict=True):
        end = start + layer.out_features
        last = name == names[-1]
        setattr(parent, name, shared.whole if len(names) == 1 else SharedLinear(shared, start, end, last))
        start = end
    return len(names)


def _same(layers: Sequence[Any], packed: PackedLinear) -> bool:
    rows = torch.randn((1, 8, packed.in_features), generator=torch.Generator().manual_seed(0)).bfloat16()
    return torch.equal(torch.cat([layer(rows) for layer in layers], dim=-1), packed(rows))
