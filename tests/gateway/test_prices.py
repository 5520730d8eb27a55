"""What answers cost: the operator's prices, then the table that a library keeps."""

from __future__ import annotations

import logging
from decimal import Decimal

import pytest

from backends.protocol import Usage
from gateway.prices import Prices
from policies.pricing import Price

OPENAI, ANTHROPIC = "https://api.openai.com/v1", "https://api.anthropic.com/v1"


def own(text: str) -> Price:
    return Price.model_validate({"input": text})


def test_the_operators_prices_come_first_and_know_patterns() -> None:
    prices = Prices({"gpt-4o": own("1 USD/M"), "Qwen/*": own("2 USD/M")})
    assert prices.cost("gpt-4o", "openai", OPENAI, Usage(1_000_000, 0)) == 1
    assert prices.cost("Qwen/Qwen3-8B", "vllm", "vllm pool", Usage(1_000_000, 0)) == 2


def test_the_tables_prices_know_cached_and_written_tokens() -> None:
    prices = Prices({})
    plain = prices.cost("gpt-4o", "openai", OPENAI, Usage(1_000_000, 0))
    cached = prices.cost("gpt-4o", "openai", OPENAI, Usage(1_000_000, 0, cached=1_000_000))
    assert plain == Decimal("2.5") and cached == Decimal("1.25")
    claude = [
        prices.cost("claude-sonnet-4-5", "anthropic", ANTHROPIC, Usage(100_000, 0, 0, {}, written, hour))
        for written, hour in ((0, 0), (100_000, 0), (100_000, 100_000))
    ]
    assert claude == [Decimal("0.3"), Decimal("0.375"), Decimal("0.6")], "plain, for five minutes, for an hour"


def test_a_model_of_one_provider_behind_anothers_url_is_found_by_its_name() -> None:
    assert Prices({}).cost("gpt-4o", "openai", "https://gateway.example/v1", Usage(1_000_000, 0)) == Decimal("2.5")


def test_what_runs_here_costs_what_the_operator_says_else_nothing() -> None:
    assert Prices({}).cost("smollm2", "engine", "engine x", Usage(10, 10)) == 0
    assert Prices({"smollm2": own("1 USD/M")}).cost("smollm2", "engine", "engine x", Usage(1_000_000, 0)) == 1


def test_a_model_without_a_price_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    prices = Prices({})
    with caplog.at_level(logging.WARNING, "hitherto.prices"):
        assert [prices.cost("my-own-model", "openai", "http://x/v1", Usage(5, 5)) for _ in range(3)] == [None] * 3
    assert len([record for record in caplog.records if "my-own-model" in record.message]) == 1
