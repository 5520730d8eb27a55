"""What may be read from and written to the answer cache, and the reasons."""

from __future__ import annotations

from dataclasses import replace

import pytest

from backends.protocol import Answer, View
from policies.cacheability import CacheRules, fresh_for, may_read, may_write, wants_variety
from policies.controls import Controls, MalformedControl, parse_controls

VIEW = View("openai-chat", "m", False, False, "What is a fjord?", "", {}, temperature=0.0)
GOOD = Answer({"choices": []}, ("stop",), None)


def test_a_plain_question_may_be_read_by_both_tiers() -> None:
    assert may_read(VIEW, CacheRules(), Controls()) == may_read(
        replace(VIEW, temperature=None), CacheRules(), Controls()
    )
    assert may_read(VIEW, CacheRules(), Controls()).semantic


@pytest.mark.parametrize(
    ("view", "rules", "controls", "exact", "reason"),
    [
        (VIEW, CacheRules(exact=False), Controls(), False, "disabled"),
        (VIEW, CacheRules(), Controls(no_cache=True), False, "no-cache"),
        (VIEW, CacheRules(semantic=False), Controls(), True, "semantic-disabled"),
        (replace(VIEW, temperature=0.7), CacheRules(sampling="never"), Controls(), False, "sampling"),
        (replace(VIEW, temperature=None), CacheRules(sampling="never"), Controls(), False, "sampling"),
        (replace(VIEW, temperature=0.7), CacheRules(sampling="exact-only"), Controls(), True, "sampling"),
        (replace(VIEW, question=None, no_question="not-text-only"), CacheRules(), Controls(), True, "not-text-only"),
        (replace(VIEW, question="  "), CacheRules(), Controls(), True, "no-text"),
        (replace(VIEW, choices=2), CacheRules(), Controls(), True, "several-choices"),
        (replace(VIEW, wants_logprobs=True), CacheRules(), Controls(), True, "logprobs"),
        (replace(VIEW, question="What time is it in Oslo?"), CacheRules(), Controls(), True, "volatile"),
        (replace(VIEW, question="the weather?"), CacheRules(volatile={"weather": 0}), Controls(), True, "volatile"),
        (VIEW, CacheRules(), Controls(exact_only=True), True, "exact-only"),
        (replace(VIEW, temperature=0.7), CacheRules(buckets=3), Controls(), True, "buckets"),
    ],
)
def test_reading_is_refused_with_a_reason(
    view: View, rules: CacheRules, controls: Controls, exact: bool, reason: str
) -> None:
    readable = may_read(view, rules, controls)
    assert (readable.exact, readable.semantic, readable.reason) == (exact, False, reason)


def test_a_greedy_request_is_read_whatever_the_sampling_rule() -> None:
    for sampling in ("reuse", "exact-only", "never"):
        assert may_read(VIEW, CacheRules(sampling=sampling), Controls()).semantic


@pytest.mark.parametrize(
    ("status", "answer", "controls", "reason"),
    [
        (200, GOOD, Controls(), ""),
        (500, GOOD, Controls(), "status-500"),
        (404, GOOD, Controls(), "status-404"),
        (302, GOOD, Controls(), "status-302"),
        (202, GOOD, Controls(), "status-202"),
        (206, GOOD, Controls(), "status-206"),
        (200, replace(GOOD, flaw="finish-length"), Controls(), "finish-length"),
        (200, replace(GOOD, flaw="unterminated"), Controls(), "unterminated"),
        (200, GOOD, Controls(no_store=True), "no-store"),
        (200, GOOD, Controls(ttl=0.0), "ttl-0"),
        (200, replace(GOOD, finish_reasons=("stop", "stop")), Controls(), "choices-missing"),
    ],
)
def test_only_complete_good_answers_may_enter(status: int, answer: Answer, controls: Controls, reason: str) -> None:
    assert may_write(VIEW, CacheRules(), controls, status, answer) == reason


def test_no_cache_still_stores_the_fresh_answer() -> None:
    assert may_write(VIEW, CacheRules(), Controls(no_cache=True), 200, GOOD) == ""


def test_a_caller_may_shorten_the_ttl_but_not_lengthen_it() -> None:
    rules = CacheRules(ttl=60)
    assert fresh_for(VIEW, rules, Controls(ttl=5)) == 5
    assert fresh_for(VIEW, rules, Controls(ttl=5000)) == 60
    assert fresh_for(VIEW, rules, Controls()) == 60


def test_volatile_questions_live_shorter_or_are_not_kept_at_all() -> None:
    weather = replace(VIEW, question="What is the weather in Oslo?")
    assert fresh_for(weather, CacheRules(), Controls()) == 600
    assert fresh_for(weather, CacheRules(ttl=60), Controls()) == 60
    assert fresh_for(weather, CacheRules(volatile={"weather": 5.0}), Controls(ttl=90)) == 5
    assert may_write(replace(VIEW, question="What time is it?"), CacheRules(), Controls(), 200, GOOD) == "volatile"


def test_variety_is_for_those_who_may_want_it() -> None:
    assert wants_variety(replace(VIEW, temperature=None), CacheRules(buckets=2))
    assert not wants_variety(VIEW, CacheRules(buckets=2)) and not wants_variety(VIEW, CacheRules())


def test_controls_are_parsed() -> None:
    controls = parse_controls(
        {
            "cache-control": "No-Cache, no-store , only-if-cached, max-age=30",
            "x-hitherto-ttl": "90s",
            "x-hitherto-threshold": "0.97",
            "x-hitherto-namespace": "blue",
            "x-hitherto-tags": "faq, v2,faq",
        }
    )
    assert controls == Controls(True, True, True, 30.0, 90.0, 0.97, "blue", tags=("faq", "v2"))
    assert parse_controls({}) == Controls()


def test_the_words_of_litellm_and_portkey_are_understood_and_the_strictest_holds() -> None:
    said = {"ttl": 60, "s-maxage": 20, "no-cache": True, "no-store": False, "namespace": "n"}
    controls = parse_controls({"x-hitherto-ttl": "30s"}, said)
    assert controls == Controls(no_cache=True, ttl=30.0, max_age=20.0, namespace="n")
    config = '{"cache": {"mode": "simple", "max_age": 60}, "strategy": {}}'
    controls = parse_controls({"x-portkey-config": config, "x-portkey-cache-force-refresh": "True"})
    assert controls == Controls(no_cache=True, ttl=60.0, exact_only=True)
    assert parse_controls({"x-portkey-cache-namespace": "n"}).namespace == "n"
    assert parse_controls({}, {"no-cache": "true", "no-store": "false"}) == Controls(no_cache=True)
    assert parse_controls({"x-portkey-config": "pc-saved-42"}) == Controls()
    assert parse_controls({}, {"my": "own"}) == parse_controls({}, "yes") == Controls(), "another backend's field"


def test_a_caller_can_not_forge_a_namespace_out_of_two() -> None:
    both = parse_controls({"x-hitherto-namespace": "a", "x-portkey-cache-namespace": "b"})
    assert both.namespace not in ("a", "b", "ab")


@pytest.mark.parametrize(
    ("headers", "cache", "named"),
    [
        ({"x-portkey-config": "{"}, None, "x-portkey-config"),
        ({"x-portkey-config": '{"cache": {"max_age": "1h"}}'}, None, "cache.max_age"),
        ({}, {"ttl": "1h"}, "cache.ttl"),
        ({}, {"no-cache": 2}, "cache.no-cache"),
        ({}, {"no-store": "yes"}, "cache.no-store"),
        ({}, {"s-maxage": -1}, "cache.s-maxage"),
        ({"x-hitherto-tags": "two words"}, None, "x-hitherto-tags"),
        ({"x-hitherto-tags": ",".join(map(str, range(40)))}, None, "x-hitherto-tags"),
    ],
)
def test_malformed_words_of_others_are_named(headers: dict[str, str], cache: object, named: str) -> None:
    with pytest.raises(MalformedControl, match=named):
        parse_controls(headers, cache)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-hitherto-threshold": "1.5"},
        {"x-hitherto-threshold": "high"},
        {"x-hitherto-ttl": "-1"},
        {"cache-control": "max-age=soon"},
    ],
)
def test_malformed_controls_name_the_header(headers: dict[str, str]) -> None:
    with pytest.raises(MalformedControl, match=next(iter(headers))):
        parse_controls(headers)
