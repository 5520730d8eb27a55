from __future__ import annotations

from policies.routing import Target, candidates

ROUTES = {
    "gpt-4": (Target("exact"),),
    "gpt-*": (Target("family"),),
    "gpt-4*": (Target("closer"), Target("second", "other")),
    "*": (Target("rest"),),
}


def test_exact_names_win_over_patterns_and_closer_patterns_over_wider_ones() -> None:
    assert candidates("gpt-4", ROUTES)[0].backend == "exact"
    assert candidates("gpt-4o", ROUTES) == (Target("closer"), Target("second", "other"))
    assert candidates("gpt-5", ROUTES)[0].backend == "family"
    assert candidates("llama", ROUTES)[0].backend == "rest"


def test_an_unknown_model_has_no_candidates() -> None:
    assert candidates("llama", {"gpt-4": (Target("a"),)}) == ()
