"""Guards: pairs that must never share an answer, and pairs that a guard must let through."""

from __future__ import annotations

from collections import Counter

import pytest

from policies.similarity import negations, numbers, veto

DIFFERENT = [
    ("Who won the cup in 2020?", "Who won the cup in 2021?", "numbers"),
    ("Convert 10 % to a fraction", "Convert 20 % to a fraction", "numbers"),
    ("Is port 6379 open?", "Is port 6380 open?", "numbers"),
    ("List three planets", "List four planets", "numbers"),
    ("the first president", "the second president", "numbers"),
    ("What is 1+1?", "What is 1+2?", "numbers"),
    ("a disk of 1.5GB", "a disk of 5.1GB", "numbers"),
    ("version 1.2.3", "version 1.3.2", "numbers"),
    ("192.168.0.1", "192.168.1.0", "numbers"),
    ("twenty three apples", "twenty, three apples and 3", "numbers"),
    ("is it -5 degrees", "is it 5 degrees", "numbers"),
    ("1,000 users", "10,000 users", "numbers"),
    ("2k tokens", "2 tokens", "numbers"),
    ("Is it safe to eat?", "Is it not safe to eat?", "negation"),
    ("Why does it start?", "Why doesn't it start?", "negation"),
    ("Why does it start?", "Why doesn’t it start?", "negation"),
    ("pasta with cheese", "pasta without cheese", "negation"),
    ("Can I smoke here?", "Can I never smoke here?", "negation"),
    ("can i pay", "cant i pay", "negation"),
]
SAME = [
    ("What is 1000 in binary?", "What is 1,000 in binary?"),
    ("one thousand users", "1000 users"),
    ("two hundred and five pages", "205 pages"),
    ("twenty-three apples", "23 apples"),
    ("two million three hundred thousand", "2300000"),
    ("a dozen eggs", "12 eggs"),
    ("5k run", "5000 run"),
    ("1.50 dollars", "1.5 dollars"),
    ("the 3rd planet", "the third planet"),
    ("I cannot log in", "I can't log in"),
    ("What is the capital of France?", "Tell me the capital of France"),
    ("the years 2020-2021", "the years 2020 to 2021"),
]


@pytest.mark.parametrize(("a", "b", "guard"), DIFFERENT)
def test_different_questions_are_kept_apart(a: str, b: str, guard: str) -> None:
    assert veto(a, b) == guard
    assert veto(b, a) == guard


@pytest.mark.parametrize(("a", "b"), SAME)
def test_the_same_question_in_other_spelling_passes(a: str, b: str) -> None:
    assert veto(a, b) == ""


def test_numbers_are_read_as_values() -> None:
    assert numbers("two three") == Counter({"2": 1, "3": 1})
    assert numbers("twenty three") == Counter({"23": 1})
    assert numbers("half of 4") == Counter({"1/2": 1, "4": 1})
    assert numbers("covid19 and 3D") == Counter({"19": 1, "3": 1})
    assert numbers("no digits here") == Counter()


def test_negations_are_counted() -> None:
    assert negations("It isn't that I don't know") == 2
    assert negations("a knot in the note") == 0
