"""Which last turns stand alone."""

from __future__ import annotations

import time

import pytest

from policies.context import stands_alone


def history(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)]


SMALL_TALK = history("Good morning! How are you?", "I am fine, thank you!", "what's 15% of 240", "36.")
TOPIC = history("Tell me about the Eiffel Tower.", "It is in Paris.")


@pytest.mark.parametrize(
    "question",
    [
        "What is the difference between a debit card and a credit card?",
        "what is the boiling point of ethanol at sea level",
        "Thanks! Next: how many working hours are in a month on average with a 40-hour week?",
        "Who painted Guernica, and when was it finished?",
        "What does IBAN stand for and what is it used for?",
        'How do I say "Where is the train that my brother took?" in Spanish?',
        "Can you explain how photosynthesis works in desert plants?",
    ],
)
def test_questions_of_their_own(question: str) -> None:
    assert stands_alone(question, SMALL_TALK)


@pytest.mark.parametrize(
    "question",
    [
        "How tall is it?",
        "And in winter?",
        "What about children under 12?",
        "Why?",
        "Which one is cheaper?",
        "How do I turn that off again?",
        "Can I take them together with alcohol?",
        "What does the monthly instalment come to?",
        "How much notice do I have to give my landlord?",
        "Make it shorter.",
        "Tell me more",
        "Is there anything else?",
        "Two years ago. What kind of engine oil does it need?",
        "What are the pros and cons?",
        "Then please write me a plan for the Sunday with times.",
        "How is that different from here?",
        "yes please",
    ],
)
def test_turns_that_point_back(question: str) -> None:
    assert not stands_alone(question, SMALL_TALK)


def test_the_same_subject_keeps_the_history() -> None:
    assert not stands_alone("Who designed the Eiffel Tower in Paris?", TOPIC)
    assert not stands_alone("What is the chemical formula of table salt?", TOPIC), "a subject was set"
    assert stands_alone("By the way, what is the chemical formula of table salt?", TOPIC), "and is changed"
    whole = "How many Euro pallets fit side by side on the floor of a standard 13.6 m semi-trailer?"
    assert stands_alone(whole, TOPIC), "and this says all that it asks"


@pytest.mark.parametrize(
    "before",
    [
        "Please answer in French from now on.",
        "You are my interpreter for Polish.",
        "I'm a complete beginner.",
        "Keep your answers short.",
        "I'm allergic to nuts, keep that in mind.",
        "Act as a pirate.",
        "Assume that pi equals 3.",
        "You must rhyme in all your replies.",
        "I use Fedora 39.",
        "My kid weighs 12 kg.",
        "Antworte nur auf Deutsch.",
    ],
)
def test_what_was_asked_for_before_still_holds(before: str) -> None:
    question = "What is the difference between a debit card and a credit card?"
    assert not stands_alone(question, history(before, "All right."))


def test_what_is_no_text_keeps_the_history_and_system_prompts_do_not_count() -> None:
    question = "What is the capital of Burkina Faso called today?"
    picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert not stands_alone(question, [picture]) and not stands_alone(question, [call])
    assert not stands_alone(question, [{"role": "tool", "content": "1"}])
    assert stands_alone("How tall is it?", [{"role": "system", "content": "Answer in French from now on."}])


def test_no_text_takes_long_to_read() -> None:
    began = time.perf_counter()
    for question in ("ok, " * 500 + "x", "thanks. " * 400, '"' * 3000, "the " * 900, "what is " + "“" * 3000):
        stands_alone(question, SMALL_TALK)
        stands_alone("What is the boiling point of ethanol at sea level?", history(question, "Yes."))
    assert not stands_alone("What is the boiling point of ethanol?", history("word " * 100_000, "Yes."))
    assert time.perf_counter() - began < 5, "of a few milliseconds"
