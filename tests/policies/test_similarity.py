"""Guards: pairs that must never share an answer, and pairs that a guard must let through."""

from __future__ import annotations

import pytest

from policies.similarity import negations, numbers, veto

DIFFERENT = [
    ("Who won the cup in 2020?", "Who won the cup in 2021?", "numbers"),
    ("Convert 10 % to a fraction", "Convert 20 % to a fraction", "numbers"),
    ("What is 10 of 50?", "What is 10% of 50?", "numbers"),
    ("Is port 6379 open?", "Is port 6380 open?", "numbers"),
    ("List three planets", "List four planets", "numbers"),
    ("the first president", "the second president", "numbers"),
    ("the thirteenth president", "the fourteenth president", "numbers"),
    ("the fortieth day", "the fiftieth day", "numbers"),
    ("What is 1+1?", "What is 1+2?", "numbers"),
    ("What is 7 - 3?", "What is 7 + 3?", "numbers"),
    ("7 minus 3", "3 minus 7", "numbers"),
    ("7 minus 3", "7 plus 3", "numbers"),
    ("minus 40 degrees", "40 degrees", "numbers"),
    ("–40 degrees", "40 degrees", "numbers"),
    ("a disk of 1.5GB", "a disk of 5.1GB", "numbers"),
    ("Python 3.1", "Python 3.10", "numbers"),
    ("take .5 mg", "take 5 mg", "numbers"),
    ("dial 020", "dial 20", "numbers"),
    ("version 1.2.3", "version 1.3.2", "numbers"),
    ("192.168.0.1", "192.168.1.0", "numbers"),
    ("error 0x8024402C", "error 0x8024402F", "numbers"),
    ("worth $3B", "worth $3M", "numbers"),
    ("5 million people", "5 billion people", "numbers"),
    ("a million people", "a billion people", "numbers"),
    ("a hundred and five", "five", "numbers"),
    ("two thirds", "two fifths", "numbers"),
    ("half of it", "a quarter of it", "numbers"),
    ("x²", "x³", "numbers"),
    ("½ cup", "¼ cup", "numbers"),
    ("2024-01-02", "2024-02-01", "numbers"),
    ("at 10:05", "at 5:10", "numbers"),
    ("twenty, three", "twenty-three", "numbers"),
    ("is it -5 degrees", "is it 5 degrees", "numbers"),
    ("1,000 users", "10,000 users", "numbers"),
    ("2k tokens", "2 tokens", "numbers"),
    ("World War I", "World War II", "spelling"),
    ("1 MB", "1 Mb", "spelling"),
    ("curl -o", "curl -O", "spelling"),
    ("Cuántos años", "Cuántos anos", "spelling"),
    ("What is AIDS?", "What is aids?", "spelling"),
    ("Convert USD to EUR", "Convert EUR to USD", "spelling"),
    ("Is Paris bigger than London?", "Is London bigger than Paris?", "order"),
    ("Translate from French to German", "Translate from German to French", "order"),
    ("Is it safe to eat?", "Is it not safe to eat?", "negation"),
    ("Why does it start?", "Why doesn't it start?", "negation"),
    ("Why does it start?", "Why doesn’t it start?", "negation"),
    ("Why does it start?", "Why doesn´t it start?", "negation"),
    ("Why does it start?", "Why doesn‘t it start?", "negation"),
    ("pasta with cheese", "pasta without cheese", "negation"),
    ("rules for smokers", "rules for non-smokers", "negation"),
    ("not mammals but lay eggs", "mammals but do not lay eggs", "negation"),
    ("Can I smoke here?", "Can I never smoke here?", "negation"),
    ("can i pay", "cant i pay", "negation"),
]
SAME = [
    ("What is 1000 in binary?", "What is 1,000 in binary?"),
    ("one thousand users", "1000 users"),
    ("5 million people", "5,000,000 people"),
    ("a million people", "one million people"),
    ("two hundred and five pages", "205 pages"),
    ("twenty-three apples", "23 apples"),
    ("two million three hundred thousand", "2300000"),
    ("a dozen eggs", "12 eggs"),
    ("the 3rd planet", "the third planet"),
    ("the 21st century", "the twenty first century"),
    ("I cannot log in", "I can't log in"),
    ("Is it not safe?", "Isn't it safe?"),
    ("What is the capital of France?", "Tell me the capital of France"),
    ("In 2020, who won?", "Who won in 2020?"),
]


@pytest.mark.parametrize(("a", "b", "guard"), DIFFERENT)
def test_different_questions_are_kept_apart(a: str, b: str, guard: str) -> None:
    assert veto(a, b) == guard
    assert veto(b, a) == guard


@pytest.mark.parametrize(("a", "b"), SAME)
def test_the_same_question_in_other_spelling_passes(a: str, b: str) -> None:
    assert veto(a, b) == ""


def test_numbers_are_read_as_values_in_order() -> None:
    assert numbers("two three") == ("2", "3")
    assert numbers("twenty three") == ("23",)
    assert numbers("half of 4") == ("half", "4")
    assert numbers("covid19 and 3D.") == ("covid19", "3D")
    assert numbers("1-2") == ("1", "-", "2")
    assert numbers("one thousand, two thousand") == ("1000", "2000")
    assert numbers("no digits - here") == ()


def test_negations_name_what_they_negate() -> None:
    assert negations("It isn't that I don't know") == ("know", "know")
    assert negations("a knot in the note") == ()
    assert negations("is it safe or not") == ("",)
