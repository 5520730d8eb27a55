"""Proof that the engine computes what the model computes, run at every load before the first request.

Hugging Face models differ in what they pass to an attention function, and some (linear attention, recurrent state)
run through ours without an error and give wrong text. So: gate on what the config says, then compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backends.engine.runner import Piece, Runner
from backends.engine.snapshots import SnapshotRunner


class UnsupportedModel(ValueError):
    """The model would run, but not right; the text says what it has that the engine cannot do."""


def gate(config: Any) -> bool:
    """Whether a model fits the paged runner; if not, it keeps state beside KV of single tokens and needs snapshots.

    Raises `UnsupportedModel` for what is known to be silently wrong in any engine that computes requests together.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            raise UnsupportedModel(
                f"rope_type {parameters['rope_type']} makes KV depend on the length of other requests"
            )
    return set(getattr(config, "layer_types", None) or ()) <= {"full_attention", "sliding_attention"}


def kv_shape(cache: Any) -> tuple[int, int, int]:
    """(layers, KV heads, head dim) of a cache that the model itself filled. Raises `UnsupportedModel`."""
    shapes = []
    for layer in getattr(cache, "layers", [None]):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None:
            raise UnsupportedModel("a layer keeps something else than keys and values")
        shapes.append((keys.shape[1], keys.shape[-1], values.shape[1], values.shape[-1]))
    if len({*shapes, *((heads, dim, heads, dim) for heads, dim, *_ in shapes)}) > 1:
        raise UnsupportedModel("its layers keep keys and values of different shapes")
    return len(shapes), shapes[0][0], shapes[0][1]


@dataclass(frozen=True, slots=True)
class SelfTest:
    """`difference`: of the logits from the model's own; `gap`: of the same prompt computed in other pieces."""

    difference: float
    gap: float


def self_test(
    runner: Runner | SnapshotRunner, reference: torch.Tensor, prompt: list[int], dtype: torch.dtype
) -> SelfTest:
    """Compare packed, chunked, prefix-sharing passes with the model's own forward pass.

    `reference` `[tokens, vocabulary]` holds the model's logits for `prompt` by its own attention. Raises
    `UnsupportedModel` where rounding does not explain what was found.
    """
    size = runner.block_size
    count = -(-len(prompt) // size) + 1
    tables = [list(range(number * count + 1, (number + 1) * count + 1)) for number in range(2)]
    owners = [_Owner() for _ in range(4)]
    whole = runner.run([Piece(prompt, 0, tables[0], 1, owners[0])])[0]
    scale = float(reference[-1].abs().max())
    difference = float((whole - reference[-1].to(whole.device)).abs().max())
    tolerance = 2e-4 * scale if dtype == torch.float32 else 0.05 * scale
    if not difference <= tolerance:
        raise UnsupportedModel(
            f"self-test: logits differ by {difference:.3g} from the model's own (limit {tolerance:.3g})"
        )
    # The same prompt behind the first block of the first, in other pieces and beside another sequence; its last token
    # once at the end of a piece and once as a decode.
    second = tables[0][:1] + tables[1][1:]
    cut, last, company = size + (len(prompt) - size) // 2, len(prompt) - 1, tables[1][:1]
    runner.run([Piece(prompt[size:cut], size, second, 0, owners[1]), Piece(prompt[:3], 0, company, 1, owners[2])])
    runner.run([Piece(prompt[cut:last], cut, second, 0, owners[1]), Piece(prompt[3:4], 3, company, 1, owners[2])])
    beside, decoded = runner.run(
        [Piece(prompt[4:5], 4, company, 1, owners[2]), Piece(prompt[last:], last, second, 1, owners[1])]
    )
    alone = runner.run([Piece(prompt[:5], 0, company, 1, _Owner())])[0]
    runner.run([Piece(prompt[:5], 0, company, 1, owners[2])])
    *_, again = runner.run(
        [Piece(prompt[5:6], 5, company, 1, owners[2]), Piece(prompt[size:], size, second, 1, owners[3])]
    )
    pairs = ((whole, again), (whole, decoded), (alone, beside))
    gap = max(float((one - other).abs().max()) for one, other in pairs)
    if not gap <= tolerance:
        raise UnsupportedModel(f"self-test: a cached prefix changes the logits by {gap:.3g} (limit {tolerance:.3g})")
    return SelfTest(difference, gap)


class _Owner:
    """Stands for a sequence."""


def scratch_blocks(prompt_length: int, block_size: int) -> int:
    """Blocks that `self_test` needs."""
    return 2 * (-(-prompt_length // block_size) + 1) + 1
