"""Rate limits and money in this process; what was spent is kept in SQLite over restarts."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from policies.budget import Account
from policies.rate_limit import Limit, State, Window

log = logging.getLogger("hitherto.counters")

FLUSH_SECONDS = 0.1
SWEEP_SECONDS = 60.0
KEEP_SECONDS = 400 * 86400.0
"""What was spent in a period is kept so long after its end."""
_SCHEMA = """CREATE TABLE IF NOT EXISTS spent (
    account TEXT PRIMARY KEY, amount INTEGER NOT NULL, ends REAL NOT NULL
) WITHOUT ROWID"""
_ADD = "INSERT INTO spent VALUES (?, ?, ?) ON CONFLICT (account) DO UPDATE SET amount = amount + excluded.amount"


@dataclass(slots=True)
class _Money:
    """One account: what the file says, what it will say soon, and what is held by whom."""

    ends: float
    written: int | None = None
    """None until the file was read."""
    pending: int = 0
    held: dict[str, int] = field(default_factory=dict)

    @property
    def booked(self) -> int:
        return (self.written or 0) + self.pending


class LocalCounters:
    """A `CounterStore` of one process. Of several on one machine each admits its share of a rate limit; money is
    common, through the file, with a lag of a fifth of a second."""

    estimated = False

    def __init__(self, path: Path | None, processes: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """`path` None: nothing outlives the process."""
        self._path, self._processes, self._clock = path, processes, clock
        self._windows: dict[str, Window] = {}
        self._money: dict[str, _Money] = {}
        self._swept = clock()
        self._flusher: asyncio.Task[None] | None = None

    async def open(self) -> None:
        if self._path is not None:
            await asyncio.to_thread(self._connected, lambda connection: None)
            self._flusher = asyncio.create_task(self._flush_often(), name="money")

    async def close(self) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
            await asyncio.to_thread(self._flush)

    async def take(self, wanted: Sequence[tuple[Limit, int]], holder: str) -> tuple[list[State], float]:
        now = self._clock()
        self._sweep(now)
        found = []
        for limit, amount in wanted:
            window = self._windows.get(limit.key)
            if window is None:
                window = self._windows[limit.key] = Window(limit.window)
            window.forget(now)
            mine = self._share(limit)
            found.append((window, window.state(now, mine, amount), mine, amount))
        if any(state.wait for _, state, _, _ in found):
            return [state for _, state, _, _ in found], now
        for window, _, _, amount in found:
            window.add(now, amount)
        return [window.state(now, mine, 0) for window, _, mine, _ in found], now

    def give(self, changes: Sequence[tuple[Limit, int]], at: float, holder: str) -> None:
        now = self._clock()
        for limit, amount in changes:
            window = self._windows.get(limit.key)
            if window is None:
                if amount <= 0:
                    continue
                window = self._windows[limit.key] = Window(limit.window)
            window.forget(now)
            if amount > 0:
                window.add(now, amount)
            else:
                window.take_back(at, -amount)

    async def reserve(self, accounts: Sequence[Account], amount: int, holder: str) -> Account | None:
        await self._known(accounts)
        for account in accounts:
            money = self._money[account.key]
            if money.booked + sum(money.held.values()) + amount > account.limit:
                return account
        for account in accounts:
            self._money[account.key].held[holder] = amount
        return None

    def settle(self, accounts: Sequence[Account], amount: int, holder: str) -> None:
        for account in accounts:
            money = self._money.setdefault(account.key, _Money(account.ends, None if self._path else 0))
            money.held.pop(holder, None)
            money.pending += amount

    async def spent(self, accounts: Sequence[Account]) -> list[tuple[int, int]]:
        await self._known(accounts)
        found = [self._money[account.key] for account in accounts]
        return [(money.booked, sum(money.held.values())) for money in found]

    def _share(self, limit: Limit) -> Limit:
        if self._processes == 1:
            return limit
        return replace(limit, limit=max(1, limit.limit // self._processes))

    def _sweep(self, now: float) -> None:
        """Users that came once must not be remembered for ever."""
        if now - self._swept < SWEEP_SECONDS:
            return
        self._swept = now
        for key, window in list(self._windows.items()):
            window.forget(now)
            if not window.used:
                del self._windows[key]

    async def _known(self, accounts: Sequence[Account]) -> None:
        """Have what was spent before this process began."""
        fresh = [account for account in accounts if account.key not in self._money]
        for account in fresh:
            self._money[account.key] = _Money(account.ends, None if self._path else 0)
        if any(self._money[account.key].written is None for account in accounts):
            await asyncio.to_thread(self._flush)

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if self._money:
                await asyncio.to_thread(self._flush)

    def _flush(self) -> None:
        """Write what was spent here, and read what all have spent."""
        try:
            self._connected(self._exchange)
        except sqlite3.Error as error:  # locked, full: it stays pending and is counted all the same
            log.error("what was spent could not be written: %s", error)
            for money in self._money.values():
                money.written = money.written or 0

    def _exchange(self, connection: sqlite3.Connection) -> None:
        money = list(self._money.items())
        pending = [(key, one.pending, one.ends) for key, one in money if one.pending]
        with connection:
            connection.executemany(_ADD, pending)
            known = dict(connection.execute("SELECT account, amount FROM spent WHERE ends > ?", (time.time() - 86400,)))
        sent = {key: amount for key, amount, _ in pending}
        for key, one in money:
            one.written = known.get(key, 0)
            one.pending -= sent.get(key, 0)
            if one.ends < time.time() - 86400 and not one.held and not one.pending:
                self._money.pop(key, None)

    def _connected(self, work: Callable[[sqlite3.Connection], None]) -> None:
        assert self._path is not None
        connection = sqlite3.connect(self._path, timeout=2.0)
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(_SCHEMA)
            work(connection)
        finally:
            connection.close()
