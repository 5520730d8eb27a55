"""The accounts of the KV block pool: who holds a block, what it contains, which one goes next. No torch.

A block is in exactly one of three states, and `free + cached + used == total` holds after every call:

- *free*: holds nothing of value;
- *used*: referenced by at least one running sequence;
- *cached*: referenced by nobody, but its content is known by a key and can be found again.

Block 0 is never handed out: it is where padding rows write and what padded block tables point to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class BlockPool:
    """Reference counts, keys and LRU order for `total` usable blocks (ids 1 … total)."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a block pool needs at least one block, not {total}")
        self.total = total
        self.evictions = 0
        self._free = list(range(total, 0, -1))  # popped from the end: low ids first
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._refs = [0] * (total + 1)
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._tokens_of: dict[int, tuple[int, ...]] = {}

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    def in_use(self, block: int) -> bool:
        return self._refs[block] > 0

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, evicting the least recently used; None, and no change, if too few."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = self._cached.popitem(last=False)
                self._forget(block)
                self.evictions += 1
            self._refs[block] = 1
            blocks.append(block)
        return blocks

    def find(self, key: bytes, tokens: Sequence[int]) -> int | None:
        """The block published under `key`, if it really holds these token ids (a hash is never trusted alone)."""
        block = self._by_key.get(key)
        if block is None or self._tokens_of[block] != tuple(tokens):
            return None
        return block

    def retain(self, blocks: Iterable[int]) -> None:
        """One more reference for each block."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._cached[block]  # KeyError here would mean a block that was never published
            self._refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference each. Tails are released first, so that they are evicted before their heads."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] < 0:
                raise AssertionError(f"block {block} was released more often than retained")
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def publish(self, block: int, key: bytes, tokens: Sequence[int]) -> None:
        """Make the content of a used block findable; call only when its forward pass is done.

        If another block already holds the same content, that one stays the findable one.
        """
        if self._refs[block] == 0:
            raise AssertionError(f"block {block} is not in use")
        if key in self._by_key or block in self._key_of:
            return
        self._by_key[key] = block
        self._key_of[block] = key
        self._tokens_of[block] = tuple(tokens)

    def drop_cached(self) -> int:
        """Forget all content (after a reload of the weights, or on demand); how many blocks became free."""
        dropped = list(self._cached)
        for block in dropped:
            self._forget(block)
            self._free.append(block)
        self._cached.clear()
        for block in list(self._key_of):  # still in use: they become free when released
            self._forget(block)
        return len(dropped)

    def _forget(self, block: int) -> None:
        del self._by_key[self._key_of.pop(block)]
        del self._tokens_of[block]

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts do not add up."""
        used = {block for block in range(1, self.total + 1) if self._refs[block] > 0}
        free, cached = set(self._free), set(self._cached)
        if len(free) != len(self._free) or len(free) + len(cached) + len(used) != self.total:
            raise AssertionError(f"free {len(free)} + cached {len(cached)} + used {len(used)} != {self.total}")
        if free & cached or free & used or cached & used:
            raise AssertionError("a block is in two states")
        if not cached <= set(self._key_of) or free & set(self._key_of):
            raise AssertionError("a cached block without a key, or a free one with a key")
        if {key: block for block, key in self._key_of.items()} != self._by_key or set(self._tokens_of) != set(
            self._key_of
        ):
            raise AssertionError("keys and blocks do not match")
