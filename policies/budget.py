"""How much money a tenant may spend in a day and in a month (UTC), and what happens then."""

from __future__ import annotations

import calendar
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Literal

from pydantic import model_validator

from backends.protocol import Section
from policies.pricing import Money, nano


class Downgrade(Section):
    """Go on with another, cheaper model."""

    downgrade: str


class Budget(Section):
    """`budget:` of a tenant."""

    per_day: Money | None = None
    """Dollars a calendar day (UTC), like 5 USD."""
    per_month: Money | None = None
    """Dollars a calendar month (UTC), like 500 USD."""
    when_spent: Literal["reject", "cache-only"] | Downgrade = "reject"
    """`reject`: nothing is answered; `cache-only`: what is stored is; `{downgrade: MODEL}`: that model answers."""

    @model_validator(mode="after")
    def _some_limit(self) -> Budget:
        if self.per_day is None and self.per_month is None:
            raise ValueError("a budget has per_day, per_month, or both")
        return self


@dataclass(frozen=True, slots=True)
class Account:
    """A tenant's money in one period."""

    key: str
    limit: int
    """Billionths of a dollar."""
    ends: float
    """When the period is over, in seconds since the epoch."""


def accounts(tenant: str, budget: Budget, now: float) -> tuple[Account, ...]:
    """The accounts that a request at `now` (seconds since the epoch) is booked on."""
    at = datetime.fromtimestamp(now, UTC)
    day = at.replace(hour=0, minute=0, second=0, microsecond=0)
    found = []
    if budget.per_day is not None:
        ends = (day + timedelta(days=1)).timestamp()
        found.append(Account(f"{tenant}|{at:%Y-%m-%d}", nano(budget.per_day), ends))
    if budget.per_month is not None:
        days = calendar.monthrange(at.year, at.month)[1]
        ends = (day.replace(day=1) + timedelta(days=days)).timestamp()
        found.append(Account(f"{tenant}|{at:%Y-%m}", nano(budget.per_month), ends))
    return tuple(found)
