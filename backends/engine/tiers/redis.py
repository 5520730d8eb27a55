"""KV blocks in Redis, shared by several engines. Needs nothing but strings, a sorted set and Lua (Redis 7 will do)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

# Stores one block and keeps the namespace within its bytes: a sorted set holds keys by last use, a hash their sizes.
# One script, so that no two engines can disagree about what is there.
_PUT = """
local used, sizes, total = KEYS[2], KEYS[3], KEYS[4]
local old = tonumber(redis.call('HGET', sizes, ARGV[1]) or '0')
local size, limit = string.len(ARGV[2]), tonumber(ARGV[4])
if size > limit then return 0 end
local sum = tonumber(redis.call('GET', total) or '0') - old + size
while sum > limit do
  local victim = redis.call('ZPOPMIN', used)[1]
  if not victim then break end
  if victim ~= ARGV[1] then
    sum = sum - tonumber(redis.call('HGET', sizes, victim) or '0')
    redis.call('HDEL', sizes, victim)
    redis.call('DEL', ARGV[6] .. victim)
  end
end
redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[3])
redis.call('ZADD', used, ARGV[5], ARGV[1])
redis.call('HSET', sizes, ARGV[1], size)
redis.call('SET', total, math.max(sum, size))
return 1
"""
_DELETE = """
local size = tonumber(redis.call('HGET', KEYS[3], ARGV[1]) or '0')
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
if size > 0 then redis.call('DECRBY', KEYS[4], size) end
return size
"""


class RedisTier:
    """A `Tier` in one Redis database, under `prefix`; `timeout` seconds for connecting and for each answer."""

    name = "redis"

    def __init__(
        self,
        url: str,
        limit: int,
        ttl: float,
        *,
        password: str | None = None,
        prefix: str = "hitherto:kv:",
        timeout: float = 0.5,
        clock: Callable[[], float] = time.time,
    ) -> None:
        import redis

        # No retries: a tier that does not answer is recomputed around, and the ladder's breaker gives it time.
        self._redis: Any = redis.Redis.from_url(
            url,
            password=password,
            socket_timeout=timeout,
            socket_connect_timeout=timeout,
            retry=None,
            health_check_interval=0,
        )
        self._limit, self._ttl, self._clock = limit, ttl, clock
        self._block = f"{prefix}block:"
        self._books = [f"{prefix}used", f"{prefix}sizes", f"{prefix}bytes"]
        self._put = self._redis.register_script(_PUT)
        self._delete = self._redis.register_script(_DELETE)

    def has(self, keys: Sequence[bytes]) -> int:
        with self._redis.pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.exists(self._block + key.hex())
            answers = pipe.execute()
        return next((count for count, there in enumerate(answers) if not there), len(keys))

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        if not keys:
            return []
        now = self._clock()
        with self._redis.pipeline(transaction=False) as pipe:
            pipe.mget([self._block + key.hex() for key in keys])
            pipe.zadd(self._books[0], {key.hex(): now for key in keys}, xx=True)
            found: list[bytes | None] = pipe.execute()[0]
        return found

    def put(self, key: bytes, sealed: bytes) -> None:
        name = key.hex()
        arguments: list[Any] = [name, sealed, int(self._ttl * 1000), self._limit, self._clock(), self._block]
        self._put(keys=[self._block + name, *self._books], args=arguments)

    def delete(self, key: bytes) -> None:
        name = key.hex()
        self._delete(keys=[self._block + name, *self._books], args=[name])

    def clear(self) -> None:
        names = self._redis.zrange(self._books[0], 0, -1)
        for start in range(0, len(names), 500):
            self._redis.unlink(*(self._block + name.decode() for name in names[start : start + 500]))
        self._redis.unlink(*self._books)

    @property
    def bytes_used(self) -> int:
        """What the books say; blocks that expired are still counted until their turn comes."""
        return int(self._redis.get(self._books[2]) or 0)

    def close(self) -> None:
        self._redis.close()
