"""The 8-bit codec: small, close, and never taken for something else."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from backends.engine.tiers.codec import Unsound
from backends.engine.tiers.int8 import Int8

SHAPE = (3, 2, 2, 16, 8)


def payload(dtype: torch.dtype, numbers: torch.Tensor) -> bytes:
    return numbers.to(dtype).contiguous().view(torch.uint8).numpy().tobytes()


def numbers(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def codec(dtype: str = "bfloat16") -> Int8:
    layers, _, heads, slots, dim = SHAPE
    return Int8(layers, heads, slots, dim, dtype)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_round_trip_is_close_and_half_as_long(dtype: str) -> None:
    kind = getattr(torch, dtype)
    original = numbers().to(kind)
    stored = codec(dtype).encode(payload(kind, original), first=False)
    back = torch.frombuffer(bytearray(codec(dtype).decode(memoryview(stored))), dtype=kind).view(SHAPE).float()
    largest = original.float().abs()
    # Half a step of 127, of the largest in the channel (keys) or the token (values), and rounding to the dtype.
    steps = torch.cat([largest[:, :1].amax(3, keepdim=True).expand(-1, -1, -1, 16, -1),
                       largest[:, 1:].amax(4, keepdim=True).expand(-1, -1, -1, -1, 8)], dim=1) / 127  # fmt: skip
    assert ((back - original.float()).abs() <= 0.51 * steps + largest / 128).all()
    if dtype == "float32":
        assert len(stored) < 0.4 * len(payload(kind, original))


def test_an_outlier_channel_of_the_keys_does_not_cost_the_others() -> None:
    original = numbers(1)
    original[:, 0, :, :, 3] *= 1000
    stored = codec("float32").encode(payload(torch.float32, original), first=False)
    back = torch.frombuffer(bytearray(codec("float32").decode(memoryview(stored))), dtype=torch.float32).view(SHAPE)
    others = [channel for channel in range(8) if channel != 3]
    assert (back - original)[:, 0][..., others].abs().max() < 0.03


def test_the_first_block_and_what_has_no_scale_stay_as_they_are() -> None:
    exact = payload(torch.bfloat16, numbers())
    assert bytes(codec().decode(memoryview(codec().encode(exact, first=True)))) == exact
    strange = numbers()
    strange[0, 0, 0, 0, 0] = float("inf")
    raw = payload(torch.bfloat16, strange)
    assert bytes(codec().decode(memoryview(codec().encode(raw, first=False)))) == raw
    zeros = payload(torch.bfloat16, torch.zeros(SHAPE))
    assert bytes(codec().decode(memoryview(codec().encode(zeros, first=False)))) == zeros


def test_bfloat16_is_rounded_as_torch_rounds_it() -> None:
    from backends.engine.tiers.int8 import _from_bfloat16, _to_bfloat16

    values = torch.cat([numbers().flatten(), torch.tensor([1.00390625, 1.01171875, -0.0, 3e38])])
    ours = _to_bfloat16(values.numpy())
    assert ours == values.bfloat16().view(torch.uint8).numpy().tobytes()
    assert np.array_equal(_from_bfloat16(ours), values.bfloat16().float().numpy())


@pytest.mark.parametrize("spoil", [lambda b: b[:-1], lambda b: b"\x07" + b[1:], lambda b: b"\x01", lambda b: b""])
def test_what_is_no_block_of_this_model_is_unsound(spoil: object) -> None:
    stored = codec().encode(payload(torch.bfloat16, numbers()), first=False)
    with pytest.raises(Unsound):
        codec().decode(memoryview(spoil(stored)))  # type: ignore[operator]
