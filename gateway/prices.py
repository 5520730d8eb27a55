"""What answers cost: the operator's own prices first, then the table of the package genai-prices."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

from backends.protocol import Usage
from policies import pricing, routing
from policies.pricing import PER_M, Price

log = logging.getLogger("hitherto.prices")

EMBEDDER = "embedder"
"""The name under which the operator may price looking for similar questions."""
_FRESH = 60.0
"""Seconds that what the table says is believed: prices may depend on the hour."""
_MOST = 4096
_RATES = ("input_mtok", "output_mtok", "cache_read_mtok", "cache_write_mtok", "cache_write_1h_mtok")
"""What of a library's table is paid by the token."""


class Prices:
    """Prices by model. What runs on our own engine or on vLLM costs what the operator says, else nothing."""

    def __init__(self, own: Mapping[str, Price | Sequence[Price]]) -> None:
        self._own = {name: [price] if isinstance(price, Price) else list(price) for name, price in own.items()}
        self._known: dict[tuple[str, str, str], tuple[float, Price | None, Any]] = {}
        self._unknown: set[str] = set()
        self._pace: dict[tuple[str, str, str], float] = {}
        """Dollars that a unit of work took where time is paid, on average."""

    def price(self, model: str, kind: str, url: str, prompt: int = 0) -> Price | None:
        """What a token costs now in a prompt of such a length; None where nobody knows a price.

        `model`: its name at the backend, whose kind and base URL say who the provider is.
        """
        key = model, kind, url
        found = self._known.get(key)
        if found is None or found[0] < time.time():
            if len(self._known) >= _MOST:  # names of models come from callers
                self._known.clear()
            now = time.time()
            midnight = (now // 86400 + 1) * 86400  # UTC, when dated prices begin
            found = self._known[key] = (min(now + _FRESH, midnight), *self._find(*key))
        _, price, table = found
        return price if table is None else _of_tiers(table, prompt)

    def is_by_time(self, priced: tuple[str, str, str]) -> bool:
        """Whether time is what is paid, which nobody knows of an answer that was not computed."""
        found = self._known.get(priced)
        return found is not None and found[1] is not None and found[1].hour > 0

    def cost(self, model: str, kind: str, url: str, usage: Usage, seconds: float = 0.0) -> Decimal | None:
        """Dollars of an answer, rounded to the billionth; None where nobody knows a price.

        `seconds`: its share of the backend's time, where that is what is paid.
        """
        price = self.price(model, kind, url, usage.prompt)
        return None if price is None else pricing.cost(usage, price, seconds)

    def by_time(self, priced: tuple[str, str, str], tokens: float) -> Decimal:
        """What so many tokens of a prompt take where time is paid, by what was seen."""
        return pricing.rounded(Decimal(tokens * self._pace.get(priced, 0.0)))

    def cold(self, model: str, kind: str, url: str, usage: Usage) -> Decimal | None:
        """What the same answer would have cost had nothing of it been cached."""
        price = self.price(model, kind, url, usage.prompt)
        if price is None:
            return None
        amount = pricing.cost(pricing.cold(usage), price)
        if price.hour:
            amount += self.by_time((model, kind, url), _work(pricing.cold(usage)))
        return amount

    def took(self, model: str, kind: str, url: str, usage: Usage, seconds: float) -> None:
        """Learn what a unit of work takes where time is paid, so that `cold` can tell it of answers not computed."""
        price = self.price(model, kind, url, usage.prompt)
        if price is None or not price.hour:
            return
        key, dollars = (model, kind, url), seconds * float(price.hour) / 3600 / max(1.0, _work(usage))
        self._pace[key] = 0.9 * self._pace[key] + 0.1 * dollars if key in self._pace else dollars

    def told(self, model: str, kind: str, url: str) -> dict[str, Any] | None:
        """What a model costs, for people: dollars per million tokens, and per hour."""
        price = self.price(model, kind, url)
        if price is None:
            return None
        rates = {name: getattr(price, name) for name in ("input", "cached", "written", "written_hour", "output")}
        told: dict[str, Any] = {name: None if rate is None else float(rate * PER_M) for name, rate in rates.items()}
        return {"model": model, **told, "hour": float(price.hour), "own": routing.match(model, self._own) is not None}

    def lookup(self, seconds: float, tokens: int) -> Decimal:
        """Dollars of looking for similar questions, where the operator gave it a price."""
        own = self._own.get(EMBEDDER)
        price = pricing.on(own, datetime.now(UTC).date()) if own else None
        return Decimal(0) if price is None else pricing.cost(Usage(tokens, 0), price, seconds)

    def _find(self, model: str, kind: str, url: str) -> tuple[Price | None, Any]:
        """A price, or a table whose prices depend on the prompt's length."""
        entry = routing.match(model, self._own)
        own = pricing.on(self._own[entry], datetime.now(UTC).date()) if entry is not None else None
        if own is not None:
            return own, None
        if kind in ("engine", "vllm"):
            return Price(), None
        try:
            table = _listed(model, url)
        except LookupError:
            if model not in self._unknown and len(self._unknown) < 1000:
                self._unknown.add(model)
                log.warning("there is no price for the model %r; give one under prices: to have it booked", model)
            return None, None
        rates = [value for name, value in vars(table).items() if name in _RATES and value is not None]
        if not rates:  # it is paid by the minute, the page or the picture, of which we know nothing
            return None, None
        tiered = any(hasattr(value, "tiers") for value in rates)
        return (None, table) if tiered else (_of_tiers(table, 0), None)


def _work(usage: Usage) -> float:
    """Units of work: a token of the prompt that was not cached; one of the answer takes as long as four."""
    return usage.prompt - (usage.cached or 0) + 4.0 * usage.completion


def _listed(model: str, url: str) -> Any:
    """By the provider whose URL it is; a model of another provider is found by its name. Raises LookupError."""
    import genai_prices  # 120 ms, and only needed where money is counted

    nothing = genai_prices.Usage(input_tokens=0, output_tokens=0)
    try:
        return genai_prices.calc_price(nothing, model, provider_api_url=url).model_price
    except LookupError:
        return genai_prices.calc_price(nothing, model).model_price


def _of_tiers(table: Any, prompt: int) -> Price:
    """The library's prices per million tokens, for a prompt of such a length, as one of ours."""

    def rate(name: str) -> Decimal | None:
        value = getattr(table, name, None)
        if value is not None and hasattr(value, "tiers"):
            value = next((tier.price for tier in reversed(value.tiers) if prompt > tier.start), value.base)
        return None if value is None else Decimal(value) / PER_M

    fresh = rate("input_mtok") or Decimal(0)
    written = rate("cache_write_mtok")
    return Price.model_construct(
        input=fresh,
        output=rate("output_mtok") or Decimal(0),
        cached=rate("cache_read_mtok"),
        written=written,
        written_hour=rate("cache_write_1h_mtok") or written or fresh,
        each=Decimal(getattr(table, "requests_kcount", None) or 0) / 1000,
    )
