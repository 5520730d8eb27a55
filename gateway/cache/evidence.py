"""What is known of the semantic tier's hits: which were right, and how sure the verifier must therefore be.

Evidence is each tenant's own: what one tenant asks, or reports, moves no other's limit.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.cache.question import Question
from gateway.stores.contract import Observation
from policies import risk
from policies.risk import Pool, Seen

POOLS = 10_000
"""So many scopes and entries are told apart; the one that was of use longest ago is forgotten."""
RATES = (0.005, 0.01, 0.02, 0.05, 0.1)
"""What a report tells of."""


HITS = 20_000
"""So many requests are remembered with the stored answer that they got."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A stored answer that a request got."""

    tenant: str
    asked: bytes
    """The key of its question."""
    entry: bytes
    group: bytes
    score: float | None
    """None where the question was the entry's own."""


@dataclass(slots=True)
class Tenant:
    """One tenant's evidence, and what it has asked since the start."""

    pool: Pool = field(default_factory=Pool)
    version: int = 0
    counts: Counter[tuple[str, bool | None]] = field(default_factory=Counter)
    """(source, right) → observations."""
    lookups: int = 0
    """Semantic lookups since the start of this process."""
    best: list[float] = field(default_factory=list)
    """The best score of each of the last lookups that had a candidate which no guard refused."""


class Evidence:
    """Observations of one gateway process, in pools: everything of a tenant, a scope class, an entry."""

    def __init__(self, calibration: Sequence[tuple[float, bool]], judge: str) -> None:
        """`calibration`: scores of labelled pairs; `judge`: whose scores count."""
        self._calibration = [Seen(score, same) for score, same in calibration]
        self.judge = judge
        self._hits: OrderedDict[str, Hit] = OrderedDict()
        self._tenants: dict[str, Tenant] = {}
        self._groups: OrderedDict[tuple[str, bytes], Pool] = OrderedDict()
        self._entries: OrderedDict[bytes, list[bool]] = OrderedDict()
        self._limits: dict[tuple[str, float, float], tuple[int, float]] = {}
        self._tested: dict[float, float] = {}
        self._ours: set[tuple[float, bytes]] = set()
        """What this process has observed, and will read in the store again."""
        self.number = 0
        """The newest observation that was read from the store."""
        self.since = time.time()

    def add(self, observation: Observation) -> None:
        """Take in what was observed here."""
        if len(self._ours) < POOLS:
            self._ours.add((observation.at, observation.asked))
        self._take(observation)

    def _take(self, observation: Observation, of_this_answer: bool = True) -> None:
        """What users report counts only where it warns: who is content seldom says so."""
        tenant = self._tenants.setdefault(observation.tenant, Tenant())
        tenant.counts[observation.source, observation.right] += 1
        if observation.right is None or observation.judge != self.judge:
            return
        if observation.source == "feedback" and observation.right:
            return
        seen = Seen(observation.score, observation.right)
        tenant.pool.add(seen)
        tenant.version += 1
        _kept(self._groups, (observation.tenant, observation.group), Pool).add(seen)
        if of_this_answer:
            _kept(self._entries, observation.entry, list[bool]).append(observation.right)

    def read(self, observation: Observation, of_this_answer: bool = True) -> None:
        """Take in what the store tells, unless it is our own; of an entry only if it is about its present answer."""
        mark = (observation.at, observation.asked)
        if mark in self._ours:
            self._ours.discard(mark)
        else:
            self._take(observation, of_this_answer)

    def forget(self, entry: bytes) -> None:
        """An entry was replaced: what was known of it says nothing about the new answer."""
        self._entries.pop(entry, None)

    def limit(self, question: Question, group: bytes, entry: bytes, least: float) -> float:
        """The score that this entry must reach to serve this question; `least`: where there is no calibration."""
        rate, name = question.rules.max_wrong_rate, question.tenant
        tenant, known, first = self._tenants.get(name), self._entries.get(entry, ()), self._first(rate, least)
        if tenant is None:
            return first
        version, everywhere = self._limits.get((name, rate, first), (-1, 0.0))
        if version != tenant.version:
            if len(self._limits) > POOLS:
                self._limits.clear()
            everywhere = risk.everywhere(rate, first, tenant.pool)
            self._limits[name, rate, first] = tenant.version, everywhere
        return risk.narrowed(rate, everywhere, self._groups.get((name, group)), known)

    def served(self, request: str, hit: Hit) -> None:
        """Remember which answer a request got, in case somebody says something about it."""
        self._hits[request] = hit
        if len(self._hits) > HITS:
            self._hits.popitem(last=False)

    def hit(self, request: str) -> Hit | None:
        return self._hits.get(request)

    def looked(self, tenant: str, best: float | None) -> None:
        """A semantic lookup: the best score of its candidates, if one was scored."""
        known = self._tenants.setdefault(tenant, Tenant())
        known.lookups += 1
        if best is not None:
            known.best.append(best)
            if len(known.best) > 2 * risk.MOST:
                del known.best[: risk.MOST]

    def report(self, tenant: str, rate: float, least: float) -> dict[str, Any]:
        """What is known of a tenant's hits, and what each `max_wrong_rate` would serve. `rate`: the one in force."""
        known = self._tenants.get(tenant, Tenant())
        rows = []
        for each in sorted({*RATES, rate}):
            limit = risk.everywhere(each, self._first(each, least), known.pool)
            inside = [one for one in known.pool.seen if one.score >= limit]
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
        return min(1.0, len(known.best) / known.lookups) if known.lookups else 0.0

    def _first(self, rate: float, least: float) -> float:
        """The limit before any evidence."""
        if not self._calibration:
            return least
        if rate not in self._tested:
            self._tested[rate] = risk.tested_limit(self._calibration, rate)
        return self._tested[rate]


def _kept(pools: OrderedDict[Any, Any], key: Any, make: Any) -> Any:
    """The pool under a key, made if there is none, as the one that was of use last."""
    if key not in pools:
        pools[key] = make()
        if len(pools) > POOLS:
            pools.popitem(last=False)
    pools.move_to_end(key)
    return pools[key]
