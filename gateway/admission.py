"""May this tenant have this now? Limits and budgets: what a request will use is reserved before, and settled after.

Requests and concurrency are asked for at the door; tokens and money only where an answer must be computed, so that what
is stored still serves whoever has nothing left.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from backends.dialects import openai_chat
from backends.protocol import Usage
from gateway.dispatch import Ask, Dispatch, Dispatched
from gateway.errors import BudgetSpent, Limited
from gateway.exchange import Ticket
from gateway.prices import Prices
from gateway.stores.contract import CounterStore, Entry
from gateway.tenant import Tenant
from policies import budget as budgets
from policies import rate_limit
from policies.budget import Account, Budget, Downgrade
from policies.pricing import nano
from policies.rate_limit import State

_PROCESS = f"{os.getpid()}-{time.time_ns():x}"
_numbers = itertools.count()
_BYTES_PER_TOKEN = {False: 4, True: 200}
"""Of a body, and of a stream, where each token comes in an event of its own."""


class Reservation:
    """Tokens and money that are held for one computation; settle it once, however it ends."""

    def __init__(self, admission: Admission, ticket: Ticket, tokens: int, accounts: Sequence[Account]) -> None:
        self._admission, self._ticket, self.tokens, self.accounts = admission, ticket, tokens, accounts
        self.at = 0.0
        self._open = True

    def settle(self, usage: Usage | None, cost: Decimal | None) -> None:
        """`usage`: what was really used; None: nothing."""
        if self._open:
            self._open = False
            self._admission.settled(self._ticket, self, usage, cost or Decimal(0))


class Admission:
    """The door, and the till."""

    def __init__(self, counters: CounterStore, prices: Prices, dispatch: Dispatch) -> None:
        self._counters, self._prices, self._dispatch = counters, prices, dispatch
        self.booked = Decimal(0)
        """All that was settled, for whoever wants to compare it with the ledger."""

    async def afford(self, tenant: Tenant, body: bytes) -> tuple[bytes, bool]:
        """The body, with a cheaper model's name where the budget is spent and says so."""
        budget = tenant.policy.budget
        if budget is None or not isinstance(budget.when_spent, Downgrade) or not await self._is_spent(tenant, budget):
            return body, False
        return openai_chat.with_model(body, budget.when_spent.downgrade), True

    async def enter(self, tenant: Tenant, user: str, model: str, downgraded: bool = False) -> Ticket:
        """Take one request of every limit that it meets. Raises `Limited` or `BudgetSpent`."""
        if not tenant.policy.limited:
            return Ticket(tenant)
        holder = f"{_PROCESS}-{next(_numbers)}"
        budget = tenant.policy.budget
        if budget is not None and budget.when_spent == "reject" and await self._is_spent(tenant, budget):
            raise _spent(tenant, budget)
        limits = tenant.limits(user, model)
        ticket = Ticket(tenant, limits, holder=holder, downgraded=downgraded)
        wanted = [(limit, 0 if limit.kind == "tokens" else 1) for limit in limits]
        ticket.states, ticket.at = await self._counters.take(wanted, holder)
        _refuse([state for state in ticket.states if state.limit.kind != "tokens"], ticket.states, "")
        if any(state.wait for state in ticket.states):  # of tokens, but of them nothing is asked for yet
            wanted = [(limit, 1) for limit in limits if limit.kind != "tokens"]
            states, ticket.at = await self._counters.take(wanted, holder)
            _refuse(states, ticket.states, "")
        return ticket

    async def open(self, ticket: Ticket | None, ask: Ask, relay: tuple[str, str] | None = None) -> Dispatched:
        """Have a request computed, with what it will probably need held until it is known; `relay`: (backend, method)
        where it is passed on as it is. Raises `Limited`, `BudgetSpent`, or what `Dispatch` raises."""

        async def computed() -> Dispatched:
            return await (self._dispatch.open(ask) if relay is None else self._dispatch.relay(*relay, ask))

        if ticket is None or not ticket.tenant.policy.limited:
            return await computed()
        reservation = await self._reserve(ticket, ask, relay[0] if relay else "")
        try:
            dispatched = await computed()
        except BaseException:
            reservation.settle(None, None)
            raise

        def settle(usage: Usage | None, body: int) -> None:
            if usage is None and body and dispatched.reply.status == 200:  # broken off, or not told: what it looks like
                usage = Usage(max(1, len(ask.body) // 4), max(1, body // _BYTES_PER_TOKEN[ask.is_stream]))
            cost = None if usage is None else self._prices.cost(*dispatched.priced, usage)
            reservation.settle(usage, cost)

        dispatched.settle = settle
        return dispatched

    async def _reserve(self, ticket: Ticket, ask: Ask, backend: str) -> Reservation:
        tenant = ticket.tenant
        tokens = rate_limit.estimate(len(ask.body), ask.max_tokens)
        limits = [limit for limit in ticket.limits if limit.kind == "tokens"]
        budget = tenant.policy.budget
        accounts = () if budget is None else budgets.accounts(tenant.name, budget, time.time())
        reservation = Reservation(self, ticket, tokens, accounts)
        if limits:
            states, reservation.at = await self._counters.take([(limit, tokens) for limit in limits], ticket.holder)
            others = [state for state in ticket.states if state.limit.kind != "tokens"]
            ticket.states = [*others, *states]
            _refuse(states, ticket.states, f" (about {tokens} are needed)")
        if budget is not None:
            # Who goes down to a cheaper model does not stop there.
            goes_on = ticket.downgraded or isinstance(budget.when_spent, Downgrade)
            likely = Usage(len(ask.body) // 4, max(0, tokens - len(ask.body) // 4))
            amount = (
                0 if goes_on else nano(self._prices.cost(*self._dispatch.priced(ask, backend), likely) or Decimal(0))
            )
            limitless = [Account(one.key, 2**53, one.ends) for one in accounts] if ticket.downgraded else accounts
            if await self._counters.reserve(limitless, amount, ticket.holder) is not None:
                self._counters.give([(limit, -tokens) for limit in limits], reservation.at, ticket.holder)
                raise _spent(tenant, budget)
        return reservation

    def settled(self, ticket: Ticket, reservation: Reservation, usage: Usage | None, cost: Decimal) -> None:
        """Correct a reservation by what was really used."""
        used = 0 if usage is None else usage.prompt + usage.completion
        changes = [(limit, used - reservation.tokens) for limit in ticket.limits if limit.kind == "tokens"]
        if changes and used != reservation.tokens:
            self._counters.give(changes, reservation.at, ticket.holder)
        if reservation.accounts:
            self._counters.settle(reservation.accounts, nano(cost), ticket.holder)
            self.booked += cost

    def count_hit(self, ticket: Ticket, entry: Entry) -> None:
        """An answer from the cache, where its tokens shall count."""
        if not ticket.tenant.policy.limits.count_hits:
            return
        usage = openai_chat.answer_from_json(entry.body).usage
        if usage is not None:
            used = usage.prompt + usage.completion
            changes = [(limit, used) for limit in ticket.limits if limit.kind == "tokens"]
            self._counters.give(changes, ticket.at, ticket.holder)

    def leave(self, ticket: Ticket) -> None:
        """A request is over."""
        held = [(limit, -1) for limit in ticket.limits if limit.kind == "concurrency"]
        if held:
            self._counters.give(held, ticket.at, ticket.holder)

    async def standing(self, tenant: Tenant) -> list[dict[str, Any]]:
        """What a tenant has spent of its budgets, in dollars."""
        budget = tenant.policy.budget
        accounts = () if budget is None else budgets.accounts(tenant.name, budget, time.time())
        spent = await self._counters.spent(accounts)
        return [
            {"period": one.key.rpartition("|")[2], "limit": one.limit / 1e9, "spent": booked / 1e9, "held": held / 1e9}
            for one, (booked, held) in zip(accounts, spent, strict=True)
        ]

    async def _is_spent(self, tenant: Tenant, budget: Budget) -> bool:
        accounts = budgets.accounts(tenant.name, budget, time.time())
        spent = await self._counters.spent(accounts)
        return any(booked + held >= one.limit for one, (booked, held) in zip(accounts, spent, strict=True))


def _refuse(states: Sequence[State], shown: Sequence[State], detail: str) -> None:
    """Raise `Limited` if one of these limits does not allow it."""
    worst = max((state for state in states if state.wait > 0), key=lambda state: state.wait, default=None)
    if worst is None:
        return
    limit = worst.limit
    _, _, whose = limit.subject.partition("|")
    of = f" of {whose.replace('|', ' ', 1)}" if whose else ""
    span = {0.0: " at once", 60.0: " a minute", 86400.0: " a day"}.get(limit.window, "")
    what = "requests" if limit.kind == "concurrency" else limit.kind
    message = f"limit reached: {limit.limit} {what}{span}{of}{detail}"
    if math.isinf(worst.wait):
        raise Limited(f"{message}; this request is larger than the whole limit", limit.window, list(shown))
    raise Limited(f"{message}; again in {worst.wait:.1f} s", worst.wait, list(shown))


def _spent(tenant: Tenant, budget: Budget) -> BudgetSpent:
    limits = [
        f"{amount:f} USD a {span}" for amount, span in ((budget.per_day, "day"), (budget.per_month, "month")) if amount
    ]
    return BudgetSpent(f"the budget of {tenant.name} is spent ({' and '.join(limits)})")
