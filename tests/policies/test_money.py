"""Prices, costs and budgets."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

import pytest
from pydantic import ValidationError

from backends.protocol import Usage
from policies.budget import Budget, Downgrade, accounts
from policies.pricing import Price, cost, nano


def test_a_cost_counts_each_kind_of_token_once() -> None:
    price = Price.model_validate(
        {"input": "3 USD/M", "output": "15 USD/M", "cached": "0.3 USD/M", "written": "3.75 USD/M"}
    )
    assert cost(Usage(1000, 100), price) == Decimal("0.0045")
    assert cost(Usage(1000, 100, cached=600, written=300), price) == Decimal("0.000003") * 100 + Decimal(
        "0.0000003"
    ) * 600 + Decimal("0.00000375") * 300 + Decimal("0.0015")
    assert cost(Usage(100, 0, cached=500), price) == Decimal("0.00003"), "no more cached than there were"
    assert cost(Usage(1000, 0, cached=600), Price.model_validate({"input": "1 USD/M"})) == Decimal("0.001")


def test_money_is_exact() -> None:
    price = Price.model_validate({"input": "0.1 USD/M"})
    assert cost(Usage(1, 0), price) == Decimal("0.0000001") and nano(cost(Usage(3, 0), price)) == 300
    third = Price.model_validate({"input": "0.0004 USD/M"})
    assert sum((cost(Usage(1, 0), third) for _ in range(10)), Decimal(0)) == Decimal(0), "less than a billionth is none"


@pytest.mark.parametrize("text", ["10", "10 USD", "USD/M", "10 EUR/M", 10, "-1 USD/M"])
def test_prices_have_a_currency_and_a_unit(text: object) -> None:
    with pytest.raises(ValidationError, match="USD"):
        Price.model_validate({"input": text})


def test_settings_survive_the_way_to_worker_processes() -> None:
    price = Price.model_validate({"input": "0.15 USD/M", "cached": "0.075 USD/M"})
    assert Price.model_validate_json(price.model_dump_json(by_alias=True)) == price
    budget = Budget.model_validate({"per_month": "500 USD", "when_spent": {"downgrade": "small"}})
    assert Budget.model_validate_json(budget.model_dump_json()) == budget and isinstance(budget.when_spent, Downgrade)


def test_periods_are_calendar_days_and_months_in_utc() -> None:
    budget = Budget.model_validate({"per_day": "1 USD", "per_month": "20.5 USD"})
    now = datetime(2028, 2, 29, 23, 59, tzinfo=UTC).timestamp()
    day, month = accounts("acme", budget, now)
    assert (day.key, day.limit, day.ends - now) == ("acme|2028-02-29", 10**9, 60.0)
    assert (month.key, month.limit, month.ends - now) == ("acme|2028-02", 20_500_000_000, 60.0)


def test_a_budget_without_an_amount_is_refused() -> None:
    with pytest.raises(ValidationError, match="per_day, per_month, or both"):
        Budget.model_validate({"when_spent": "reject"})
    with pytest.raises(ValidationError, match="500 USD"):
        Budget.model_validate({"per_day": 500})
