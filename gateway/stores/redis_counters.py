"""Rate limits and money in Redis, shared by gateways on several machines; each script is one atomic step.

Clocks differ between machines, so Redis' own is asked. While Redis is away each gateway counts by itself, and says so.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from gateway.stores.contract import Taken
from gateway.stores.sqlite_counters import LocalCounters
from policies.budget import Account
from policies.rate_limit import SLOTS, Limit, State, Window

log = logging.getLogger("hitherto.counters")

AWAY_SECONDS = 5.0
"""After a failure Redis is left alone for so long."""
LEASE_SECONDS = 1800.0
"""What a gateway that died had taken or held is free again after this."""
_HOPELESS = ("ResponseError", "DataError", "NoPermissionError")
"""What Redis will say again, however often it is asked."""
_numbers = itertools.count()
QUEUE = 100_000
"""So much is remembered for Redis while it is away."""
T = TypeVar("T")

# For each limit: what is used by slot; then, if all allow it, use it. ARGV: holder, lease, then per key
# (window, limit, amount). A window of 0 is concurrency: a sorted set of holders by when their lease ends.
_TAKE = """
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
local out, ok = {}, true
for i, key in ipairs(KEYS) do
  local window, limit, amount = tonumber(ARGV[3*i]), tonumber(ARGV[3*i+1]), tonumber(ARGV[3*i+2])
  if window == 0 then
    redis.call('ZREMRANGEBYSCORE', key, '-inf', now)
    local used = redis.call('ZCARD', key)
    out[i] = {0, used}
    if used + amount > limit then ok = false end
  else
    local oldest = math.floor(now / window * SLOTS) - SLOTS
    local slots, flat, used = redis.call('HGETALL', key), {}, 0
    for j = 1, #slots, 2 do
      if tonumber(slots[j]) < oldest then redis.call('HDEL', key, slots[j])
      else
        flat[#flat+1] = tonumber(slots[j]); flat[#flat+1] = tonumber(slots[j+1])
        used = used + tonumber(slots[j+1])
      end
    end
    out[i] = flat
    if used + amount > limit then ok = false end
  end
end
if ok then
  for i, key in ipairs(KEYS) do
    local window, amount = tonumber(ARGV[3*i]), tonumber(ARGV[3*i+2])
    if window == 0 then
      redis.call('ZADD', key, now + tonumber(ARGV[2]), ARGV[1])
      redis.call('EXPIRE', key, math.ceil(tonumber(ARGV[2])))
    else
      redis.call('HINCRBY', key, math.floor(now / window * SLOTS), amount)
      redis.call('EXPIRE', key, math.ceil(window * 1.1) + 1)
    end
  end
end
return {ok and 1 or 0, tostring(now), out}
""".replace("SLOTS", str(SLOTS))
# The last key is this giving's own, as with settlements below.
_GIVE = """
if not redis.call('SET', KEYS[#KEYS], 1, 'NX', 'EX', 3600) then return 0 end
local clock = redis.call('TIME')
local now = tonumber(clock[1]) + tonumber(clock[2]) / 1000000
for i = 1, #KEYS - 1 do
  local key = KEYS[i]
  local window, amount = tonumber(ARGV[2*i+1]), tonumber(ARGV[2*i+2])
  if window == 0 then redis.call('ZREM', key, ARGV[1])
  elseif amount > 0 then
    redis.call('HINCRBY', key, math.floor(now / window * SLOTS), amount)
    redis.call('EXPIRE', key, math.ceil(window * 1.1) + 1)
  else
    local slot = math.floor(tonumber(ARGV[2]) / window * SLOTS)
    local used = tonumber(redis.call('HGET', key, slot) or '0')
    if used > 0 then redis.call('HINCRBY', key, slot, -math.min(used, -amount)) end
  end
end
return 1
""".replace("SLOTS", str(SLOTS))
# An account is a hash: `spent`, and `h:HOLDER` = amount and when the lease ends. ARGV: holder, lease, amount, then the
# limit and the end of each. Numbers stay below 2^53 (9 million dollars in billionths), where Lua counts exactly.
_RESERVE = """
local now = tonumber(redis.call('TIME')[1])
for i, key in ipairs(KEYS) do
  local fields, total = redis.call('HGETALL', key), tonumber(ARGV[3])
  for j = 1, #fields, 2 do
    if fields[j] == 'spent' then total = total + tonumber(fields[j+1])
    else
      local amount, ends = string.match(fields[j+1], '^(%d+) (%d+)$')
      if tonumber(ends) < now then redis.call('HDEL', key, fields[j]) else total = total + tonumber(amount) end
    end
  end
  if total > tonumber(ARGV[2*i+2]) then return i end
end
for i, key in ipairs(KEYS) do
  redis.call('HSET', key, 'h:' .. ARGV[1], ARGV[3] .. ' ' .. math.floor(now + tonumber(ARGV[2])))
  redis.call('EXPIREAT', key, ARGV[2*i+3])
end
return 0
"""
# The last key is the settlement's own: a second try of one that was made, but not answered in time, does nothing.
_SETTLE = """
if not redis.call('SET', KEYS[#KEYS], 1, 'NX', 'EX', 86400) then return 0 end
for i = 1, #KEYS - 1 do
  redis.call('HDEL', KEYS[i], 'h:' .. ARGV[1])
  redis.call('HINCRBY', KEYS[i], 'spent', ARGV[2])
  redis.call('EXPIREAT', KEYS[i], ARGV[i+2])
end
return 1
"""
_KEEP = 40 * 86400


class RedisCounters:
    """A `CounterStore` that several gateways share. `timeout`: seconds for each step.

    Scripts touch several keys, which a Redis Cluster would keep apart: one Redis, or one with replicas.
    """

    def __init__(self, url: str, fallback: LocalCounters, prefix: str = "hitherto:", timeout: float = 0.25) -> None:
        import redis.asyncio

        self._redis: Any = redis.asyncio.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
        self._local, self._prefix = fallback, prefix
        script = self._redis.register_script
        self._scripts = {name: script(text) for name, text in
                         (("take", _TAKE), ("give", _GIVE), ("reserve", _RESERVE), ("settle", _SETTLE))}  # fmt: skip
        self._away_until = 0.0
        self._waiting: deque[tuple[str, list[str], list[Any]]] = deque(maxlen=QUEUE)
        """Scripts that are still to be run: what is given back and what was spent, in order."""
        self._news = asyncio.Event()
        self._worker: asyncio.Task[None] | None = None

    @property
    def estimated(self) -> bool:
        return time.monotonic() < self._away_until

    async def open(self) -> None:
        await self._local.open()
        self._worker = asyncio.create_task(self._work(), name="counters in Redis")

    async def close(self) -> None:
        if self._worker is not None:
            if self._waiting and not self.estimated:
                await asyncio.sleep(0.2)  # what requests that have just ended give back
            self._worker.cancel()
            await asyncio.gather(self._worker, return_exceptions=True)
        await self._local.close()
        await self._redis.aclose()

    async def take(self, wanted: Sequence[tuple[Limit, int]], holder: str) -> tuple[list[State], Taken]:
        async def there() -> tuple[list[State], Taken]:
            facts: list[Any] = [holder, LEASE_SECONDS]
            for limit, amount in wanted:
                facts += [limit.window, limit.limit, amount]
            ok, clock, used = await self._scripts["take"](keys=self._limits(wanted), args=facts)
            now = float(clock)
            return [_state(limit, 0 if ok else amount, amount if ok else 0, slots, now)
                    for (limit, amount), slots in zip(wanted, used, strict=True)], Taken(now, here=False)  # fmt: skip

        asked = not self.estimated
        states, taken = await self._there_or_here(there, lambda: self._local.take(wanted, holder))
        held = [(limit, -1) for limit, _ in wanted if limit.kind == "concurrency"]
        if asked and taken.here and held:  # Redis may have done it all the same, and only not said so in time
            self._later_give(held, Taken(0.0, here=False), holder)
        return states, taken

    def share(self, limit: Limit) -> int:
        return limit.limit

    def give(self, changes: Sequence[tuple[Limit, int]], taken: Taken, holder: str) -> None:
        if taken.here:
            self._local.give(changes, taken, holder)
        else:
            self._later_give(changes, taken, holder)

    def _later_give(self, changes: Sequence[tuple[Limit, int]], taken: Taken, holder: str) -> None:
        facts: list[Any] = [holder, taken.at]
        for limit, amount in changes:
            facts += [limit.window, amount]
        self._later("give", [*self._limits(changes), f"{self._prefix}given:{holder}:{next(_numbers)}"], facts)

    async def reserve(self, accounts: Sequence[Account], amount: int, holder: str) -> Account | None:
        async def there() -> Account | None:
            facts: list[Any] = [holder, LEASE_SECONDS, amount]
            for account in accounts:
                facts += [account.limit, int(account.ends) + _KEEP]
            short = await self._scripts["reserve"](keys=self._accounts(accounts), args=facts)
            return accounts[int(short) - 1] if short else None

        return await self._there_or_here(there, lambda: self._local.reserve(accounts, amount, holder))

    def settle(self, accounts: Sequence[Account], amount: int, holder: str) -> None:
        self._local.settle(accounts, amount, holder)  # what this gateway knows by itself when Redis is away
        keys = [*self._accounts(accounts), f"{self._prefix}settled:{holder}"]
        self._later("settle", keys, [holder, amount, *(int(account.ends) + _KEEP for account in accounts)])

    async def spent(self, accounts: Sequence[Account]) -> list[tuple[int, int]]:
        async def there() -> list[tuple[int, int]]:
            found = []
            for key in self._accounts(accounts):
                fields = await self._redis.hgetall(key)
                held = [value.split() for name, value in fields.items() if name != b"spent"]
                alive = sum(int(amount) for amount, ends in held if float(ends) > time.time())
                found.append((int(fields.get(b"spent", 0)), alive))
            return found

        return await self._there_or_here(there, lambda: self._local.spent(accounts))

    def _later(self, script: str, keys: list[str], facts: list[Any]) -> None:
        self._waiting.append((script, keys, facts))
        self._news.set()

    async def _work(self) -> None:
        """Run what waits, in order; a script that may or may not have been run is run again."""
        while True:
            await self._news.wait()
            while self._waiting:
                if self.estimated:
                    await asyncio.sleep(max(0.05, self._away_until - time.monotonic()))
                script, keys, facts = self._waiting[0]
                try:
                    await self._scripts[script](keys=keys, args=facts)
                except Exception as error:
                    if type(error).__name__ in _HOPELESS:
                        log.error("Redis refuses to %s %s: %s", script, ", ".join(keys), error)
                    else:
                        self._is_away(error)
                        continue
                self._waiting.popleft()
            self._news.clear()

    def _limits(self, wanted: Sequence[tuple[Limit, int]]) -> list[str]:
        return [f"{self._prefix}rate:{limit.key}" for limit, _ in wanted]

    def _accounts(self, accounts: Sequence[Account]) -> list[str]:
        return [f"{self._prefix}money:{account.key}" for account in accounts]

    async def _there_or_here(self, there: Callable[[], Awaitable[T]], here: Callable[[], Awaitable[T]]) -> T:
        if not self.estimated:
            try:
                return await there()
            except Exception as error:
                self._is_away(error)
        return await here()

    def _is_away(self, error: Exception) -> None:
        if not self.estimated:
            log.warning("Redis does not count, so this gateway counts by itself for a while: %s", error)
        self._away_until = time.monotonic() + AWAY_SECONDS


def _state(limit: Limit, asked: int, taken: int, slots: Sequence[int], now: float) -> State:
    """How a limit stands, from what was used by slot before; `taken` was used on top."""
    window = Window(limit.window)
    for slot, used in sorted(zip(slots[::2], slots[1::2], strict=True)):
        window.slots.append([int(slot), int(used)])
        window.used += int(used)
    if taken:
        window.add(now, taken)
    return window.state(now, limit, asked)
