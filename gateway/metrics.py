"""Every Prometheus series, declared once. Names are part of the public contract (docs/configuration.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics, generate_latest

from gateway.stores.contract import Booking

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
MAX_LABEL_VALUES = 200
PARTS = ("alias", "index", "lease", "ledger", "remember", "replay", "revalidate", "semantic", "store")
"""What may fail without anybody noticing but here."""
TOKEN_KINDS = ("prompt", "completion", "cached", "written", "avoided")
_OVERHEAD = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1)


@dataclass(frozen=True, slots=True)
class RequestSeries:
    """The series that one kind of request moves."""

    requests: Counter
    seconds: Histogram
    ttft_hit: Histogram
    ttft_miss: Histogram


@dataclass(frozen=True, slots=True)
class MoneySeries:
    """The series of one tenant and model that every row of the ledger moves."""

    tokens: Mapping[str, Counter]
    cost: Counter
    saved: Mapping[str, Counter]


class Metrics:
    """The series of one gateway process."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # a second series for each, which nobody asks for
        self.registry = CollectorRegistry()
        r = self.registry
        self.requests = Counter(
            "hitherto_requests_total",
            "Answered requests.",
            ["tenant", "surface", "model", "backend", "cache", "status"],
            registry=r,
        )
        self.request_seconds = Histogram(
            "hitherto_request_seconds", "Request to last byte.", ["cache"], buckets=_SECONDS, registry=r
        )
        self.ttft_seconds = Histogram(
            "hitherto_ttft_seconds", "Request to first body byte.", ["cache", "prefix"], buckets=_SECONDS, registry=r
        )
        self.overhead_seconds = Histogram(
            "hitherto_overhead_seconds",
            "The gateway's own time before a request went upstream or was answered.",
            buckets=_OVERHEAD,
            registry=r,
        )
        self.answer_lookups = Counter(
            "hitherto_answer_lookups_total", "Answer cache lookups.", ["tier", "result", "reason"], registry=r
        )
        self.answer_writes = Counter(
            "hitherto_answer_writes_total", "Answers offered to the cache.", ["result", "reason"], registry=r
        )
        self.evidence = Counter(
            "hitherto_semantic_evidence_total",
            "Stored answers compared with fresh ones, or reported, by where that is known from.",
            ["source", "verdict"],
            registry=r,
        )
        self.flights = Counter(
            "hitherto_flights_total", "Computations that identical requests could share.", ["role"], registry=r
        )
        self.answer_evictions = Counter(
            "hitherto_answer_evictions_total", "Stored answers that gave way to others.", registry=r
        )
        self.answer_entries = Gauge("hitherto_answer_entries", "Stored answers.", registry=r)
        self.answer_bytes = Gauge("hitherto_answer_bytes", "Bytes of stored answers.", registry=r)
        self.prefix_tokens = Counter(
            "hitherto_prefix_tokens_total", "Prompt tokens by where their KV came from.", ["source"], registry=r
        )
        self._declare_money(r)
        self._declare_kv(r)
        self._declare_dispatch(r)
        self.faults = Counter("hitherto_faults_total", "Faults that were survived.", ["part"], registry=r)
        for part in PARTS:  # a series that begins with its first fault would hide it from increase()
            self.faults.labels(part)

        self._seen: dict[str, set[str]] = {}
        self._kv_bytes: dict[tuple[str, str], float] = {}
        self._totals: dict[tuple[int, str, str], float] = {}

    def _declare_money(self, r: CollectorRegistry) -> None:
        self._computed = self.prefix_tokens.labels("computed")
        self.tokens = Counter(
            "hitherto_tokens_total",
            "Tokens by kind: prompt (with cached and written in it), completion, and those avoided by stored answers.",
            ["tenant", "model", "kind"],
            registry=r,
        )
        self.cost_usd = Counter("hitherto_cost_usd_total", "Dollars that were spent.", ["tenant", "model"], registry=r)
        self.saved_usd = Counter(
            "hitherto_saved_usd_total",
            "Dollars that were saved, by what saved them.",
            ["tenant", "model", "by"],
            registry=r,
        )
        self._money: dict[tuple[str, str], MoneySeries] = {}

    def _declare_kv(self, r: CollectorRegistry) -> None:
        self.kv_bytes = Gauge("hitherto_kv_bytes", "Bytes of KV by tier.", ["tier"], registry=r)
        self.kv_loads = Counter("hitherto_kv_loads_total", "Loads of KV from lower tiers.", ["tier"], registry=r)
        self.kv_load_seconds = Counter("hitherto_kv_load_seconds", "Time spent loading KV.", ["tier"], registry=r)
        self.kv_checks = Counter(
            "hitherto_kv_checks_total", "Reused prefixes computed once more.", ["result"], registry=r
        )
        self.kv_evictions = Counter("hitherto_kv_evictions_total", "KV blocks that gave way.", ["tier"], registry=r)

    def _declare_dispatch(self, r: CollectorRegistry) -> None:
        self.breaker_state = Gauge(
            "hitherto_breaker_state",
            "0 closed, 1 half-open, 2 open; by backend, or by replica.",
            ["backend"],
            registry=r,
        )
        self.tries_failed = Counter(
            "hitherto_tries_failed_total",
            "Tries that came to nothing, by place and kind.",
            ["backend", "kind"],
            registry=r,
        )
        self.hedges = Counter("hitherto_hedges_total", "Second tries beside slow ones.", ["result"], registry=r)
        self.config_reload_failed = Gauge(
            "hitherto_config_reload_failed", "Tenants' files that are not in force because they are broken.", registry=r
        )

    def request_series(
        self, tenant: str, surface: str, model: str, backend: str, cache: str, status: str
    ) -> RequestSeries:
        """The series of a kind of request; tenants and models beyond the first 200 are counted as "other"."""
        tenant, model = self._capped("tenant", tenant), self._capped("model", model)
        return RequestSeries(
            requests=self.requests.labels(tenant, surface, model, backend, cache, status),
            seconds=self.request_seconds.labels(cache),
            ttft_hit=self.ttft_seconds.labels(cache, "hit"),
            ttft_miss=self.ttft_seconds.labels(cache, "miss"),
        )

    def count_money(self, row: Booking) -> None:
        """What a row of the ledger tells of tokens and money. Counters only grow: what cost more than it saved is
        in the ledger only."""
        key = row.tenant, row.model
        series = self._money.get(key)
        if series is None:
            if len(self._money) > 4 * MAX_LABEL_VALUES:
                self._money.clear()
            series = self._money[key] = self._money_series(*key)
        if row.prompt or row.completion:
            tokens = series.tokens
            tokens["prompt"].inc(row.prompt)
            tokens["completion"].inc(row.completion)
            if row.cached or row.written:
                tokens["cached"].inc(row.cached)
                tokens["written"].inc(row.written)
            self._computed.inc(row.prompt - row.cached)
            for source, count in row.sources.items():
                self.prefix_tokens.labels(source).inc(max(0, count))
        if row.avoided_prompt or row.avoided_completion:
            series.tokens["avoided"].inc(row.avoided_prompt + row.avoided_completion)
        if row.cost:
            series.cost.inc(row.cost / 1e9)
        if row.saved_answer > 0:
            series.saved["semantic" if row.cache in ("semantic", "alias") else "exact"].inc(row.saved_answer / 1e9)
        if row.saved_prefix > 0:
            series.saved["prefix"].inc(row.saved_prefix / 1e9)

    def _money_series(self, tenant: str, model: str) -> MoneySeries:
        tenant, model = self._capped("tenant", tenant), self._capped("model", model)
        return MoneySeries(
            tokens={kind: self.tokens.labels(tenant, model, kind) for kind in TOKEN_KINDS},
            cost=self.cost_usd.labels(tenant, model),
            saved={by: self.saved_usd.labels(tenant, model, by) for by in ("exact", "semantic", "prefix")},
        )

    def _capped(self, label: str, value: str) -> str:
        """A label value that callers choose: the first 200 different ones as they are, then "other"."""
        seen = self._seen.setdefault(label, set())
        if value in seen or len(seen) < MAX_LABEL_VALUES:
            seen.add(value)
            return value
        return "other"

    def engine_state(self, backend: str, state: Mapping[str, Any]) -> None:
        """Take over what an engine told of its KV."""
        self._set_kv_bytes(backend, "device", state["cached_blocks"] * state["block_bytes"])
        self._advance(self.kv_evictions, backend, "device", state["evictions"])
        for tier, facts in state["tiers"].items():
            self._set_kv_bytes(backend, tier, facts["bytes"])
            self._advance(self.kv_load_seconds, backend, tier, facts["load_seconds"])
            self._advance(self.kv_loads, backend, tier, facts["loads"])
        self._advance(self.kv_checks, backend, "same", state["shadow_checks"] - state["shadow_mismatches"])
        self._advance(self.kv_checks, backend, "different", state["shadow_mismatches"])

    def _set_kv_bytes(self, backend: str, tier: str, size: float) -> None:
        """Of all engines together."""
        self._kv_bytes[backend, tier] = size
        self.kv_bytes.labels(tier).set(sum(known for (_, one), known in self._kv_bytes.items() if one == tier))

    def _advance(self, counter: Counter, backend: str, tier: str, total: float) -> None:
        """Bring a counter up to another process's total, which starts over when that process does."""
        key = (id(counter), backend, tier)
        before = self._totals.get(key, 0.0)
        counter.labels(tier).inc(total - before if total >= before else total)
        self._totals[key] = total

    def render(self) -> bytes:
        """The text exposition."""
        return generate_latest(self.registry)
