"""What is known of the semantic tier's hits: which were right, and how sure the verifier must therefore be.

Evidence is each tenant's own: what one tenant asks, or reports, moves no other's limit.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.cache.question import Question
from gateway.stores.contract import Observation
from policies import risk
from policies.risk import Pool, Seen

POOLS = 10_000
"""So many tenants, scopes and entries are told apart; those that were of use longest ago are forgotten."""
OF_AN_ENTRY = 64
"""So many observations of one entry are remembered."""
HITS = 20_000
"""So many requests are remembered with the stored answer that they got."""
LONGEST_ID = 200
RATES = (0.005, 0.01, 0.02, 0.05, 0.1)
"""What a report tells of."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer that a request got."""

    tenant: str
    asked: bytes
    """The key of its question."""
    entry: bytes
    group: bytes
    created: float
    """When the answer was stored: what is said later about another one under the same key is not about it."""
    score: float | None
    """None where the question was the entry's own."""


class Hits:
    """Which stored answers requests got lately, for whoever reports on them."""

    def __init__(self) -> None:
        self._hits: OrderedDict[tuple[str, str], Hit] = OrderedDict()

    def served(self, request: str, hit: Hit) -> None:
        """Remember which answer a request got, in case somebody says something about it."""
        if len(request) <= LONGEST_ID:
            self._hits[hit.tenant, request] = hit
            if len(self._hits) > HITS:
                self._hits.popitem(last=False)

    def reported(self, tenant: str, request: str) -> Hit | None:
        """The answer that a tenant's request got; once, so that a report that is sent twice counts once."""
        return self._hits.pop((tenant, request), None)


@dataclass(slots=True)
class Tenant:
    """One tenant's evidence, and what it has asked since the start."""

    pool: Pool = field(default_factory=Pool)
    version: int = 0
    counts: Counter[tuple[str, bool | None]] = field(default_factory=Counter)
    """(source, right) → observations."""
    lookups: int = 0
    """Semantic lookups since the start of this process."""
    scored: int = 0
    """Of these, how many had a candidate that no guard refused."""
    best: list[float] = field(default_factory=list)
    """The best score of each of the last of those."""


class Evidence:
    """Observations of one gateway process, in pools: everything of a tenant, a scope class, an entry."""

    def __init__(self, calibration: Sequence[tuple[float, bool]], judge: str) -> None:
        """`calibration`: scores of labelled pairs; `judge`: whose scores count."""
        self._calibration = [Seen(score, same) for score, same in calibration]
        self.judge = judge
        self._tenants: OrderedDict[str, Tenant] = OrderedDict()
        self._groups: OrderedDict[tuple[str, bytes], Pool] = OrderedDict()
        self._entries: OrderedDict[bytes, deque[bool]] = OrderedDict()
        self._locked: set[bytes] = set()
        self._limits: dict[tuple[str, float, float], tuple[int, float]] = {}
        self._tested: dict[float, float] = {}
        self._marks: OrderedDict[tuple[float, bytes, bytes], None] = OrderedDict()
        """What was taken in lately: the store tells again what we have told it."""
        self.number = 0
        """The newest observation that was read from the store."""
        self.since = time.time()

    def add(self, observation: Observation, of_this_answer: bool = True) -> None:
        """Take in what was observed, here or elsewhere, once; of an entry only if it is about its present answer."""
        mark = observation.at, observation.asked, observation.entry
        if mark in self._marks:
            return
        self._marks[mark] = None
        if len(self._marks) > 2 * POOLS:
            self._marks.popitem(last=False)
        tenant: Tenant = _kept(self._tenants, observation.tenant, Tenant)
        tenant.counts[observation.source, observation.right] += 1
        if observation.judge != self.judge:
            return
        seen, reported = Seen(observation.score, observation.right), observation.source == "feedback"
        if reported and observation.right:
            return  # who is content seldom says so
        if observation.entry not in self._locked:  # one that nobody gets says nothing of what is served
            if not reported:  # which is no sample of anything
                tenant.pool.add(seen)
            _kept(self._groups, (observation.tenant, observation.group), Pool).add(seen)
        tenant.version += 1
        if of_this_answer and observation.right is not None:
            _kept(self._entries, observation.entry, _of_an_entry).append(observation.right)

    def forget(self, entry: bytes) -> None:
        """An entry was replaced: what was known of it says nothing about the new answer."""
        self._entries.pop(entry, None)
        self._locked.discard(entry)

    def locked(self, question: Question, entry: bytes) -> bool:
        """Whether an entry has been wrong too often to serve anybody."""
        known = self._entries.get(entry)
        if known is None:
            return False
        self._entries.move_to_end(entry)
        locked = risk.locked(question.rules.max_wrong_rate, known)
        if locked and len(self._locked) < POOLS:
            self._locked.add(entry)
        return locked

    def limit(self, question: Question, group: bytes, entry: bytes, least: float) -> float:
        """The score that this entry must reach to serve this question; `least`: where there is no calibration."""
        rate, name = question.rules.max_wrong_rate, question.tenant
        tenant, first = self._tenants.get(name), self._first(rate, least)
        if tenant is None:
            return first
        if self.locked(question, entry):
            return risk.NEVER
        version, everywhere = self._limits.get((name, rate, first), (-1, 0.0))
        if version != tenant.version:
            if len(self._limits) > POOLS:
                self._limits.clear()
            everywhere = risk.everywhere(rate, first, tenant.pool)
            self._limits[name, rate, first] = tenant.version, everywhere
        return risk.narrowed(rate, everywhere, self._groups.get((name, group)), ())

    def looked(self, tenant: str, best: float | None) -> None:
        """A semantic lookup: the best score of its candidates, if one was scored."""
        known: Tenant = _kept(self._tenants, tenant, Tenant)
        known.lookups += 1
        if best is not None:
            known.scored += 1
            known.best.append(best)
            if len(known.best) > 2 * risk.MOST:
                del known.best[: risk.MOST]

    def report(self, tenant: str, rate: float, least: float) -> dict[str, Any]:
        """What is known of a tenant's hits, and what each `max_wrong_rate` would serve. `rate`: the one in force."""
        known = self._tenants.get(tenant, Tenant())
        rows = []
        for each in sorted({*RATES, rate}):
            limit = risk.everywhere(each, self._first(each, least), known.pool)
            inside = [one for one in known.pool.seen if one.score >= limit and one.right is not None]
            wrong = sum(not one.right for one in inside)
            rows.append(
                {
                    "max_wrong_rate": each,
                    "in_force": each == rate,
                    "limit": None if limit == risk.NEVER else round(limit, 3),
                    "served": sum(score >= limit for score in known.best)
                    / max(1, len(known.best))
                    * self._scored(known),
                    "compared": len(inside),
                    "wrong": wrong,
                    "wrong_rate": [round(bound, 4) for bound in risk.interval(wrong, len(inside))],
                }
            )
        counts = [{"source": s, "right": r, "count": n} for (s, r), n in sorted(known.counts.items(), key=str)]
        return {"tenant": tenant, "since": self.since, "lookups": known.lookups, "observations": counts, "rates": rows}

    def tenants(self) -> list[str]:
        return sorted(self._tenants)

    @staticmethod
    def _scored(known: Tenant) -> float:
        """The share of lookups that had a candidate with a score."""
        return known.scored / known.lookups if known.lookups else 0.0

    def _first(self, rate: float, least: float) -> float:
        """The limit before any evidence."""
        if not self._calibration:
            return least
        if rate not in self._tested:
            self._tested[rate] = risk.tested_limit(self._calibration, rate)
        return self._tested[rate]


def _of_an_entry() -> deque[bool]:
    return deque(maxlen=OF_AN_ENTRY)


def _kept(pools: OrderedDict[Any, Any], key: Any, make: Any) -> Any:
    """The pool under a key, made if there is none, as the one that was of use last."""
    if key not in pools:
        pools[key] = make()
        if len(pools) > POOLS:
            pools.popitem(last=False)
    pools.move_to_end(key)
    return pools[key]
