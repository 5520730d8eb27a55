"""One request that a backend is to answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gateway.admission import Admission
from gateway.ask import Ask
from gateway.cache.answers import Answers
from gateway.cache.key import Scope
from gateway.cache.lease import Leases
from gateway.cache.lookup import Lookup
from gateway.cache.question import Question
from gateway.cache.replay import replay
from gateway.dispatch import Dispatched
from gateway.exchange import Served, Ticket
from gateway.flights import Key
from gateway.relay import relayed
from policies.cacheability import may_read


class Computation:
    """What it takes to have one request answered by a backend."""

    def __init__(
        self,
        answers: Answers,
        admission: Admission,
        ticket: Ticket,
        ask: Ask,
        question: Question,
        lookup: Lookup,
        scope: Scope,
        options: bytes,
        started: float,
    ) -> None:
        self.question, self.lookup, self.started = question, lookup, started
        self._answers, self._admission, self._scope = answers, admission, scope
        self.ticket, self._ask = ticket, ask
        self.key: Key = (question.key, (question.view.stream, options))

    @property
    def shares_near(self) -> bool:
        """Whether another wording's answer would do while it is under way."""
        question, rules = self.question, self.question.rules
        return rules.share_near and not rules.shadow and may_read(question.view, rules, question.controls).semantic

    @property
    def shareable(self) -> bool:
        """Whether others may have the answer while it is under way."""
        controls = self.question.controls
        wanted_fresh = controls.no_store or controls.max_age is not None or controls.ttl is not None
        return self.lookup.tier == "miss" and not wanted_fresh

    async def open(self) -> Dispatched:
        """Ask a backend. Raises a `BackendError`, `Limited` or `BudgetSpent`."""
        return await self._admission.open(self.ticket, self._ask)

    def served(self, dispatched: Dispatched) -> Served:
        """A backend's response as ours."""
        return relayed(self._answers, self.question, self.lookup, dispatched, self.started, self._scope.parts)

    async def opening(self, leases: Leases) -> tuple[Served, AsyncGenerator[bytes, None]]:
        """Open the response, unless somebody with whom the store is shared is getting or has got the answer."""
        holder, entry = await leases.acquire(self.question)
        if entry is not None and (served := self.replayed(Lookup("exact", entry=entry))) is not None:
            body, served.body = served.body, None  # as one that arrives
            return served, _one(body or b"")
        try:
            served = self.served(await self.open())
        except BaseException:
            leases.release(self.question, holder)
            raise
        assert served.chunks is not None
        return served, leases.while_read(self.question, holder, served.chunks)

    def replayed(self, lookup: Lookup) -> Served | None:
        """A stored answer as ours; None if it cannot be read."""
        try:
            served = replay(self.question, lookup, self.started)
            if lookup.entry is not None:
                self._admission.hit(self.ticket, self._ask, lookup.entry, served)
            return served
        except Exception:  # an unreadable entry is a miss like any other cache fault
            self._answers.fault("replay")
            return None


async def _one(body: bytes) -> AsyncGenerator[bytes, None]:
    yield body
