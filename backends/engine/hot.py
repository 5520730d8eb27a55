"""Which prefixes are reused most, as seen online. No torch."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

REMEMBERED = 512
SHOWN = 20
_PREVIEW = 24


@dataclass
class Hot:
    """A prefix: how it ends, how long it is, how often it was found."""

    tokens: int
    end: list[int]
    times: int = 0


class HotPrefixes:
    """Counts prefixes as they are found; forgets those that were not found for long. Thread-safe."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._lock = threading.Lock()
        self._found: OrderedDict[bytes, Hot] = OrderedDict()

    def found(self, key: bytes, prefix: Sequence[int]) -> None:
        """`prefix` was reused; `key` is that of its last block."""
        with self._lock:
            hot = self._found.pop(key, None) or Hot(len(prefix), list(prefix[-_PREVIEW:]))
            hot.times += 1
            self._found[key] = hot
            if len(self._found) > REMEMBERED:
                self._found.popitem(last=False)

    def report(self) -> list[dict[str, Any]]:
        """Those that saved most tokens first."""
        with self._lock:
            best = sorted(self._found.values(), key=lambda hot: -hot.times * hot.tokens)[:SHOWN]
        return [
            {"tokens": hot.tokens, "times": hot.times, "saved_tokens": hot.times * hot.tokens,
             "ends": self._decode(hot.end)} for hot in best
        ]  # fmt: skip
