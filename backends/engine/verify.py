"""Proof that the engine computes what the model computes, run at every load before the first request.

Hugging Face models differ in what they pass to an attention function, and some (linear attention, recurrent state)
run through ours without an error and give wrong text. So: gate on what the config says, then compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from backends.engine.kv_pool import KVPool
from backends.engine.runner import Piece, Runner


class UnsupportedModel(ValueError):
    """The model would run, but not right; the text says what it has that the engine cannot do."""


def gate(config: Any) -> None:
    """Refuse what is known to be silently wrong in a paged engine."""
    kinds = set(getattr(config, "layer_types", None) or ())
    if strange := kinds - {"full_attention", "sliding_attention"}:
        raise UnsupportedModel(
            f"layers of type {', '.join(sorted(strange))} keep state that is not KV of single tokens"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    for parameters in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if parameters.get("rope_type") in ("dynamic", "longrope"):
            raise UnsupportedModel(
                f"rope_type {parameters['rope_type']} makes KV depend on the length of other requests"
            )


def kv_shape(cache: Any) -> tuple[int, int, int]:
    """(layers, KV heads, head dim) of a cache that the model itself filled. Raises `UnsupportedModel`."""
    shapes = []
    for layer in cache.layers:
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


def self_test(runner: Runner, reference: torch.Tensor, prompt: list[int], dtype: torch.dtype) -> SelfTest:
    """Compare packed, chunked, prefix-sharing passes with the model's own forward pass.

    `reference` `[tokens, vocabulary]` holds the model's logits for `prompt` by its own attention. Raises
    `UnsupportedModel` where rounding does not explain what was found.
    """
    size = runner.pool.block_size
    blocks = -(-len(prompt) // size) + 1
    mine, other = list(range(1, blocks + 1)), list(range(blocks + 1, 2 * blocks + 1))
    whole = runner.run([Piece(prompt, 0, mine, 1)])[0]
    scale = float(reference[-1].abs().max())
    difference = float((whole - reference[-1].to(whole.device)).abs().max())
    tolerance = 2e-4 * scale if dtype == torch.float32 else 0.05 * scale
    if not difference <= tolerance:
        raise UnsupportedModel(
            f"self-test: logits differ by {difference:.3g} from the model's own (limit {tolerance:.3g})"
        )
    # The same prompt again in other pieces, behind a shared first block and beside another sequence.
    shared = mine[:1] + other[1:]
    cut = size + (len(prompt) - size) // 2
    runner.run([Piece(prompt[size:cut], size, shared, 0), Piece(prompt[:3], 0, other[:1], 1)])
    *_, again = runner.run([Piece(prompt[:5], 0, other[:1], 1), Piece(prompt[cut:], cut, shared, 1)])
    last = len(prompt) - 1  # and that token as a decode, beside one of another length
    *_, decoded = runner.run([Piece(prompt[2:3], 2, other[:1], 1), Piece(prompt[last:], last, shared, 1)])
    gap = max(float((whole - other).abs().max()) for other in (again, decoded))
    if not gap <= tolerance:
        raise UnsupportedModel(f"self-test: a cached prefix changes the logits by {gap:.3g} (limit {tolerance:.3g})")
    return SelfTest(difference, gap)


def scratch_blocks(prompt_length: int, pool: KVPool) -> int:
    """Blocks that `self_test` needs."""
    return 2 * (-(-prompt_length // pool.block_size) + 1) + 1
