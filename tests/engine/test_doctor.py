"""The prefix doctor: finds the one small difference that costs a long prefix."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.engine.doctor import PrefixDoctor, _common

WORDS: list[str] = []


def encode(text: str) -> list[int]:
    """One token a word, in a vocabulary that grows."""
    ids = []
    for word in text.split(" "):
        if word not in WORDS:
            WORDS.append(word)
        ids.append(WORDS.index(word))
    return ids


def decode(tokens: Sequence[int]) -> str:
    return " ".join(WORDS[token] for token in tokens)


BODY = " ".join(f"rule{number}" for number in range(200))


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        ("Today is 2026-11-28 .", "Today is 2026-11-29 .", "a date or time"),
        ("Ticket number 81 for you", "Ticket number 82 for you", "a number or identifier"),
        ("Dear Anna , listen", "Dear Bert , listen", "different text"),
        ("Hello there  you", "Hello there you", "blanks"),
    ],
)
def test_one_small_difference_is_found_with_its_price(first: str, second: str, reason: str) -> None:
    doctor = PrefixDoctor(decode)
    for text in (first, second, first, second):
        doctor.look(encode(f"System: {text} {BODY} question"))
    report = doctor.report()
    (finding,) = report["findings"]
    assert finding["reason"].startswith(reason)
    assert finding["times"] == 1, "the third and fourth prompt were seen before"
    assert 180 <= finding["lost_tokens"] <= 201 and report["lost_tokens"] == finding["lost_tokens"]
    assert finding["before"].startswith("System:") and len(finding["variants"]) == 2


def test_a_common_beginning_is_nothing_to_complain_about() -> None:
    doctor = PrefixDoctor(decode)
    for question in ("why", "how", "who are you"):
        doctor.look(encode(f"{BODY} {question}"))
        doctor.reused(150)
    report = doctor.report()
    assert report["findings"] == [] and report["reused_tokens"] == 450 and report["prompt_tokens"] > 600


def test_tenants_are_not_compared() -> None:
    doctor = PrefixDoctor(decode)
    doctor.look(encode(f"a {BODY}"), "one")
    doctor.look(encode(f"b {BODY}"), "two")
    assert doctor.report()["findings"] == []


@given(st.binary(max_size=40), st.binary(max_size=40))
def test_common_is_the_length_of_the_common_beginning(a: bytes, b: bytes) -> None:
    length = _common(a, b)
    assert a[:length] == b[:length]
    assert length == min(len(a), len(b)) or a[length] != b[length]
