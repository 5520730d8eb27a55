"""The breaker's table, row by row, and what must hold after any sequence of events."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from policies.breaker import Breaker, BreakerConfig, Pass

CONFIG = BreakerConfig(failures=0.5, minimum=4, in_a_row=3, window=10.0, pause=5.0, probes=2)


def passed(breaker: Breaker, now: float) -> Pass:
    permission = breaker.ask(now)
    assert permission is not None
    return permission


def opened() -> Breaker:
    breaker = Breaker(CONFIG)
    for _ in range(3):
        breaker.failed(0.0, passed(breaker, 0.0))
    assert breaker.state == "open"
    return breaker


def test_failures_in_a_row_open_it() -> None:
    breaker = Breaker(CONFIG)
    for result in ("failed", "failed", "succeeded", "failed"):
        getattr(breaker, result)(0.0, passed(breaker, 0.0))
    assert breaker.state == "open", "three of four failed"
    assert opened().ask(4.9) is None and opened().wait(1.0) == 4.0


def test_a_share_of_failures_opens_it_once_there_are_enough() -> None:
    breaker = Breaker(BreakerConfig(failures=0.5, minimum=6, in_a_row=100, window=10.0))
    for result in ("failed", "succeeded", "failed", "succeeded", "failed"):
        getattr(breaker, result)(0.0, passed(breaker, 0.0))
    assert breaker.state == "closed"
    breaker.succeeded(0.0, passed(breaker, 0.0))
    assert breaker.state == "closed", "a success does not open it"
    breaker.failed(0.0, passed(breaker, 0.0))
    assert breaker.state == "open"


def test_what_is_older_than_the_window_does_not_count() -> None:
    breaker = Breaker(BreakerConfig(failures=0.5, minimum=4, in_a_row=100, window=10.0))
    for _ in range(3):
        breaker.failed(0.0, passed(breaker, 0.0))
    breaker.failed(11.0, passed(breaker, 11.0))
    assert breaker.state == "closed"


def test_after_the_pause_a_few_probes_decide() -> None:
    breaker = opened()
    first, second = passed(breaker, 5.0), passed(breaker, 5.0)
    assert breaker.state == "half-open" and first.probe and breaker.ask(5.0) is None, "no more than two at once"
    breaker.succeeded(5.1, first)
    assert breaker.ask(5.1) is None and breaker.state == "half-open"
    breaker.succeeded(5.2, second)
    assert breaker.state == "closed"


def test_a_failed_probe_doubles_the_pause_and_a_success_makes_it_short_again() -> None:
    breaker = opened()
    breaker.failed(5.0, passed(breaker, 5.0))
    assert breaker.ask(14.9) is None
    breaker.failed(15.0, passed(breaker, 15.0))
    assert breaker.ask(34.9) is None
    for _ in range(2):
        breaker.succeeded(36.0, passed(breaker, 36.0))
    assert breaker.state == "closed"
    for _ in range(3):
        breaker.failed(40.0, passed(breaker, 40.0))
    assert breaker.wait(40.0) == 5.0


def test_a_probe_whose_client_leaves_makes_room_for_another() -> None:
    breaker = opened()
    first, _ = passed(breaker, 5.0), passed(breaker, 5.0)
    breaker.dropped(first)
    assert breaker.ask(5.0) is not None and breaker.ask(5.0) is None


def test_what_began_before_a_change_says_nothing_about_the_state_after_it() -> None:
    breaker = Breaker(CONFIG)
    old = [passed(breaker, 0.0) for _ in range(10)]
    for permission in old[:3]:
        breaker.failed(0.0, permission)
    assert breaker.state == "open"
    for permission in old[3:6]:
        breaker.failed(1.0, permission)
        breaker.succeeded(1.0, permission)
    assert breaker.state == "open" and breaker.wait(1.0) == 4.0
    probe = passed(breaker, 5.0)
    breaker.succeeded(5.0, old[6])
    breaker.succeeded(5.0, probe)
    assert breaker.state == "half-open", "only probes count"


@settings(max_examples=400, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 4), st.sampled_from(["ask", "failed", "succeeded", "dropped"])), max_size=120))
def test_it_always_comes_back_and_never_lets_more_than_its_probes_through(steps: list[tuple[float, str]]) -> None:
    breaker, now, out = Breaker(CONFIG), 0.0, []
    for pause, event in steps:
        now += pause
        if event == "ask":
            if (permission := breaker.ask(now)) is not None:
                out.append(permission)
        elif out:
            permission = out.pop(0)
            if event == "dropped":
                breaker.dropped(permission)
            else:
                getattr(breaker, event)(now, permission)
        probing = sum(one.probe and one.era == breaker.era for one in out)
        assert breaker.state != "half-open" or probing <= CONFIG.probes
    for permission in out:
        breaker.dropped(permission)
    for _ in range(100):
        now += 200.0
        if (permission := breaker.ask(now)) is not None:
            breaker.succeeded(now, permission)
    assert breaker.state == "closed"
