"""How long answers to volatile questions live."""

from __future__ import annotations

import pytest

from policies.volatility import DEFAULTS, classify, lifetime


@pytest.mark.parametrize(
    ("question", "first"),
    [
        ("What time is it in Oslo?", "now"),
        ("what's happening right now", "now"),
        ("What is today's date?", "now"),
        ("What is the price of bitcoin?", "prices"),
        ("apple stock price", "prices"),
        ("USD to EUR exchange rate", "prices"),
        ("who's winning", "scores"),
        ("Will it rain in Paris?", "weather"),
        ("What is on TV tonight?", "today"),
        ("any news about the strike", "today"),
        ("Who is the current CEO of Lufthansa?", "recent"),
        ("the latest version of Python", "recent"),
        ("When did Rome fall?", ""),
        ("How do I price a product?", ""),
        ("What is a credit score?", ""),
        ("How is the knowledge base updated?", ""),
    ],
)
def test_a_question_is_as_volatile_as_its_words(question: str, first: str) -> None:
    assert (classify(question) or ("",))[0] == first


def test_the_shortest_life_holds() -> None:
    assert lifetime("the current bitcoin price", DEFAULTS) == (60.0, "prices")
    assert lifetime("the weather today", {**DEFAULTS, "today": 5.0}) == (5.0, "today")
    assert lifetime("How old is Rome?", DEFAULTS) == (float("inf"), "")
    assert lifetime(None, DEFAULTS) == (float("inf"), "")


def test_of_a_long_prompt_both_ends_are_read() -> None:
    text = "some context. " * 5000
    assert classify("What is the weather? " + text)[0] == "weather" == classify(text + "What is the weather?")[0]
    assert classify(text) == ()
