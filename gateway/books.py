"""Booking: what a computation took and cost, what a stored answer saved, and the ledger's rows of both."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal

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
HITS = frozenset({"exact", "semantic", "alias", "stale"})

Priced = tuple[str, str, str]
"""What a price depends on: the model at the backend, the kind of backend, its URL."""


@dataclass(slots=True)
class Bill:
    """One computation, and at its end what it took."""

    ask: Ask
    ticket: Ticket
    began: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
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
        return sum((cost or Decimal(0) for _, _, cost in self.lost), self.cost or Decimal(0))


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

    def close(self, bill: Bill, usage: Usage | None, estimated: bool, load: int = 1) -> None:
        """A computation is over; `load`: how many shared its place. What its request has not told, is booked now."""
        bill.over, bill.usage, bill.estimated = True, usage, estimated
        if usage is not None:
            seconds = (time.monotonic() - bill.started) / max(1, load)
            bill.cost = self.cost(bill.priced, usage, seconds)
            if bill.cost is not None:
                self.prices.took(*bill.priced, usage, seconds)
            bill.cold = self._cold(bill.priced, usage) if bill.cost is not None else None
            if not estimated:
                self._learn(bill.ask, bill.priced, usage)
        for tried in bill.ask.tries:
            if tried.spent:
                same = usage is not None and not estimated and tried.priced[0] == bill.priced[0]
                if same and usage is not None:  # it has read the same prompt, and probably found the same of it cached
                    lost = Usage(usage.prompt, 0, usage.cached)
                else:
                    lost = self.guess(bill.ask, tried.priced, 0)
                bill.lost.append((tried, lost, self.cost(tried.priced, lost)))
        if bill.ticket.told:
            self._book_late(bill)

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
        return self.prices.lookup(*ticket.looked) if ticket.looked[0] else Decimal(0)

    def refused(self, request: Incoming, status: int, reason: str, seconds: float) -> Booking:
        """Book a request of a known tenant that got an error of ours."""
        row = self._row(request.tenant.name, request.tenant.key, request, time.time() - seconds)
        row.status, row.reason, row.asked, row.seconds = status, reason, request.model, seconds
        if request.ticket is not None:
            row.user, row.lookup = request.ticket.user, nano(self.lookup_cost(request.ticket))
            row.cost, row.saved_answer = row.lookup, -row.lookup
            self._attempts(request.ticket)
            request.ticket.told = True
        self._add(row)
        return row

    def answered(self, request: Incoming, served: Served, status: int, seconds: float) -> Booking:
        """Book a request and what it got."""
        ticket = request.ticket
        row = self._row(served.tenant, request.tenant.key, request, time.time() - seconds)
        row.asked = row.model = served.model or request.model
        row.backend, row.cache, row.reason = served.backend, served.cache, served.reason
        row.stored, row.status, row.stream = served.stored, status, served.stream
        row.entry, row.similarity = served.entry, served.similarity
        row.ttft = served.first - served.started if served.first is not None else None
        row.seconds = seconds
        if ticket is not None:
            row.user, row.tags = ticket.user, ticket.tags
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
        return row

    def _avoided(self, served: Served) -> tuple[Usage | None, Priced]:
        """What a stored or a shared answer made unnecessary."""
        leader = served.leader
        if leader is None:
            return served.avoided, served.priced
        used = leader.answer.usage if leader.answer is not None else None
        return used or leader.avoided, leader.priced

    def _attempts(self, ticket: Ticket) -> list[Bill]:
        """Book what came to nothing; the computations of a request that are over, the last of them for its answer."""
        bills = [bill for bill in ticket.bills if bill.over and not bill.booked]
        for bill in bills:
            bill.booked = True
            self._book_lost(bill)
        for bill in bills[:-1]:
            if bill.usage is not None:
                self._add(self._part(bill, "attempt", "again"))
        return [bill for bill in bills[-1:] if bill.usage is not None]

    def _book_late(self, bill: Bill) -> None:
        bill.booked = True
        self._book_lost(bill)
        if bill.usage is not None:
            self._add(self._part(bill, "late", "background"))

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
        row = Booking(bill.began, ticket.tenant.name, part, ticket.request, ticket.tenant.key, ticket.user)
        row.surface, row.asked, row.reason, row.cache = ticket.surface, bill.ask.model, reason, "none"
        row.model, row.backend, row.tags = bill.ask.model, bill.backend, ticket.tags
        row.stream, row.seconds = bill.ask.stream, time.time() - bill.began
        row.cost = 0
        if bill.usage is not None:
            _computed(row, bill)
        return row

    def _row(self, tenant: str, key: str, request: Incoming, began: float) -> Booking:
        return Booking(began, tenant, "answer", request.id, key, surface=request.surface)

    def _add(self, row: Booking) -> None:
        self.ledger.add(row)
        self._metrics.count_money(row)

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
    cached = max(0, min(usage.cached or 0, usage.prompt))
    row.prompt, row.completion = max(0, usage.prompt), max(0, usage.completion)
    row.cached, row.written = cached, max(0, min(usage.written or 0, usage.prompt - cached))
    row.sources = dict(usage.sources) if bill.priced[1] == "engine" else {"upstream": cached} if cached else {}
    row.estimated = row.estimated or bill.estimated
    row.model, row.backend = bill.priced[0] or row.model, bill.backend
    if bill.cost is None:
        row.cost = None
    else:
        row.cost = (row.cost or 0) + nano(bill.cost)
        row.saved_prefix = nano(bill.cold) - nano(bill.cost) if bill.cold is not None else 0


def charges(bills: Sequence[Bill], lookup: Decimal) -> list[tuple[bytes, bytes]]:
    """Headers that tell what a request cost so far, and what cached prefixes saved; none where nobody knows."""
    if any(bill.cost is None or bill.usage is None for bill in bills):
        return []
    saved = sum(((bill.cold or Decimal(0)) - (bill.cost or Decimal(0)) for bill in bills), Decimal(0)) - lookup
    spent = sum((bill.total for bill in bills), lookup)
    return [(b"x-hitherto-cost-usd", dollars(spent)), (b"x-hitherto-saved-usd", dollars(saved))]


def dollars(amount: Decimal) -> bytes:
    """As headers tell it."""
    return f"{amount:.9f}".encode()
