"""Between the engine's step loop and the lower tiers: what is written behind, and how loaded blocks come in.

Everything here runs on the engine's thread but for `build_tiers`. A loaded block enters the device pool as a cached
block like any other, so the scheduler needs no second way to find it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from backends.engine.config import KVConfig, RedisConfig
from backends.engine.kv_pool import KVPool
from backends.engine.prefix_cache import PrefixCache
from backends.engine.sequence import Sequence
from backends.engine.tiers.contract import Tier
from backends.engine.tiers.ladder import Ladder, Load, Wanted
from backends.protocol import reveal


def build_tiers(config: KVConfig, data: Path) -> list[Tier]:
    """The configured tiers, fastest first. Raises OSError or ImportError."""
    tiers: list[Tier] = []
    if config.ram:
        from backends.engine.tiers.ram import RamTier

        tiers.append(RamTier(int(config.ram), config.ttl))
    if config.disk:
        from backends.engine.tiers.disk import DiskTier

        tiers.append(DiskTier(data / Path(config.disk.path).expanduser(), int(config.disk.size), config.ttl))
    if config.redis:
        tiers.append(redis_tier(config.redis, config.ttl))
    return tiers


def redis_tier(config: RedisConfig, ttl: float, prefix: str = "hitherto:kv:") -> Tier:
    """The tier in Redis."""
    from backends.engine.tiers.redis import RedisTier

    password = reveal(config.password) if config.password else None
    return RedisTier(config.url, int(config.size), ttl, password=password, prefix=prefix, timeout=config.timeout)


@dataclass
class _Waiting:
    sequence: Sequence
    load: Load
    deadline: float


class Lower:
    """The lower tiers of one engine. `post` runs something on the engine's thread between two steps."""

    def __init__(
        self,
        ladder: Ladder,
        cache: PrefixCache,
        pool: KVPool,
        deadline: float,
        post: Callable[[Callable[[], None]], None],
    ) -> None:
        self.ladder = ladder
        self.late = 0
        """Loads that missed their deadline."""
        self._cache, self._pool, self._deadline, self._post = cache, pool, deadline, post
        self._waiting: list[_Waiting] = []

    def look(self, sequence: Sequence, matched: int) -> bool:
        """Begin to look for the blocks of a prompt after the matched ones."""
        size = self._cache.block_size
        last = (len(sequence.tokens) - 1) // size
        barred = self._cache.quarantined
        last = next((index for index in range(matched, last) if sequence.chain[index] in barred), last)
        wanted = [
            Wanted(sequence.chain[index], tuple(sequence.tokens[index * size : (index + 1) * size]), index == 0)
            for index in range(matched, last)
        ]
        load = self.ladder.find(wanted, lambda done: self._post(lambda: self._arrived(done)))
        self._waiting.append(_Waiting(sequence, load, time.monotonic() + self._deadline))
        return True

    def published(self, sequence: Sequence, start: int, end: int) -> None:
        """Blocks `start … end-1` of a sequence have become findable on the device: write them behind."""
        size = self._cache.block_size
        for index in range(start, end):
            if sequence.chain[index] in self._cache.quarantined:
                continue
            tokens = tuple(sequence.tokens[index * size : (index + 1) * size])
            block = Wanted(sequence.chain[index], tokens, index == 0)
            self.ladder.store(block, partial(self._pool.read_block, sequence.table[index]))

    def give_up_late(self) -> None:
        """Let sequences go whose loads are past their deadline: they compute."""
        now = time.monotonic()
        for waiting in [item for item in self._waiting if item.deadline <= now]:
            waiting.load.abandoned = True
            self.late += 1
            self._release(waiting)

    def _arrived(self, load: Load) -> None:
        """Blocks came: make them cached blocks of the device, as many as have room."""
        waiting = next((item for item in self._waiting if item.load is load), None)
        if waiting is None:
            return  # too late
        pool, loaded, held = self._cache.pool, waiting.sequence.loaded, []
        sequence = waiting.sequence
        matched = self._cache.match(sequence.tokens, sequence.chain)
        pool.retain(matched)  # nothing of this prompt may give way to the rest of it
        for block, payload, source in zip(load.wanted, load.payloads, load.sources, strict=False):
            if pool.find(block.key, block.tokens) is not None:
                continue
            if len(payload) != self._pool.data[0].nbytes:
                break
            allocated = pool.allocate(1)
            if allocated is None:
                break
            self._pool.write_block(allocated[0], payload)
            pool.publish(allocated[0], block.key, block.tokens)
            held += allocated
            loaded[source] = loaded.get(source, 0) + len(block.tokens)
        pool.release([*matched, *held])  # all at once, so that tails give way before heads
        self._release(waiting)

    def abandon(self) -> None:
        """Let all waiting sequences go without what is still to come."""
        for waiting in list(self._waiting):
            waiting.load.abandoned = True
            self._release(waiting)

    def _release(self, waiting: _Waiting) -> None:
        self._waiting.remove(waiting)
        waiting.sequence.loading = False
