"""KV in lower tiers as 8-bit integers: about half the bytes, and no longer the same bits. Opt-in. No torch.

Keys are scaled per channel and values per token, since keys have outlier channels and values do not (KIVI, Liu et al.
2024). The first block of a prompt stays as it is: the attention sinks there weigh most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from backends.engine.tiers.codec import Unsound

_RAW, _INT8 = b"\0", b"\1"
Floats = NDArray[np.float32]


class Codec(Protocol):
    """How a block's bytes stand in the lower tiers."""

    name: str

    def encode(self, payload: bytes, first: bool) -> bytes:
        """The bytes to store; `first`: the block is the beginning of a prompt."""
        ...

    def decode(self, stored: memoryview) -> memoryview:
        """The block's bytes. Raises `Unsound`."""
        ...


class Raw:
    """As it is."""

    name = "raw"

    def encode(self, payload: bytes, first: bool) -> bytes:
        return payload

    def decode(self, stored: memoryview) -> memoryview:
        return stored


class Int8:
    """For blocks of `layers × 2 × heads × slots × dim` numbers of `dtype`: `bfloat16`, `float16` or `float32`."""

    name = "int8"

    def __init__(self, layers: int, heads: int, slots: int, dim: int, dtype: str) -> None:
        self._shape = (layers, 2, heads, slots, dim)
        self._to_floats, self._from_floats = _CONVERSIONS[dtype]
        self._count = layers * 2 * heads * slots * dim
        self._key_scales = (layers, heads, 1, dim)
        self._value_scales = (layers, heads, slots, 1)

    def encode(self, payload: bytes, first: bool) -> bytes:
        numbers = self._to_floats(payload).reshape(self._shape)
        if first or not np.isfinite(numbers).all():
            return _RAW + payload
        keys, values = numbers[:, 0], numbers[:, 1]
        key_scales, value_scales = _scales(keys, axis=2), _scales(values, axis=3)
        whole = np.stack([_rounded(keys, key_scales), _rounded(values, value_scales)], axis=1)
        return b"".join([_INT8, key_scales.tobytes(), value_scales.tobytes(), whole.tobytes()])

    def decode(self, stored: memoryview) -> memoryview:
        kind, body = bytes(stored[:1]), stored[1:]
        if kind == _RAW:
            return body
        sizes = [2 * int(np.prod(shape)) for shape in (self._key_scales, self._value_scales)]
        if kind != _INT8 or len(body) != sum(sizes) + self._count:
            raise Unsound("not an int8 block of this model")
        key_scales = np.frombuffer(body[: sizes[0]], np.float16).reshape(self._key_scales).astype(np.float32)
        value_scales = np.frombuffer(body[sizes[0] : sum(sizes)], np.float16).reshape(self._value_scales)
        whole = np.frombuffer(body[sum(sizes) :], np.int8).reshape(self._shape).astype(np.float32)
        whole[:, 0] *= key_scales
        whole[:, 1] *= value_scales.astype(np.float32)
        return memoryview(self._from_floats(whole))


def _scales(numbers: Floats, axis: int) -> NDArray[np.float16]:
    """What one step of 127 is worth. Rounded to float16 before it is used, so that both ends use the same."""
    largest = np.abs(numbers).max(axis=axis, keepdims=True) / 127
    scales: NDArray[np.float16] = np.maximum(largest, 6e-8).astype(np.float16)
    return scales


def _rounded(numbers: Floats, scales: NDArray[np.float16]) -> NDArray[np.int8]:
    return np.clip(np.rint(numbers / scales.astype(np.float32)), -127, 127).astype(np.int8)


def _from_bfloat16(payload: bytes) -> Floats:
    return (np.frombuffer(payload, np.uint16).astype(np.uint32) << 16).view(np.float32)


def _to_bfloat16(numbers: Floats) -> bytes:
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).tobytes()  # to nearest, ties to even


_CONVERSIONS: dict[str, tuple[Callable[[bytes], Floats], Callable[[Floats], bytes]]] = {
    "bfloat16": (_from_bfloat16, _to_bfloat16),
    "float16": (
        lambda payload: np.frombuffer(payload, np.float16).astype(np.float32),
        lambda numbers: numbers.astype(np.float16).tobytes(),
    ),
    "float32": (lambda payload: np.frombuffer(payload, np.float32), lambda numbers: numbers.tobytes()),
}
