"""Single flight: whoever asks the same at the same time shares one answer, in whatever shape and wording."""

from __future__ import annotations

import asyncio
from functools import partial

from backends.protocol import BackendError
from gateway.cache.answers import Answers
from gateway.cache.lease import PATIENCE, Leases
from gateway.cache.lookup import Lookup
from gateway.computation import Computation
from gateway.errors import BudgetSpent, Limited
from gateway.exchange import Served
from gateway.flights import Flights, Key
from gateway.relay import following
from policies.retry import TRANSIENT


class Sharing:
    """The flights of one process, and the leases by which it shares with others."""

    def __init__(self, answers: Answers) -> None:
        self._answers = answers
        self._flights: Flights[Served] = Flights()
        self._leases = Leases(answers)

    async def close(self) -> None:
        """Give back what is still held."""
        await self._leases.close()

    def is_under_way(self, key: Key) -> bool:
        """Whether there is a flight to follow."""
        return self._flights.find(key) is not None

    async def shared(self, flying: Computation) -> Served:
        """The answer that an identical request is getting just now, or one of our own that others may share.

        Whoever follows a request that fails tries once more, one for all of them; a second failure is theirs too, but
        for refusals: what is wrong with a request may stand in a field that does not decide the answer.
        """
        key, again, reason = flying.key, True, "collapsed"
        if self._flights.find(key) is None:
            if (served := await self._in_another_shape(flying)) is not None:
                return served
            if (near := await self._near(flying)) is not None:
                key, reason = near, "collapsed-near"
        while (flight := self._flights.find(key)) is not None:
            try:
                leader = await flight.head()
            except BackendError:
                if not again:
                    raise
                again = False
                continue
            except (Limited, BudgetSpent):  # the leader's own matter
                return flying.served(await flying.open())
            if leader.status < 400 or (not again and leader.status in TRANSIENT):
                self._answers.metrics.flights.labels("follower").inc()
                served = following(leader, flying.started, reason)
                served.chunks = flight.ride()
                return served
            await flight.leave()
            if not again:
                return flying.served(await flying.open())
            again = False
        return await self.led(flying)

    async def _in_another_shape(self, flying: Computation) -> Served | None:
        """The same answer, asked for as JSON and as a stream: whoever comes second gets it when it is stored."""
        found = self._flights.otherwise(flying.key)
        view = flying.question.view
        if found is None:
            return None
        (streamed, options), flight = found
        if streamed and b'"include_usage":true' not in options and (view.include_usage or not view.stream):
            return None  # what comes will not tell the usage that this one must have
        try:
            async with asyncio.timeout(PATIENCE):
                await flight.over.wait()
        except TimeoutError:
            return None
        entry = await self._answers.again(flying.question)
        served = flying.replayed(Lookup("exact", entry=entry)) if entry is not None else None
        if served is not None:
            self._answers.metrics.flights.labels("follower").inc()
        return served

    async def led(self, flying: Computation) -> Served:
        """The answer that a backend is asked for now, for whoever else may want it, too."""
        flight = self._flights.start(flying.key, flying.opening(self._leases))
        self._announce(flying)
        self._answers.metrics.flights.labels("leader").inc()
        served = await flight.head()
        if served.status >= 400:
            flight.close()
        served.chunks = flight.ride()
        return served

    def _announce(self, flying: Computation) -> None:
        """Let nearly identical questions know of this one, where they may share its answer."""
        question = flying.question
        if flying.shares_near:
            flying.lookup.neighbours = flying.lookup.neighbours or self._answers.vector(question)
            under_way = partial(self.is_under_way, flying.key)
            self._answers.asking.add(question, flying.key, flying.lookup.neighbours, under_way)

    async def _near(self, flying: Computation) -> Key | None:
        """The key of a nearly identical question whose answer is under way."""
        question, asking = flying.question, self._answers.asking
        if not flying.shares_near or not asking.any(question.scope):
            return None
        flying.lookup.neighbours = flying.lookup.neighbours or self._answers.vector(question)
        if flying.lookup.neighbours is None:
            return None
        denies = partial(self._answers.denies, question)
        agrees = partial(self._answers.agrees, question)
        found = await asking.nearest(question, flying.key[1], flying.lookup.neighbours, denies, agrees)
        return found if found is not None and self._flights.find(found) is not None else None
