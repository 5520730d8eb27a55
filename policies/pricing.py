"""Money: what tokens cost. Amounts are `Decimal` US dollars, rounded to the billionth where they are booked."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import date
from decimal import ROUND_HALF_EVEN, Decimal
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainSerializer

from backends.protocol import Section, Usage

NANO = Decimal("0.000000001")
PER_M = Decimal(1_000_000)


def _money(value: object) -> object:
    """`"500 USD"` → Decimal."""
    if isinstance(value, Decimal):  # a default, or a value that was read before
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*USD\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"an amount needs a number and the currency USD (like 500 USD), not {value!r}")
    return Decimal(match[1])


def _rate(value: object) -> object:
    """`"10 USD/M"` (per million tokens) → Decimal per token."""
    if isinstance(value, Decimal):
        return value
    match = re.fullmatch(r"(.*USD)\s*/\s*M\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"a price looks like 10 USD/M (per million tokens), not {value!r}")
    amount = _money(match[1])
    assert isinstance(amount, Decimal)
    return amount / PER_M


def _hourly(value: object) -> object:
    """`"2.50 USD/h"` → Decimal per hour."""
    if isinstance(value, Decimal):
        return value
    match = re.fullmatch(r"(.*USD)\s*/\s*h\s*", value) if isinstance(value, str) else None
    if match is None:
        raise ValueError(f"a price of computing time looks like 2.50 USD/h, not {value!r}")
    return _money(match[1])


Money = Annotated[Decimal, BeforeValidator(_money), PlainSerializer(lambda value: f"{value:f} USD", when_used="json")]
Rate = Annotated[
    Decimal, BeforeValidator(_rate), PlainSerializer(lambda value: f"{value * PER_M:f} USD/M", when_used="json")
]

Hourly = Annotated[
    Decimal, BeforeValidator(_hourly), PlainSerializer(lambda value: f"{value:f} USD/h", when_used="json")
]


class Price(Section):
    """What a token of each kind costs, or an hour of computing. Own prices may be dated: a list of several."""

    since: date | None = Field(default=None, alias="from")
    """The first day (UTC) on which it holds; without one always."""

    input: Rate = Decimal(0)
    """A token of the prompt, like 10 USD/M (per million)."""
    output: Rate = Decimal(0)
    """A token of the answer."""
    cached: Rate | None = None
    """Prompt tokens that a provider read from its cache; without it as `input`."""
    written: Rate | None = None
    """Prompt tokens that a provider wrote to its cache; without it as `input`."""
    written_hour: Rate | None = None
    """The same for an hour; without it twice `input` where `written` is given, else as `input`."""
    each: Money = Decimal(0)
    """A request, whatever it takes, like 0.005 USD."""
    hour: Hourly = Decimal(0)
    """An hour of a machine, like 2.50 USD/h; requests that it serves at the same time share it."""


def on(prices: Sequence[Price], day: date) -> Price | None:
    """Of several dated prices the one that holds on a day: the latest that has begun."""
    begun = [price for price in prices if price.since is None or price.since <= day]
    return max(begun, key=lambda price: price.since or date.min, default=None)


def cost(usage: Usage, price: Price, seconds: float = 0.0) -> Decimal:
    """What an answer cost, rounded to the billionth of a dollar; `seconds`: its share of a machine's time."""
    if not usage.cached and not usage.written and not price.hour:  # most answers
        return rounded(max(0, usage.prompt) * price.input + max(0, usage.completion) * price.output + price.each)
    cached = max(0, min(usage.cached or 0, usage.prompt))
    written = max(0, min(usage.written or 0, usage.prompt - cached))
    hour = max(0, min(usage.written_hour, written))
    total = (
        (usage.prompt - cached - written) * price.input
        + cached * (price.input if price.cached is None else price.cached)
        + (written - hour) * (price.input if price.written is None else price.written)
        + hour * _for_an_hour(price)
        + usage.completion * price.output
        + price.each
    )
    if price.hour:
        total += Decimal(seconds) * price.hour / 3600
    return rounded(total)


def cold(usage: Usage) -> Usage:
    """The same answer, had nothing of its prompt been in a cache, nor been written to one."""
    return Usage(usage.prompt, usage.completion)


def _for_an_hour(price: Price) -> Decimal:
    if price.written_hour is not None:
        return price.written_hour
    return price.input if price.written is None else 2 * price.input


def rounded(amount: Decimal) -> Decimal:
    """As it is booked."""
    return amount.quantize(NANO, ROUND_HALF_EVEN)


def nano(amount: Decimal) -> int:
    """Billionths of a dollar, rounded."""
    return int(amount.scaleb(9).to_integral_value(ROUND_HALF_EVEN))
