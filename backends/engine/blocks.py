"""The accounts of the KV block pool: who holds a block, what it contains, which one goes next. No torch, no clock.

A block is in exactly one of three states, and `free + cached + used == total` holds after every call:

- *free*: holds nothing of value;
- *used*: referenced by at least one running sequence;
- *cached*: referenced by nobody, but its content is known by a key and can be found again.

Cached blocks give way in the order of a segmented LRU (Karedla, Love and Wherry 1994): first those that were never
found again, so that a flood of single prompts does not wash out what many share; then those that were; pinned last.

Block 0 is never handed out: it is where padding rows write and what padded block tables point to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain

HITS_TO_KEEP = 2
"""Finds after which a block counts as shared."""


class BlockPool:
    """Reference counts, keys and eviction order for `total` usable blocks (ids 1 … total)."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a block pool needs at least one block, not {total}")
        self.total = total
        self.evictions = 0
        self.now = 0.0
        """What the owner's clock says; blocks remember it when they are released."""
        self._free = list(range(total, 0, -1))  # popped from the end: low ids first
        # Least recently used first, with when that was. In the order in which they give way.
        self._once: OrderedDict[int, float] = OrderedDict()
        self._shared: OrderedDict[int, float] = OrderedDict()
        self._pinned: OrderedDict[int, float] = OrderedDict()
        self._segments = (self._once, self._shared, self._pinned)
        self._most_shared = total * 3 // 4
        self._refs = [0] * (total + 1)
        self._hits = [0] * (total + 1)
        self._key_of: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        self._tokens_of: dict[int, tuple[int, ...]] = {}
        self._pins: set[bytes] = set()

    @property
    def available(self) -> int:
        """Blocks that `allocate` could hand out now."""
        return len(self._free) + self.cached

    @property
    def cached(self) -> int:
        return sum(map(len, self._segments))

    @property
    def pinned(self) -> int:
        """Keys that are pinned, here or not."""
        return len(self._pins)

    def pinned_with(self, keys: Iterable[bytes]) -> int:
        """Keys that would be pinned if these were, too."""
        return len(self._pins.union(keys))

    def in_use(self, block: int) -> bool:
        return self._refs[block] > 0

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, evicting others where needed; None, and no change, if too few."""
        if count > self.available:
            return None
        blocks = []
        for _ in range(count):
            if self._free:
                block = self._free.pop()
            else:
                block, _ = next(segment for segment in self._segments if segment).popitem(last=False)
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
        """One more reference for each block, which was found by its key."""
        for block in blocks:
            if self._refs[block] == 0:
                del self._segment(block)[block]  # KeyError here would mean a block that was never published
            self._refs[block] += 1
            self._hits[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give back one reference each. Tails are released first, so that they are evicted before their heads."""
        for block in reversed(blocks):
            self._refs[block] -= 1
            if self._refs[block] < 0:
                raise AssertionError(f"block {block} was released more often than retained")
            if self._refs[block] == 0:
                if block in self._key_of:
                    self._keep(block)
                else:
                    self._free.append(block)

    def _keep(self, block: int) -> None:
        if self._key_of[block] in self._pins:
            self._pinned[block] = self.now
        elif self._hits[block] < HITS_TO_KEEP:
            self._once[block] = self.now
        else:
            self._shared[block] = self.now
            if len(self._shared) > self._most_shared:
                oldest, since = self._shared.popitem(last=False)
                self._hits[oldest] = 0
                self._once[oldest] = since

    def _segment(self, block: int) -> OrderedDict[int, float]:
        return next((segment for segment in self._segments if block in segment), self._once)

    def pin(self, keys: Iterable[bytes]) -> None:
        """Let these blocks, whether they are here already or come later, give way last."""
        for key in keys:
            self._pins.add(key)
            block = self._by_key.get(key)
            if block is not None and self._refs[block] == 0:
                self._segment(block).pop(block)
                self._pinned[block] = self.now

    def unpin_all(self) -> None:
        """Treat pinned blocks like all others again."""
        self._pins.clear()
        for block in list(self._pinned):
            del self._pinned[block]
            self._keep(block)

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
        self._hits[block] = 0
        self._tokens_of[block] = tuple(tokens)

    def expire(self, before: float) -> int:
        """Forget cached blocks that were last used before that time, but for pinned ones; how many became free."""
        count = 0
        for segment in (self._once, self._shared):
            while segment and next(iter(segment.values())) < before:
                block, _ = segment.popitem(last=False)
                self._forget(block)
                self._free.append(block)
                count += 1
        return count

    def forget(self, keys: Iterable[bytes]) -> None:
        """Let nobody find these blocks any more."""
        for key in keys:
            block = self._by_key.get(key)
            if block is None:
                continue
            if self._refs[block] == 0:
                self._segment(block).pop(block)
                self._free.append(block)
            self._forget(block)

    def drop_cached(self) -> int:
        """Forget all content (after a reload of the weights, or on demand); how many blocks became free."""
        dropped = list(chain.from_iterable(self._segments))
        for segment in self._segments:
            segment.clear()
        self._free += dropped
        for block in list(self._key_of):  # those in use become free when released
            self._forget(block)
        return len(dropped)

    def _forget(self, block: int) -> None:
        del self._by_key[self._key_of.pop(block)]
        del self._tokens_of[block]
        self._hits[block] = 0

    def check_integrity(self) -> None:
        """Raise AssertionError if the accounts do not add up."""
        used = {block for block in range(1, self.total + 1) if self._refs[block] > 0}
        free, cached = set(self._free), set(chain.from_iterable(self._segments))
        if len(free) != len(self._free) or len(free) + self.cached + len(used) != self.total:
            raise AssertionError(f"free {len(free)} + cached {self.cached} + used {len(used)} != {self.total}")
        if free & cached or free & used or cached & used or len(cached) != self.cached:
            raise AssertionError("a block is in two states")
        if not cached <= set(self._key_of) or free & set(self._key_of):
            raise AssertionError("a cached block without a key, or a free one with a key")
        if {key: block for block, key in self._key_of.items()} != self._by_key or set(self._tokens_of) != set(
            self._key_of
        ):
            raise AssertionError("keys and blocks do not match")
