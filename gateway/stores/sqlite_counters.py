"""Rate limits and money in this process; what was spent is kept in SQLite over restarts."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gateway.stores.contract import Taken
from gateway.stores.sqlite_file import opened
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
    """One account. Only the event loop's thread touches it."""

    ends: float
    written: int | None = None
    """What the file says; None until it was read."""
    pending: int = 0
    sending: int = 0
    """Of what is not in the file yet, what is being written now."""
    held: dict[str, int] = field(default_factory=dict)

    @property
    def booked(self) -> int:
        return (self.written or 0) + self.pending + self.sending


class LocalCounters:
    """A `CounterStore` of one process. Of several on one machine each admits its share of a rate limit (one at least);
    what was spent is common, through the file, a fifth of a second late, and what is held is each one's own."""

    estimated = False

    def __init__(self, path: Path | None, processes: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        """`path` None: nothing outlives the process."""
        self._path, self._processes, self._clock = path, processes, clock
        self._windows: dict[str, Window] = {}
        self._money: dict[str, _Money] = {}
        self._swept = clock()
        self._flusher: asyncio.Task[None] | None = None
        self._writing = asyncio.Lock()
        self._file: sqlite3.Connection | None = None

    async def open(self) -> None:
        if self._path is not None:
            self._file = await asyncio.to_thread(opened, self._path, _prepare)
            self._flusher = asyncio.create_task(self._flush_often(), name="money")

    async def close(self) -> None:
        if self._flusher is not None:
            self._flusher.cancel()
            await asyncio.gather(self._flusher, return_exceptions=True)
            await self._flush()  # after the one that may be under way
        if self._file is not None:
            self._file.close()

    async def take(self, wanted: Sequence[tuple[Limit, int]], holder: str) -> tuple[list[State], Taken]:
        now = self._clock()
        self._sweep(now)
        found = []
        for limit, amount in wanted:
            window = self._windows.get(limit.key)
            if window is None:
                window = self._windows[limit.key] = Window(limit.window)
            window.forget(now)
            mine = replace(limit, limit=self.share(limit)) if self._processes > 1 else limit
            found.append((window, window.state(now, mine, amount), mine, amount))
        if any(state.wait for _, state, _, _ in found):
            return [state for _, state, _, _ in found], Taken(now)
        for window, _, _, amount in found:
            window.add(now, amount)
        return [window.state(now, mine, 0) for window, _, mine, _ in found], Taken(now)

    def give(self, changes: Sequence[tuple[Limit, int]], taken: Taken, holder: str) -> None:
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
                window.take_back(taken.at, -amount)

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

    def share(self, limit: Limit) -> int:
        return max(1, limit.limit // self._processes)

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
        for account in accounts:
            if account.key not in self._money:
                self._money[account.key] = _Money(account.ends, None if self._path else 0)
        if any(self._money[account.key].written is None for account in accounts):
            await asyncio.shield(asyncio.ensure_future(self._flush()))  # whoever leaves takes nobody's money along

    async def _flush_often(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_SECONDS)
            if self._money and (self._processes > 1 or any(money.pending for money in self._money.values())):
                await asyncio.shield(asyncio.ensure_future(self._flush()))

    async def _flush(self) -> None:
        """Write what was spent here, and read what all have spent. One at a time."""
        async with self._writing:
            if self._file is None:
                return
            for money in self._money.values():
                money.sending, money.pending = money.pending, 0
            rows = [(key, money.sending, money.ends) for key, money in self._money.items()]
            try:
                known = await asyncio.to_thread(_exchanged, self._file, rows)
            except Exception as error:  # locked, full: it is counted all the same, and tried again
                log.error("what was spent could not be written: %s", error)
                for money in self._money.values():
                    money.pending, money.sending = money.pending + money.sending, 0
                return
            for key, _, _ in rows:
                money = self._money[key]
                money.written, money.sending = known.get(key, 0), 0
            self._forget_the_past()

    def _forget_the_past(self) -> None:
        over = time.time() - 86400
        for key, money in list(self._money.items()):
            if money.ends < over and not money.held and not money.pending:
                del self._money[key]


def _prepare(connection: sqlite3.Connection) -> None:
    with connection:
        connection.execute(_SCHEMA)
        connection.execute("DELETE FROM spent WHERE ends < ?", (time.time() - KEEP_SECONDS,))


def _exchanged(connection: sqlite3.Connection, rows: Sequence[tuple[str, int, float]]) -> dict[str, int]:
    """Add amounts to accounts: what they have then, whoever else has added something."""
    find = "SELECT amount FROM spent WHERE account = ?"
    with connection:
        connection.executemany(_ADD, [row for row in rows if row[1]])
        found = {key: connection.execute(find, (key,)).fetchone() for key, _, _ in rows}
    return {key: int(row[0]) for key, row in found.items() if row is not None}
