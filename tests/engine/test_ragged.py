"""What is handed to a GPU's kernel, checked on the CPU: the same logits by a plain reading of its documentation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from backends.engine.config import EngineConfig, KVConfig
from backends.engine.load import load
from backends.engine.runner import Piece
from tests.engine.test_models import WINDOW, build


def by_the_book(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor,
    max_q: int, max_k: int, *, scale: float, window_size: tuple[int, int], enable_gqa: bool, num_splits: int,
) -> torch.Tensor:  # fmt: skip
    """`varlen_attn` as documented: sequences in a row, queries aligned with the last keys, a window to the left."""
    assert ends_q.dtype == ends_k.dtype == torch.int32 and window_size[1] == 0 and num_splits == 1
    out = torch.empty_like(query)
    for number in range(len(ends_q) - 1):
        q = query[ends_q[number] : ends_q[number + 1]].transpose(0, 1)
        k, v = (part[ends_k[number] : ends_k[number + 1]].transpose(0, 1) for part in (key, value))
        rows, keys = q.shape[1], k.shape[1]
        assert rows <= max_q and keys <= max_k
        position = torch.arange(keys - rows, keys)[:, None] - torch.arange(keys)[None]
        seen = (position >= 0) & ((position <= window_size[0]) if window_size[0] >= 0 else True)
        out[ends_q[number] : ends_q[number + 1]] = torch.nn.functional.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=seen, scale=scale, enable_gqa=enable_gqa
        )[0].transpose(0, 1)
    return out


@pytest.mark.parametrize(
    ("kind", "extra"), [("llama", {}), ("mistral", WINDOW), ("gpt_neox", {"num_key_value_heads": None})]
)
def test_a_gpu_is_handed_the_same_rows_keys_and_windows(
    kind: str, extra: dict[str, Any], model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.nn.attention.varlen as varlen

    folder = build(kind, extra, model_folder, tmp_path / kind)
    config = EngineConfig(model=str(folder), dtype="float32", kv=KVConfig(device=16 << 20))  # type: ignore[arg-type]
    runner: Any = load(config, folder, lambda line: None).runner
    prompt = [7 * number % 290 + 3 for number in range(150)]
    first, second = list(range(1, 12)), [1, 2, *range(12, 22)]
    steps = [
        [Piece(prompt[:100], 0, first, 1), Piece(prompt[:3], 0, [30], 1)],
        [Piece(prompt[100:], 100, first, 2), Piece(prompt[3:4], 3, [30], 1), Piece(prompt[32:90], 32, second, 1)],
    ]
    plain = [runner.run(pieces) for pieces in steps]
    monkeypatch.setattr(varlen, "varlen_attn", by_the_book)
    runner.takes_ragged = True
    ragged = [runner.run(pieces) for pieces in steps]
    for one, other in zip(plain, ragged, strict=True):
        assert torch.allclose(one, other, atol=1e-4)
