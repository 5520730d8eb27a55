"""What the answer cache keeps in memory: facts of every entry, the bodies of the hot ones, and the size budget.

When the budget is full the entry goes that is worth least: the one with the most bytes per token saved, times the time
since it was last of use. As in Redis' approximated LRU a sample is looked at instead of an order being kept, so that a
hit costs one assignment and an entry no links.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator

from backends.protocol import Answer
from gateway.stores.contract import Entry, Known

OVERHEAD = 1000
"""Bytes that an entry costs beside its answer: facts in memory, its vector, rows in the store."""
HOT_BYTES = 64 << 20
SAMPLE = 48


class Memory:
    """Facts by key. Used by one thread."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of answers, with `OVERHEAD` for each."""
        self.bytes = 0
        self._limit = limit
        self._known: dict[bytes, Known] = {}
        self._keys: list[bytes] = []
        self._hot: OrderedDict[bytes, Entry] = OrderedDict()
        self._hot_bytes = 0
        self._chance = random.Random(0)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, key: bytes) -> bool:
        return key in self._known

    def get(self, key: bytes) -> Known | None:
        return self._known.get(key)

    def body(self, key: bytes) -> Entry | None:
        """The entry, if it is a hot one."""
        return self._hot.get(key)

    def add(self, key: bytes, known: Known, entry: Entry | None = None) -> None:
        """Take in an entry's facts, in place of an older one's under the same key, and its body if it is at hand."""
        self.remove(key)
        known.place = len(self._keys)
        self._keys.append(key)
        self._known[key] = known
        self.bytes += known.size + OVERHEAD
        if entry is not None:
            self.heat(entry)

    def heat(self, entry: Entry) -> None:
        """Keep a body at hand."""
        self._cool(entry.key)
        self._hot[entry.key] = entry
        self._hot_bytes += _weight(entry)
        while self._hot_bytes > HOT_BYTES and len(self._hot) > 1:
            self._cool(next(iter(self._hot)))

    def cool(self) -> None:
        """Keep no bodies at hand."""
        self._hot.clear()
        self._hot_bytes = 0

    def remove(self, key: bytes) -> Known | None:
        """Forget an entry; its facts, if it was known."""
        known = self._known.pop(key, None)
        if known is not None:
            self.bytes -= known.size + OVERHEAD
            last = self._keys.pop()
            if last != key:
                self._keys[known.place] = last
                self._known[last].place = known.place
        self._cool(key)
        return known

    def over(self) -> bool:
        """Whether something must go."""
        return self.bytes > self._limit and len(self._known) > 1

    def least(self, now: float) -> bytes:
        """The key of the entry that is worth least, among a sample."""
        keys = self._keys if len(self._keys) <= SAMPLE else self._chance.sample(self._keys, SAMPLE)
        return max(keys, key=lambda key: _burden(self._known[key], now))

    def dead(self, now: float) -> list[bytes]:
        """The keys of entries whose time is up."""
        return [key for key, known in self._known.items() if known.kept_until <= now]

    def items(self) -> Iterator[tuple[bytes, Known]]:
        return iter(self._known.items())

    def _cool(self, key: bytes) -> None:
        old = self._hot.pop(key, None)
        if old is not None:
            self._hot_bytes -= _weight(old)


def _weight(entry: Entry) -> int:
    return len(entry.body) + len(entry.question or "") + OVERHEAD


def _burden(known: Known, now: float) -> float:
    """What keeping an entry costs for what it may save: idle byte seconds per token."""
    if known.kept_until <= now:
        return float("inf")
    return max(now - known.used, 1e-6) * (known.size + OVERHEAD) / (known.cost + 1.0)


def cost(answer: Answer, body: bytes) -> float:
    """What an answer took to compute, in prompt tokens: most prices ask four times as much for a token of output."""
    if answer.usage is None:
        return len(body) / 4
    return answer.usage.prompt + 4.0 * answer.usage.completion
