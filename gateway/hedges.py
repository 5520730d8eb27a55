"""The race of a second try against a slow first one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gateway.metrics import Metrics
from gateway.tries import Outcome
from policies.hedging import Percentile
from policies.retry import RetryBudget
from policies.routing import Route

if TYPE_CHECKING:
    from gateway.dispatch import Candidate

ROUTES_MOST = 1000


@dataclass(slots=True)
class _Seen:
    """What is known of one route; `route` is kept, so that no other can have its identity."""

    route: Route
    budget: RetryBudget
    paces: dict[bool, Percentile] = field(default_factory=lambda: {True: Percentile(), False: Percentile()})
    """First bytes of streams, and of whole answers."""


class Hedges:
    """How fast routes are, and how much may be sent twice."""

    def __init__(self, metrics: Metrics) -> None:
        self.count = metrics.hedges
        self._seen: dict[int, _Seen] = {}
        self.losers: set[asyncio.Task[None]] = set()

    def of(self, route: Route) -> _Seen:
        """What is known of a route."""
        seen = self._seen.get(id(route))
        if seen is None or seen.route is not route:
            if len(self._seen) >= ROUTES_MOST:  # reloads make new ones
                self._seen.clear()
            assert route.hedge is not None
            seen = self._seen[id(route)] = _Seen(route, RetryBudget(route.hedge.extra, 10.0, 0.0))
        return seen


async def first_answer(
    hedges: Hedges,
    route: Route,
    stream: bool,
    first: Candidate,
    others: Iterator[Candidate],
    attempt: Callable[[Candidate], Awaitable[Outcome]],
) -> tuple[Outcome, Candidate, tuple[Outcome, Candidate] | None]:
    """What the first of up to two candidates answers, and the failure of the other one, if it failed before."""
    seen = hedges.of(route)
    pace = seen.paces[stream]
    assert route.hedge is not None
    delay = pace.p95 if route.hedge.after == "p95" else route.hedge.after
    seen.budget.sent()
    began, lost = time.monotonic(), None
    running = {asyncio.ensure_future(attempt(first)): first}
    try:
        done, _ = await asyncio.wait(running, timeout=delay)
        if not done and not seen.budget.take():
            hedges.count.labels("not-allowed").inc()
        elif not done:
            if (second := next(others, None)) is not None:
                hedges.count.labels("sent").inc()
                running[asyncio.ensure_future(attempt(second))] = second
            else:
                seen.budget.left += 1.0  # there is nobody beside
        while True:
            done, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            task = done.pop()
            candidate, outcome = running.pop(task), task.result()
            if outcome.kind in ("", "final") or not running:
                if not outcome.kind:
                    pace.add(time.monotonic() - began)
                    if candidate is not first:
                        hedges.count.labels("won").inc()
                return outcome, candidate, lost
            lost = outcome, candidate
    except BaseException:
        if lost is not None:
            await lost[0].drop()
        raise
    finally:
        if running:  # nobody waits for them
            letting_go = asyncio.create_task(_let_go(list(running)))
            hedges.losers.add(letting_go)
            letting_go.add_done_callback(hedges.losers.discard)


async def _let_go(tasks: list[asyncio.Future[Outcome]]) -> None:
    for task in tasks:
        task.cancel()
    for late in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(late, Outcome):
            await late.drop()
