"""KV blocks in files, one each: found again after a restart, whole or not at all."""

from __future__ import annotations

import os
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path

from backends.engine.tiers.ram import leading

_SUFFIX = ".kv"
_NAME = re.compile(r"(?P<key>[0-9a-f]{64})\.(?:kv|(?P<scratch>\d+\.tmp))")


class DiskTier:
    """A `Tier` below a folder, of at most `limit` bytes.

    A block is written to a temporary file and renamed, so that a crash leaves either all of it or nothing. Names are
    keys in hexadecimal, in 256 folders by their first byte. A file's modification time is when it was stored; the order
    of use does not survive a restart. The folder belongs to one engine at a time.
    """

    name = "disk"

    def __init__(self, folder: Path, limit: int, ttl: float, clock: Callable[[], float] = time.time) -> None:
        self._folder, self._limit, self._ttl, self._clock = folder, limit, ttl, clock
        self._blocks: OrderedDict[bytes, tuple[float, int]] = OrderedDict()
        """Least recently used first: when it was stored, and its bytes."""
        self._bytes = 0
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._scan()

    def _scan(self) -> None:
        found = []
        for path in self._folder.glob("[0-9a-f][0-9a-f]/*"):
            match = _NAME.fullmatch(path.name)
            if match is None or not path.is_file():
                continue  # not ours
            if match["scratch"]:
                path.unlink(missing_ok=True)  # left over from a crash
                continue
            facts = path.stat()
            found.append((facts.st_mtime, bytes.fromhex(match["key"]), facts.st_size))
        for used, key, size in sorted(found):
            self._blocks[key] = (used, size)
            self._bytes += size
        self._make_room(0)

    def has(self, keys: Sequence[bytes]) -> int:
        return leading(keys, self._blocks, self._clock() - self._ttl)

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        return [self._read(key) for key in keys]

    def _read(self, key: bytes) -> bytes | None:
        if not self.has([key]):
            self.delete(key)
            return None
        try:
            sealed = self._path(key).read_bytes()
        except FileNotFoundError:  # somebody cleaned up
            self._drop(key)
            return None
        self._blocks.move_to_end(key)
        return sealed

    def put(self, key: bytes, sealed: bytes) -> None:
        if len(sealed) > self._limit:
            return
        self.delete(key)
        self._make_room(len(sealed))
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        scratch = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            scratch.write_bytes(sealed)
            scratch.rename(path)
        except OSError:
            scratch.unlink(missing_ok=True)  # a full disk must not keep the half of a block
            raise
        self._blocks[key] = (self._clock(), len(sealed))
        self._bytes += len(sealed)

    def delete(self, key: bytes) -> None:
        if key in self._blocks:
            self._path(key).unlink(missing_ok=True)
            self._drop(key)

    def clear(self) -> None:
        for key in list(self._blocks):
            self.delete(key)

    @property
    def bytes_used(self) -> int:
        return self._bytes

    def close(self) -> None:
        """Nothing to do: every block is on disk already."""

    def _make_room(self, size: int) -> None:
        while self._blocks and self._bytes + size > self._limit:
            self.delete(next(iter(self._blocks)))

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._blocks.pop(key)[1]

    def _path(self, key: bytes) -> Path:
        name = key.hex()
        return self._folder / name[:2] / f"{name}{_SUFFIX}"
