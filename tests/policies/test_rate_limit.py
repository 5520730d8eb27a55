"""Limits never admit more than they say, in whatever order things happen."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.rate_limit import Limit, Limits, Rates, Window, estimate, headers

MINUTE = Limit("t", "requests", 10, 60.0)


def use(window: Window, now: float, amount: int = 1, limit: Limit = MINUTE) -> float:
    """0 if it was admitted, else how long to wait."""
    window.forget(now)
    wait = window.state(now, limit, amount).wait
    if not wait:
        window.add(now, amount)
    return wait


def test_a_full_window_says_when_there_is_room_again() -> None:
    window = Window(60.0)
    assert [use(window, 0.5 + second) for second in range(10)] == [0.0] * 10
    wait = use(window, 10.0)
    assert wait == pytest.approx(51.0), "the slot of the first ends at 1 s, and counts for a minute from there"
    assert use(window, 10.0 + wait - 0.01) > 0
    assert use(window, 10.0 + wait) == 0.0


def test_more_than_the_whole_limit_never_fits() -> None:
    assert math.isinf(use(Window(60.0), 0.0, 11))


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 30), st.integers(1, 6)), max_size=60), st.integers(1, 12))
def test_no_span_as_long_as_the_window_admits_more_than_the_limit(steps: list[tuple[float, int]], most: int) -> None:
    window, limit, now, admitted = Window(60.0), Limit("t", "tokens", most, 60.0), 0.0, []
    for pause, amount in steps:
        now += pause
        wait = use(window, now, amount, limit)
        if not wait:
            admitted.append((now, amount))
        elif not math.isinf(wait):
            assert wait <= 61.0
    for start, _ in admitted:
        assert sum(amount for at, amount in admitted if start <= at < start + 60.0) <= most


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 50), st.integers(0, 80), st.floats(0, 30)), max_size=40),
    st.integers(20, 200),
)
def test_tokens_pass_the_limit_by_no_more_than_what_was_estimated_too_low(
    requests: list[tuple[float, int, int, float]], most: int
) -> None:
    """Each request: pause before it, its estimate, what it really takes, and for how long it runs."""
    window, limit, now = Window(60.0), Limit("t", "tokens", most, 60.0), 0.0
    events: list[tuple[float, int, int, float]] = []
    used: list[tuple[float, int]] = []
    worst = 0
    for pause, guess, real, runs in requests:
        now += pause
        for end, guessed, actual, at in sorted(event for event in events if event[0] <= now):
            window.forget(end)
            if actual > guessed:
                window.add(end, actual - guessed)
                used.append((end, actual - guessed))
            else:
                window.take_back(at, guessed - actual)
                used.append((at, actual - guessed))
            events.remove((end, guessed, actual, at))
        if not use(window, now, guess, limit):
            used.append((now, guess))
            events.append((now + runs, guess, real, now))
            worst += max(0, real - guess)
    for start, _ in used:
        assert sum(amount for at, amount in used if start <= at < start + 60.0) <= most + worst


def test_what_is_given_back_is_free_again_and_never_negative() -> None:
    window = Window(60.0)
    window.add(0.0, 8)
    window.take_back(0.0, 5)
    assert window.used == 3
    window.take_back(0.0, 5)
    assert window.used == 0
    window.take_back(500.0, 5)
    assert window.used == 0


def test_concurrency_counts_until_it_is_given_back() -> None:
    limit, window = Limit("t", "concurrency", 2, 0.0), Window(0.0)
    assert [use(window, float(at), 1, limit) for at in (0, 1000)] == [0.0, 0.0]
    assert use(window, 2000.0, 1, limit) > 0
    window.take_back(0.0, 1)
    assert use(window, 2000.0, 1, limit) == 0.0


def test_the_headers_show_the_tightest_of_each_kind() -> None:
    minute, day = Window(60.0), Window(86400.0)
    minute.add(0.0, 4)
    day.add(0.0, 4)
    states = [minute.state(0.0, MINUTE, 0), day.state(0.0, Limit("t", "requests", 5, 86400.0), 0)]
    assert dict(headers(states)) == {
        b"x-ratelimit-limit-requests": b"5",
        b"x-ratelimit-remaining-requests": b"1",
        b"x-ratelimit-reset-requests": b"87840.000s",
    }


def test_estimates_and_settings() -> None:
    assert estimate(400, 100) == 200 and estimate(0, None) == 257 and estimate(400, -5) == 100
    limits = Limits(requests_per_minute=5, tokens_per_day=7)
    assert limits.windows() == (("requests", 5, 60.0), ("tokens", 7, 86400.0))
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        Rates(concurrency=0)
