"""Booking: what a computation took and cost, what a stored answer saved, and the ledger's rows of both."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

from backends.dialects import openai_chat
from backends.protocol import Usage
from gateway.ask import Ask, Try
from gateway.exchange import Incoming, Served, Ticket
from gateway.ledger import Ledger
from gateway.metrics import Metrics
from gateway.prices import Prices
from gateway.stores.contract import Booking, Entry
from policies.pricing import nano

log = logging.getLogger("hitherto.books")

_REMEMBERED = 4096
NAME_MOST = 200
"""Characters of a name that a caller chooses."""

MONEY_MOST = 10**15
"""A million dollars for one answer: what a provider tells of its tokens may be absurd, and sums must not overflow."""
NOTHING = Decimal(0)
Priced = tuple[str, str, str]
"""What a price depends on: the model at the backend, the kind of backend, its URL."""


@dataclass(slots=True)
class Bill:
    """One computation, and at its end what it took."""

    ask: Ask
    ticket: Ticket
    began: float = field(default_factory=time.time)
    backend: str = ""
    priced: Priced = ("", "", "")
    usage: Usage | None = None
    estimated: bool = False
    cost: Decimal | None = Decimal(0)
    cold: Decimal | None = Decimal(0)
    lost: list[tuple[Try, Usage, Decimal | None]] = field(default_factory=list)
    """Tries that came to nothing and may be charged all the same."""
    over: bool = False
    booked: bool = False

    @property
    def total(self) -> Decimal:
        """Dollars, with those of lost tries, as far as prices are known."""
        total = self.cost or NOTHING
        for _, _, cost in self.lost:
            total += cost or NOTHING
        return total


class Books:
    """Knows prices, and writes the ledger and the series of money."""

    def __init__(self, prices: Prices, ledger: Ledger, metrics: Metrics) -> None:
        self.prices, self.ledger, self._metrics = prices, ledger, metrics
        self._habits: dict[Priced, tuple[float, float, float]] = {}
        """By model, of its latest prompts: tokens that were guessed, that were told, and of these cached."""
        self._usages: OrderedDict[tuple[bytes, float], Usage] = OrderedDict()

    def cost(self, priced: Priced, usage: Usage, seconds: float = 0.0) -> Decimal | None:
        """Dollars; None where nobody knows a price, or it cannot be computed: that must not keep anything held."""
        try:
            return self.prices.cost(*priced, usage, seconds)
        except Exception:
            log.exception("what %s costs could not be computed", priced[0])
            return None

    def guess(self, ask: Ask, priced: Priced, completion: int) -> Usage:
        """What a model has probably read of a request, and found cached of it, by what it told of others."""
        guessed, told, cached = self._habits.get(priced, (1.0, 1.0, 0.0))
        prompt = max(1, round(ask.prompt_tokens * told / guessed))
        return Usage(prompt, completion, round(prompt * cached / told))

    def price(self, bill: Bill, usage: Usage | None, estimated: bool, load: int = 1) -> None:
        """What a computation that is over took, and what its lost tries did; `load`: how many shared its place."""
        self._surely(self._price, bill, usage, estimated, load)

    def _price(self, bill: Bill, usage: Usage | None, estimated: bool, load: int) -> None:
        bill.over, bill.usage, bill.estimated = True, usage, estimated
        tries = bill.ask.tries
        if usage is not None:
            answered = next((tried for tried in reversed(tries) if not tried.outcome), None)
            seconds = answered.seconds / max(1, load) if answered is not None else 0.0
            bill.cost = self.cost(bill.priced, usage, seconds)
            bill.cold = bill.cost
            if bill.cost is not None and (usage.cached or usage.written):
                bill.cold = self._uncached(bill.priced, usage, bill.cost)
            if bill.cost is not None and self.prices.is_by_time(bill.priced):
                self.prices.took(*bill.priced, usage, seconds)
            if not estimated:
                self._learn(bill.ask, bill.priced, usage)
        for tried in tries:
            if tried.spent:
                if usage is not None and not estimated and tried.priced[0] == bill.priced[0]:
                    # It has read the same prompt, and probably found the same of it cached.
                    lost = Usage(usage.prompt, 0, max(0, min(usage.cached or 0, usage.prompt)))
                else:
                    lost = self.guess(bill.ask, tried.priced, 0)
                bill.lost.append((tried, lost, self.cost(tried.priced, lost, tried.seconds)))

    def close(self, bill: Bill) -> None:
        """Book a computation whose request has its row already."""
        if bill.ticket.told:
            self._surely(self._book_late, bill)

    def hit(self, ticket: Ticket, ask: Ask, priced: Priced, entry: Entry, served: Served) -> None:
        """A stored answer is served: what it saves."""
        usage = self.usage_of(entry, ask)
        served.avoided, served.priced, served.entry = usage, priced, entry.key.hex()
        served.source = entry.backend
        self.tell_saving(ticket, served)

    def tell_saving(self, ticket: Ticket, served: Served) -> None:
        """Headers that tell what a stored answer cost and saves."""
        cold, lookup = self._cold(served.priced, served.avoided or Usage(0, 0)), self.lookup_cost(ticket)
        served.headers.append((b"x-hitherto-cost-usd", dollars(lookup)))
        if cold is not None:
            served.headers.append((b"x-hitherto-saved-usd", dollars(cold - lookup)))

    def usage_of(self, entry: Entry, ask: Ask) -> Usage:
        """The tokens of a stored answer; guessed where it does not tell them."""
        key = entry.key, entry.created
        usage = self._usages.get(key)
        if usage is None:
            told = openai_chat.answer_from_json(entry.body).usage
            usage = told or Usage(ask.prompt_tokens, len(entry.body) // 4)
            self._usages[key] = usage
            if len(self._usages) > _REMEMBERED:
                self._usages.popitem(last=False)
        return usage

    def lookup_cost(self, ticket: Ticket) -> Decimal:
        """Dollars of looking for similar questions."""
        return self.prices.lookup(*ticket.looked) if ticket.looked[0] else NOTHING

    def refused(self, request: Incoming, status: int, reason: str, seconds: float) -> Booking:
        """Book a request of a known tenant that got an error of ours."""
        row = self._row(request.tenant.name, request.tenant.key, request, time.time() - seconds)
        row.status, row.reason, row.asked, row.seconds = status, reason, request.model[:NAME_MOST], seconds
        self._surely(self._refused, request, row)
        return row

    def _refused(self, request: Incoming, row: Booking) -> None:
        if request.ticket is not None:
            row.user, row.lookup = request.ticket.user, nano(self.lookup_cost(request.ticket))
            row.cost, row.saved_answer, row.tags = row.lookup, -row.lookup, request.ticket.tags
            if bills := self._attempts(request.ticket):  # it was computed, and then something went wrong
                _computed(row, bills[-1])
            request.ticket.told = True
        self._add(row)

    def answered(self, request: Incoming, served: Served, status: int, seconds: float) -> Booking:
        """Book a request and what it got."""
        row = self._row(served.tenant, request.tenant.key, request, time.time() - seconds)
        self._surely(self._answered, request, served, status, seconds, row)
        return row

    def _answered(self, request: Incoming, served: Served, status: int, seconds: float, row: Booking) -> None:
        ticket = request.ticket
        row.asked = (request.model or served.model)[:NAME_MOST]
        row.model = served.model[:NAME_MOST]
        row.backend, row.cache, row.reason = served.backend, served.cache, served.reason
        row.stored, row.status, row.stream = served.stored, status, served.stream
        if served.leader is not None and served.leader.stored == "interrupted":
            row.stored = "interrupted"
        row.entry, row.similarity = served.entry, served.similarity
        row.ttft = served.first - served.started if served.first is not None else None
        row.seconds = seconds
        if ticket is not None:
            row.user, row.tags = ticket.user, ticket.tags
            if ticket.looked[0]:
                row.lookup = nano(self.lookup_cost(ticket))
        row.cost, row.saved_answer = row.lookup, -row.lookup
        avoided, priced = self._avoided(served)
        if avoided is not None:
            cold = self._cold(priced, avoided)
            row.avoided_prompt, row.avoided_completion = avoided.prompt, avoided.completion
            row.saved_answer += nano(cold) if cold is not None else 0
            row.model, row.backend = priced[0] or row.model, row.backend or served.source
        bills = self._attempts(ticket) if ticket is not None else []
        if bills:
            _computed(row, bills[-1])
        if ticket is not None:
            ticket.told = True
        self._add(row)

    def _avoided(self, served: Served) -> tuple[Usage | None, Priced]:
        """What a stored or a shared answer made unnecessary."""
        leader = served.leader
        if leader is None:
            return served.avoided, served.priced
        used = leader.answer.usage if leader.answer is not None else None
        return used or leader.avoided, leader.priced

    def _attempts(self, ticket: Ticket) -> list[Bill]:
        """Book what came to nothing; the computations of a request that are over, the last of them for its answer."""
        bills = [bill for bill in ticket.bills if bill.over and not bill.booked] if ticket.bills else []
        ticket.bills.clear()  # they know it: a cycle would keep both until the garbage collector comes
        for bill in bills:
            bill.booked = True
            self._book_lost(bill)
        for bill in bills[:-1]:
            if bill.usage is not None:
                self._add(self._part(bill, "attempt", "again"))
        return bills[-1:] if bills and bills[-1].usage is not None else []

    def _book_late(self, bill: Bill) -> None:
        bill.booked = True
        self._book_lost(bill)
        if bill.usage is not None:
            self._add(self._part(bill, "late", bill.ticket.behind or "background"))

    def _book_lost(self, bill: Bill) -> None:
        for tried, usage, cost in bill.lost:
            row = self._part(bill, "attempt", tried.outcome)
            row.backend, row.model = tried.backend, tried.priced[0]
            row.prompt, row.completion, row.cached, row.written = usage.prompt, 0, usage.cached or 0, 0
            row.sources = {}
            row.estimated, row.cost, row.saved_prefix = True, None if cost is None else nano(cost), 0
            self._add(row)

    def _part(self, bill: Bill, part: str, reason: str) -> Booking:
        ticket = bill.ticket
        row = Booking(bill.began, ticket.tenant.name, part, ticket.request[:NAME_MOST], ticket.tenant.key, ticket.user)
        asked = bill.ask.model[:NAME_MOST]
        row.surface, row.asked, row.reason, row.cache = ticket.surface, asked, reason, "none"
        row.model, row.backend, row.tags = asked, bill.backend, ticket.tags
        row.stream, row.seconds = bill.ask.stream, time.time() - bill.began
        row.cost = 0
        if bill.usage is not None:
            _computed(row, bill)
        return row

    def _surely(self, book: Callable[..., None], *arguments: Any) -> None:
        """A fault in booking is counted, and no request's matter."""
        try:
            book(*arguments)
        except Exception:
            self._metrics.faults.labels("ledger").inc()
            log.exception("a row of the ledger was lost")

    def _row(self, tenant: str, key: str, request: Incoming, began: float) -> Booking:
        return Booking(began, tenant, "answer", request.id[:NAME_MOST], key, surface=request.surface)

    def _add(self, row: Booking) -> None:
        if row.cost is not None:
            row.cost = min(row.cost, MONEY_MOST)
        row.saved_answer = max(-MONEY_MOST, min(row.saved_answer, MONEY_MOST))
        row.saved_prefix = max(-MONEY_MOST, min(row.saved_prefix, MONEY_MOST))
        self.ledger.add(row)
        self._metrics.count_money(row)

    def _uncached(self, priced: Priced, usage: Usage, cost: Decimal) -> Decimal | None:
        """What an answer would have cost without what was cached of its prompt."""
        if self.prices.is_by_time(priced):
            return cost + self.prices.by_time(priced, usage.cached or 0)
        return self._cold(priced, usage)

    def _cold(self, priced: Priced, usage: Usage) -> Decimal | None:
        try:
            return self.prices.cold(*priced, usage)
        except Exception:
            log.exception("what %s costs could not be computed", priced[0])
            return None

    def _learn(self, ask: Ask, priced: Priced, usage: Usage) -> None:
        if usage.prompt:
            if len(self._habits) >= _REMEMBERED:  # names of models come from callers
                self._habits.clear()
            guessed, told, cached = self._habits.get(priced, (0.0, 0.0, 0.0))
            found = min(max(0, usage.cached or 0), usage.prompt)
            old = 0.98  # long prompts count for more than short ones, and new ones for more than old ones
            self._habits[priced] = (
                old * guessed + ask.prompt_tokens, old * told + usage.prompt, old * cached + found,
            )  # fmt: skip


def _computed(row: Booking, bill: Bill) -> None:
    """What a computation took, into its row."""
    usage = bill.usage
    assert usage is not None
    cached = max(0, min(usage.cached, usage.prompt)) if usage.cached else 0
    row.prompt, row.completion, row.cached = usage.prompt, usage.completion, cached
    row.written = max(0, min(usage.written, usage.prompt - cached)) if usage.written else 0
    row.sources = dict(usage.sources) if bill.priced[1] == "engine" else {"upstream": cached} if cached else {}
    row.estimated = row.estimated or bill.estimated
    row.model, row.backend = bill.priced[0] or row.model, bill.backend
    if bill.cost is None:
        row.cost = None
    else:
        cost = nano(bill.cost)
        row.cost = (row.cost or 0) + cost
        if bill.cold is not None and bill.cold is not bill.cost:
            row.saved_prefix = nano(bill.cold) - cost


def charges(bill: Bill, lookup: Decimal) -> list[tuple[bytes, bytes]]:
    """Headers that tell what a computation cost, and what cached prefixes saved; none where nobody knows."""
    if bill.cost is None or bill.usage is None:
        return []
    saved = NOTHING if bill.cold is None or bill.cold is bill.cost else bill.cold - bill.cost
    return [
        (b"x-hitherto-cost-usd", dollars(bill.total + lookup)),
        (b"x-hitherto-saved-usd", dollars(saved - lookup)),
    ]


def dollars(amount: Decimal) -> bytes:
    """As headers tell it."""
    return f"{amount:.9f}".encode()
