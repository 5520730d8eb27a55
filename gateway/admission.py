"""May this tenant have this now? Limits and budgets: what a request will use is reserved before, and settled after.

Requests and concurrency are asked for at the door; tokens and money only where an answer must be computed, so that what
is stored still serves whoever has nothing left.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from typing import Any

import orjson

from backends.dialects import openai_chat
from backends.protocol import Reply, Usage, content_type
from gateway.ask import EVENT_BYTES, FREE, Ask
from gateway.books import Bill, Books, charges
from gateway.dispatch import Dispatch, Dispatched, Told
from gateway.errors import BudgetSpent, Limited
from gateway.exchange import Incoming, Served, Ticket
from gateway.stores.contract import CounterStore, Entry, Taken
from gateway.tenant import Tenant
from policies import budget as budgets
from policies.budget import Account, Budget, Downgrade
from policies.pricing import nano
from policies.rate_limit import Limit, State

log = logging.getLogger("hitherto.admission")

_PROCESS = f"{os.getpid()}-{time.time_ns():x}"
_numbers = itertools.count()


@dataclass(slots=True)
class Reservation:
    """Tokens and money that are held for one computation."""

    holder: str
    limits: Sequence[tuple[Limit, int]] = ()
    """Of tokens, and how many are taken of each."""
    taken: Taken = Taken(0.0)
    accounts: Sequence[Account] = ()


class Admission:
    """The door, and the till."""

    def __init__(self, counters: CounterStore, books: Books, dispatch: Dispatch) -> None:
        self._counters, self.books, self._dispatch = counters, books, dispatch

    async def afford(self, request: Incoming) -> tuple[bytes, bool]:
        """The body, with a cheaper model's name where the budget is spent and says so. Raises `BudgetSpent`."""
        tenant, body = request.tenant, request.body
        budget = tenant.policy.budget
        if budget is None or not isinstance(budget.when_spent, Downgrade) or not await self._is_spent(tenant, budget):
            return body, False
        try:
            model = orjson.loads(body)["model"]
        except (ValueError, TypeError, KeyError):
            model = None
        if not isinstance(model, str):
            raise _spent(tenant, budget)  # there is no name that could be another's
        request.model = model
        return openai_chat.with_model(body, budget.when_spent.downgrade), True

    async def enter(
        self, request: Incoming, user: str, model: str, downgraded: bool = False, tags: tuple[str, ...] = ()
    ) -> Ticket:
        """Take one request of every limit that it meets. Raises `Limited` or `BudgetSpent`."""
        tenant, about = request.tenant, (request.id, user, request.surface, tags)
        request.model = request.model or model
        if not tenant.policy.limited:
            request.ticket = Ticket(tenant, (), [], Taken(0.0), "", downgraded, *about)
            return request.ticket
        holder = f"{_PROCESS}-{next(_numbers)}"
        budget = tenant.policy.budget
        if budget is not None and budget.when_spent == "reject" and await self._is_spent(tenant, budget):
            raise _spent(tenant, budget)
        limits = tenant.limits(user, model)
        ticket = Ticket(tenant, limits, [], Taken(0.0), holder, downgraded, *about)
        wanted = [(limit, 0 if limit.kind == "tokens" else 1) for limit in limits]
        ticket.states, ticket.taken = await self._counters.take(wanted, holder)
        _refuse([state for state in ticket.states if state.limit.kind != "tokens"], ticket.states, "")
        if any(state.wait for state in ticket.states):  # of tokens, but of them nothing is asked for yet
            wanted = [(limit, 1) for limit in limits if limit.kind != "tokens"]
            states, ticket.taken = await self._counters.take(wanted, holder)
            _refuse(states, ticket.states, "")
        request.ticket = ticket
        return ticket

    async def open(self, ticket: Ticket, ask: Ask, relay: tuple[str, str] | None = None) -> Dispatched:
        """Have a request computed, with what it will probably need held until it is known; `relay`: (backend, method)
        where it is passed on as it is. Raises `Limited`, `BudgetSpent`, or what `Dispatch` raises."""
        computed = self._dispatch.open(ask) if relay is None else self._dispatch.relay(*relay, ask)
        bill, reservation = Bill(ask, ticket), Reservation(f"{ticket.holder}-{next(_numbers)}")
        ticket.bills.append(bill)
        try:
            if ticket.tenant.policy.limited:
                await self._reserve(ticket, ask, "" if relay is None else relay[0], reservation)
            dispatched = await computed
        except BaseException:
            # Whom it was sent to has probably read the prompt by now, whether anybody still waits or not.
            self._settle(reservation, bill, None)
            raise
        finally:
            computed.close()  # where it was not begun
        bill.backend, bill.priced = dispatched.backend, dispatched.priced
        dispatched.settle = partial(self._ended, reservation, bill, dispatched)
        return dispatched

    def _ended(
        self, reservation: Reservation, bill: Bill, dispatched: Dispatched, told: Told
    ) -> list[tuple[bytes, bytes]]:
        """A response was read to its end, or given up: what it cost, as headers."""
        ask, usage, estimated = bill.ask, told.usage, not told.whole
        if dispatched.reply.status != 200 or dispatched.failed or ask.path in FREE:
            usage = None
        elif usage is None and (told.size or ask.model):  # broken off, or not told: what it looks like
            answer, estimated = _looks_like(ask, dispatched.reply, told) if told.size else 0, True
            usage = self.books.guess(ask, dispatched.priced, answer)
        self._settle(reservation, bill, usage, estimated, dispatched.load)
        cost = charges(bill, self.books.lookup_cost(bill.ticket))
        dispatched.settle = lambda told: cost
        return cost

    async def _reserve(self, ticket: Ticket, ask: Ask, backend: str, reservation: Reservation) -> None:
        """Take what a computation will probably need. Raises `Limited` or `BudgetSpent`."""
        tenant, prompt, answer = ticket.tenant, ask.prompt_tokens, ask.answer_tokens
        # An answer's length is a guess: what would not fit into the whole limit takes all of it, and is settled.
        wanted = []
        for limit in (limit for limit in ticket.limits if limit.kind == "tokens"):
            most = self._counters.share(limit)
            fits = prompt <= limit.limit
            wanted.append((limit, min(prompt + answer, most) if fits else prompt))
        budget = tenant.policy.budget
        if wanted:
            states, taken = await self._counters.take(wanted, reservation.holder)
            others = [state for state in ticket.states if state.limit.kind != "tokens"]
            ticket.states = [*others, *states]
            _refuse(states, ticket.states, f" (about {prompt + answer} are needed)")
            reservation.limits, reservation.taken = wanted, taken
        if budget is not None:
            accounts = budgets.accounts(tenant.name, budget, time.time())
            cost = self.books.cost(self._dispatch.priced(ask, backend), Usage(prompt, answer)) or Decimal(0)
            reservation.accounts = accounts
            if ticket.downgraded or isinstance(budget.when_spent, Downgrade):  # which goes on, with another model
                accounts = tuple(Account(one.key, 2**53, one.ends) for one in accounts)
            if await self._counters.reserve(accounts, nano(cost), reservation.holder) is not None:
                raise _spent(tenant, budget)

    def _settle(
        self, reservation: Reservation, bill: Bill, usage: Usage | None, estimated: bool = False, load: int = 1
    ) -> None:
        """Close a bill, and correct its reservation by what was really used; None: nothing."""
        if bill.ask.path in FREE:
            bill.ask.tries.clear()
        self.books.price(bill, usage, estimated, load)
        used = 0 if usage is None else usage.prompt + usage.completion
        changes = [(limit, used - amount) for limit, amount in reservation.limits if used != amount]
        if changes:
            self._counters.give(changes, reservation.taken, reservation.holder)
        if reservation.accounts:
            self._counters.settle(reservation.accounts, nano(bill.total), reservation.holder)
        self.books.close(bill)

    def hit(self, ticket: Ticket, ask: Ask, entry: Entry, served: Served) -> None:
        """An answer from the cache: what it saves is told, and its tokens count where they shall."""
        self.books.hit(ticket, ask, self._dispatch.priced(ask), entry, served)
        if ticket.tenant.policy.limits.count_hits and served.avoided is not None:
            used = served.avoided.prompt + served.avoided.completion
            changes = [(limit, used) for limit in ticket.limits if limit.kind == "tokens"]
            self._counters.give(changes, ticket.taken, ticket.holder)

    def leave(self, ticket: Ticket) -> None:
        """A request is over."""
        if ticket.limits and (held := [(limit, -1) for limit in ticket.limits if limit.kind == "concurrency"]):
            self._counters.give(held, ticket.taken, ticket.holder)

    async def standing(self, tenants: Iterable[Tenant]) -> dict[str, list[dict[str, Any]]]:
        """What tenants have spent of their budgets, in dollars; of those that have some."""
        accounts: list[Account] = []
        owners: list[str] = []
        for tenant in tenants:
            if tenant.policy.budget is not None:
                mine = budgets.accounts(tenant.name, tenant.policy.budget, time.time())
                accounts += mine
                owners += [tenant.name] * len(mine)
        found: dict[str, list[dict[str, Any]]] = {}
        for owner, one, (booked, held) in zip(owners, accounts, await self._counters.spent(accounts), strict=True):
            period = one.key.rpartition("|")[2]
            amounts = {"limit": one.limit / 1e9, "spent": booked / 1e9, "held": held / 1e9}
            found.setdefault(owner, []).append({"period": period, **amounts})
        return found

    def price_of(self, model: str) -> dict[str, Any] | None:
        """What a model costs, per million tokens and in dollars; None where nobody knows."""
        return self.books.prices.told(*self._dispatch.priced_by_name(model))

    async def is_spent(self, tenant: Tenant) -> bool:
        """Whether a tenant has a budget and nothing left of it."""
        return tenant.policy.budget is not None and await self._is_spent(tenant, tenant.policy.budget)

    async def _is_spent(self, tenant: Tenant, budget: Budget) -> bool:
        return any(booked + held >= one.limit for one, booked, held in await self._accounts(tenant, budget))

    async def _accounts(self, tenant: Tenant, budget: Budget) -> list[tuple[Account, int, int]]:
        """The accounts of now, each with what is booked and held on it."""
        accounts = budgets.accounts(tenant.name, budget, time.time())
        spent = await self._counters.spent(accounts)
        return [(one, *amounts) for one, amounts in zip(accounts, spent, strict=True)]


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


def _looks_like(ask: Ask, reply: Reply, told: Told) -> int:
    """Tokens of an answer that did not tell them; what is no text has none."""
    if not ask.answers_in_text:
        return 0
    kind = content_type(reply.headers)
    if b"event-stream" in kind:
        return told.deltas or max(1, told.size // EVENT_BYTES)
    return max(1, min(told.size, 1 << 20) // 4) if b"json" in kind else 0
