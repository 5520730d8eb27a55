"""What answers cost: the operator's prices, then the table that a library keeps."""

from __future__ import annotations

import logging
import random
from datetime import date
from decimal import Decimal

import pytest

from backends.protocol import Usage
from gateway.prices import Prices
from policies.pricing import Price, on, rounded

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


@pytest.mark.parametrize(
    ("model", "url"),
    [
        ("gpt-5-mini", "https://api.openai.com/v1"),
        ("claude-sonnet-4-5", "https://api.anthropic.com"),
        ("gemini-2.5-pro", ""),
        ("deepseek-chat", ""),
        ("mistral-large-latest", ""),
    ],
)
def test_prices_are_those_of_the_library_in_every_tier(model: str, url: str) -> None:
    import genai_prices

    prices, draw = Prices({}), random.Random(1)
    for _ in range(100):
        prompt = draw.choice([10, 1000, 199_999, 200_000, 200_001, 400_000])
        cached = draw.randint(0, prompt)
        written = draw.randint(0, prompt - cached)
        hour, completion = draw.randint(0, written), draw.randint(0, 9999)
        asked = genai_prices.Usage(
            input_tokens=prompt, output_tokens=completion, cache_read_tokens=cached, cache_write_tokens=written,
            cache_write_1h_tokens=hour,
        )  # fmt: skip
        try:
            listed = genai_prices.calc_price(asked, model, provider_api_url=url).total_price
        except LookupError:
            listed = genai_prices.calc_price(asked, model).total_price
        ours = prices.cost(model, "openai", url, Usage(prompt, completion, cached, {}, written, hour))
        assert ours == rounded(listed), (prompt, cached, written, hour, completion)


def test_of_dated_prices_the_latest_that_has_begun_holds() -> None:
    prices = [
        Price.model_validate({"input": "1 USD/M"}),
        Price.model_validate({"from": "2026-03-01", "input": "2 USD/M"}),
        Price.model_validate({"from": "2999-01-01", "input": "9 USD/M"}),
    ]
    assert on(prices, date(2026, 2, 28)) is prices[0]
    assert on(prices, date(2026, 3, 1)) is prices[1]
    assert on(prices[1:], date(2026, 2, 28)) is None
    assert Prices({"m": prices}).cost("m", "openai", "", Usage(10**6, 0)) == 2


def test_time_is_paid_by_the_hour_and_learnt_for_what_is_not_computed() -> None:
    prices = Prices({"own": Price.model_validate({"hour": "3.60 USD/h"})})
    used = Usage(100, 25, cached=60)
    assert prices.cost("own", "vllm", "v", used, 2.0) == Decimal("0.002")
    assert prices.cold("own", "vllm", "v", used) == 0, "nothing is known yet"
    prices.took("own", "vllm", "v", used, 1.4)  # 140 units of work in 1.4 s: 10 µUSD a unit
    assert prices.cold("own", "vllm", "v", used) == Decimal("0.002"), "200 units, had nothing been cached"
    assert Prices({}).lookup(1.0, 100) == 0
    assert Prices({"embedder": Price.model_validate({"hour": "0.36 USD/h"})}).lookup(0.01, 9) == Decimal("0.000001")


def test_what_a_model_costs_is_told() -> None:
    own = Prices({"m": Price.model_validate({"input": "10 USD/M", "output": "100 USD/M"})})
    told = own.told("m", "openai", "")
    assert told is not None and (told["input"], told["output"], told["cached"], told["own"]) == (10, 100, None, True)
    assert own.told("no-such-model-at-all", "openai", "") is None


def test_what_is_not_paid_by_the_token_is_not_free() -> None:
    prices = Prices({})
    for model in ("whisper-1", "tts-1"):
        assert prices.cost(model, "openai", OPENAI, Usage(100, 100)) is None, model
    sonar = prices.cost("sonar", "openai", "https://api.perplexity.ai", Usage(100, 100))
    assert sonar is not None and sonar > Decimal("0.001"), "each request has a price of its own"


def test_a_new_price_holds_from_midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    prices = Prices({"m": own("1 USD/M")})
    night = 1_796_083_190.0  # ten seconds before midnight UTC
    monkeypatch.setattr("gateway.prices.time.time", lambda: night)
    prices.price("m", "openai", "")
    assert prices._known["m", "openai", ""][0] == 1_796_083_200.0
