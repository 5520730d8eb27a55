"""The ledger: what every answer took, cost and saved; written behind, in groups."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from pydantic import Field

from backends.protocol import Duration, Section
from gateway.metrics import Metrics
from gateway.stores.contract import WEEK, Audit, Booking, LedgerStore, StoreAway

log = logging.getLogger("hitherto.ledger")
_audit_log = logging.getLogger("hitherto.audit")

WRITE_SECONDS = 0.04
"""Rows wait so long for others to be written with. With the writing itself less than a tenth of a second is lost by a
crash of the process."""
WAITING_MOST = 200_000
"""Rows that are kept while the file takes none; what comes then is lost, and counted as a fault."""
AT_ONCE = 5000
"""Rows of one transaction, for which other processes wait."""
TIDY_SECONDS = 600.0
_LATE = 0.1
"""Writing that takes so long is told: until it is done a crash loses more than is promised."""
DAY = 86400.0


class LedgerConfig(Section):
    """`ledger:`, how long what is kept."""

    rows: Duration = Field(default=7 * DAY, gt=0)
    """Single answers."""
    minutes: Duration = Field(default=2 * DAY, gt=0)
    """Sums by minute."""
    hours: Duration = Field(default=60 * DAY, gt=0)
    """Sums by hour, and what each stored answer saved."""
    days: Duration = Field(default=800 * DAY, gt=0)
    """Sums by day."""

    def keep(self) -> dict[str, float]:
        return {"rows": self.rows, "minutes": self.minutes, "hours": self.hours, "days": self.days}


class Ledger:
    """One process' part of the ledger; `store` None: nothing is kept."""

    def __init__(self, store: LedgerStore | None, metrics: Metrics) -> None:
        self.store, self._metrics = store, metrics
        self._waiting: list[Booking] = []
        self._writer = ThreadPoolExecutor(1, "ledger-write")
        self._readers = ThreadPoolExecutor(2, "ledger-read")
        self._chores: list[asyncio.Task[None]] = []
        self._some = asyncio.Event()

    async def open(self) -> None:
        if self.store is not None:
            self._chores = [asyncio.create_task(self._write()), asyncio.create_task(self._tidy())]

    async def close(self) -> None:
        """Write what is waiting."""
        for chore in self._chores:
            chore.cancel()
        await asyncio.gather(*self._chores, return_exceptions=True)
        await self.settled()
        self._writer.shutdown()
        self._readers.shutdown()
        if self.store is not None:
            self.store.close()

    def add(self, row: Booking) -> None:
        """Book a row, soon."""
        if self.store is None:
            return
        if len(self._waiting) >= WAITING_MOST:
            self._metrics.faults.labels("ledger").inc()
            return
        self._waiting.append(row)
        if not self._some.is_set():
            self._some.set()

    async def settled(self) -> bool:
        """Return when what was added so far has been tried to be written: whether it is."""
        if self.store is None:
            return True
        return await asyncio.get_running_loop().run_in_executor(self._writer, self._flush)

    async def ask(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a blocking call of the store that reads."""
        await self.settled()
        return await asyncio.get_running_loop().run_in_executor(self._readers, call, *arguments)

    async def note(self, actor: str, action: str, detail: str = "", outcome: str = "done") -> None:
        """Keep what somebody changed; it stands in the log, too."""
        _audit_log.info("%s: %s %s (%s)", actor, action, detail, outcome)
        if self.store is None:
            return
        audit = Audit(time.time(), actor, action, detail, outcome)
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, self.store.note, audit)
        except Exception:
            self._fault("what %s did (%s) could not be written", actor, action)

    async def _write(self) -> None:
        while True:
            await self._some.wait()
            await asyncio.sleep(WRITE_SECONDS)
            self._some.clear()
            began = time.monotonic()
            if not await self._tried():
                self._some.set()
                await asyncio.sleep(1.0)
            elif (took := time.monotonic() - began) > _LATE:
                log.warning("writing the ledger took %.1f s", took)

    async def _tried(self) -> bool:
        try:
            return await self.settled()
        except Exception:  # this task must not end
            self._fault("the ledger could not be written")
            return False

    def _flush(self) -> bool:
        """In the writer's thread: write what waits, all or nothing."""
        assert self.store is not None
        left = len(self._waiting)  # what comes meanwhile is written with others, not one by one
        while left > 0:
            rows = self._waiting[: min(left, AT_ONCE)]
            left -= len(rows)
            try:
                self.store.add(rows)
            except StoreAway:
                self._fault("%d rows of the ledger could not be written; they will be tried again", len(rows))
                return False
            except Exception:  # there is one among them that no file takes; the others must not wait for it
                if not self._one_by_one(rows):
                    return False
            else:
                del self._waiting[: len(rows)]
        return True

    def _one_by_one(self, rows: list[Booking]) -> bool:
        assert self.store is not None
        for row in rows:
            try:
                self.store.add([row])
            except StoreAway:
                self._fault("a row of the ledger could not be written; it will be tried again")
                return False
            except Exception:
                self._fault("a row of the ledger cannot be written, and is lost: %r", row)
            del self._waiting[0]
        return True

    async def _tidy(self) -> None:
        assert self.store is not None
        while True:
            try:
                await asyncio.get_running_loop().run_in_executor(self._readers, self.store.tidy, time.time())
            except Exception:
                self._fault("old rows of the ledger could not be dropped")
            await asyncio.sleep(TIDY_SECONDS)

    def _fault(self, message: str, *values: object) -> None:
        self._metrics.faults.labels("ledger").inc()
        log.exception(message, *values)


def span_of(start: float, end: float, now: float, keep: LedgerConfig) -> int:
    """Seconds of the steps that a range is told in: as fine as it is kept, and as can be looked at."""
    for span, most, kept in ((60, 4 * 3600.0, keep.minutes), (3600, 8 * DAY, keep.hours)):
        if end - start <= most and start >= now - kept:
            return span
    return 86400 if end - start <= 100 * DAY else WEEK
