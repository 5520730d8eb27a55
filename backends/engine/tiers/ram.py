"""KV blocks in this process's memory."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def leading(keys: Sequence[bytes], blocks: Mapping[bytes, tuple[float, Any]], oldest: float) -> int:
    """How many keys, from the first without a gap, are among `blocks` (whose values begin with when they were stored)
    and not older than `oldest`."""
    for count, key in enumerate(keys):
        if key not in blocks or blocks[key][0] < oldest:
            return count
    return len(keys)


class RamTier:
    """A `Tier` of at most `limit` bytes, least recently used out first; blocks older than `ttl` seconds are gone."""

    name = "ram"

    def __init__(self, limit: int, ttl: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit, self._ttl, self._clock = limit, ttl, clock
        self._blocks: OrderedDict[bytes, tuple[float, bytes]] = OrderedDict()
        self._bytes = 0

    def has(self, keys: Sequence[bytes]) -> int:
        return leading(keys, self._blocks, self._clock() - self._ttl)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        oldest = self._clock() - self._ttl
        found: list[bytes | None] = []
        for key in keys:
            block = self._blocks.get(key)
            if block is not None and block[0] < oldest:
                self.delete(key)
                block = None
            if block is not None:
                self._blocks.move_to_end(key)
            found.append(None if block is None else block[1])
        return found

    def put(self, key: bytes, sealed: bytes) -> None:
        self.delete(key)
        if len(sealed) > self._limit:
            return
        while self._bytes + len(sealed) > self._limit:  # make room first: the limit holds at every moment
            self.delete(next(iter(self._blocks)))
        self._blocks[key] = (self._clock(), sealed)
        self._bytes += len(sealed)

    def delete(self, key: bytes) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._bytes -= len(block[1])

    def clear(self) -> None:
        self._blocks.clear()
        self._bytes = 0

    @property
    def bytes_used(self) -> int:
        return self._bytes

    def close(self) -> None:
        self.clear()
