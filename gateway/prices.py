"""What answers cost: the operator's own prices first, then the table of the package genai-prices."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from decimal import Decimal

from backends.protocol import Usage
from policies import pricing, routing
from policies.pricing import Price

log = logging.getLogger("hitherto.prices")


class Prices:
    """Prices by model. What runs on our own engine or on vLLM costs what the operator says, else nothing."""

    def __init__(self, own: Mapping[str, Price]) -> None:
        self._own = own
        self._unknown: set[str] = set()

    def cost(self, model: str, kind: str, url: str, usage: Usage) -> Decimal | None:
        """Dollars of an answer, rounded to the billionth; None where nobody knows a price.

        `model`: its name at the backend, whose kind and base URL say who the provider is.
        """
        entry = routing.match(model, self._own)
        if entry is not None:
            return pricing.cost(usage, self._own[entry])
        if kind in ("engine", "vllm"):
            return Decimal(0)
        try:
            return self._listed(model, url, usage)
        except LookupError:
            if model not in self._unknown and len(self._unknown) < 1000:
                self._unknown.add(model)
                log.warning("there is no price for the model %r; give one under prices: to have it booked", model)
            return None

    def _listed(self, model: str, url: str, usage: Usage) -> Decimal:
        """By the provider whose URL it is; a model of another provider is found by its name."""
        import genai_prices  # 120 ms, and only needed where money is counted

        cached, written = max(0, usage.cached or 0), max(0, usage.written or 0)
        asked = genai_prices.Usage(
            input_tokens=max(usage.prompt, cached + written),
            output_tokens=usage.completion,
            cache_read_tokens=cached,
            cache_write_tokens=written,
            cache_write_1h_tokens=min(max(0, usage.written_hour), written),
        )
        try:
            found = genai_prices.calc_price(asked, model, provider_api_url=url)
        except LookupError:
            found = genai_prices.calc_price(asked, model)
        return pricing.rounded(found.total_price)
