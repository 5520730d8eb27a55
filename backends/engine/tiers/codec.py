"""A KV block as bytes that can be trusted when they come back: header, token ids, raw values, checksum. No pickle.

    magic "HKV1" · root 32 B · key 32 B · token count u32 · payload length u64 · crc32 u32 · ids u32 … · payload

The root covers model, weights, dtype, block size and device kind, so a block of another engine is foreign, not wrong.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

MAGIC = b"HKV1"
_HEADER = struct.Struct("<4s32s32sIQI")


class Unsound(ValueError):
    """Bytes that are not the block that was asked for: corrupt, truncated, foreign or of another version."""


def seal(root: bytes, key: bytes, tokens: Sequence[int], payload: bytes | memoryview) -> bytes:
    """The bytes of a block; `root` and `key` are 32 bytes each."""
    ids = struct.pack(f"<{len(tokens)}I", *tokens)
    check = zlib.crc32(payload, zlib.crc32(ids, zlib.crc32(root + key)))
    return b"".join([_HEADER.pack(MAGIC, root, key, len(tokens), len(payload), check), ids, payload])


def unseal(sealed: bytes, root: bytes, key: bytes, tokens: Sequence[int]) -> memoryview:
    """The payload, after everything about it was checked. Raises `Unsound`."""
    if len(sealed) < _HEADER.size:
        raise Unsound("truncated header")
    magic, its_root, its_key, count, length, check = _HEADER.unpack_from(sealed)
    if magic != MAGIC:
        raise Unsound("another format")
    if its_root != root or its_key != key:
        raise Unsound("another engine's block, or another block")
    body = memoryview(sealed)[_HEADER.size :]
    if count != len(tokens) or len(body) != 4 * count + length:
        raise Unsound("truncated")
    ids, payload = body[: 4 * count], body[4 * count :]
    if zlib.crc32(payload, zlib.crc32(ids, zlib.crc32(root + key))) != check:
        raise Unsound("checksum")
    if struct.unpack(f"<{count}I", ids) != tuple(tokens):
        raise Unsound("other tokens under the same key")
    return payload
