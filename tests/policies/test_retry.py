"""Which failures are tried again, and when."""

from __future__ import annotations

import random

import pytest

from policies.hedging import Percentile
from policies.retry import RetryBudget, blames, kind_of, pause, retry_after


@pytest.mark.parametrize(
    ("status", "ours", "kind", "blamed"),
    [
        (200, True, "", False),
        (302, True, "", False),
        (400, True, "final", False),
        (404, True, "final", False),
        (422, True, "final", False),
        (408, True, "timeout", True),
        (429, True, "limited", True),
        (429, False, "limited", False),  # of the client's own key
        (401, False, "final", False),
        (401, True, "refused", True),
        (403, True, "refused", True),
        (500, True, "broken", True),
        (503, False, "broken", True),
        (529, True, "broken", True),
        (501, True, "final", False),
    ],
)
def test_kinds_of_failures(status: int, ours: bool, kind: str, blamed: bool) -> None:
    assert kind_of(status, ours) == kind
    assert blames(kind_of(status, ours), ours) is blamed


def test_retry_after_in_all_its_spellings() -> None:
    now = 1_700_000_000.0
    assert retry_after({b"retry-after": b"7"}, now) == 7.0
    assert retry_after({b"retry-after-ms": b"250", b"retry-after": b"7"}, now) == 0.25
    assert retry_after({b"retry-after": b"Tue, 14 Nov 2023 22:13:50 GMT"}, now) == pytest.approx(30.0)
    assert retry_after({b"retry-after": b"Tue, 14 Nov 2020 22:13:50 GMT"}, now) == 0.0
    for nonsense in (b"soon", b"", b"-5", b"1e400", b"\xff"):
        assert retry_after({b"retry-after": nonsense}, now) is None or retry_after({b"retry-after": nonsense}, now) >= 0
    assert retry_after({}, now) is None


def test_pauses_are_spread_over_their_whole_length_and_wait_at_least_as_asked() -> None:
    draw = random.Random(1)
    first = [pause(1, draw.random(), None) for _ in range(1000)]
    assert min(first) < 0.01 and 0.49 < max(first) < 0.5
    assert max(pause(20, draw.random(), None) for _ in range(1000)) < 8.0
    assert pause(1, 0.5, 3.0) == 3.25


def test_retries_are_a_fifth_of_what_was_sent() -> None:
    budget = RetryBudget()
    retried = 0
    for _ in range(1000):
        budget.sent()
        retried += budget.take()
    assert 200 <= retried <= 211


def test_a_percentile_is_told_once_there_is_enough() -> None:
    seen = Percentile()
    for number in range(19):
        seen.add(float(number))
    assert seen.p95 is None
    for number in range(19, 220):
        seen.add(float(number))
    assert 200 <= (seen.p95 or 0) <= 215, "of the last 200"
