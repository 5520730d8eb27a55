"""Where a request may run, and in which order."""

import random
from collections import Counter

from policies.routing import Route, Target, able, allows, equals, in_order, match, needs, ranked, within_load

TABLE = ("gpt-4", "gpt-*", "gpt-4*", "*")
A, B = Target("a", weight=3), Target("b", weight=1)


def test_the_exact_name_wins_then_the_longest_literal_start() -> None:
    assert match("gpt-4", TABLE) == "gpt-4"
    assert match("gpt-4o", TABLE) == "gpt-4*"
    assert match("gpt-5", TABLE) == "gpt-*"
    assert match("llama", TABLE) == "*"
    assert match("llama", ("gpt-4", "gpt-*")) is None


def test_lists_of_models_know_patterns() -> None:
    assert allows(["gpt-*", "fast"], "gpt-5") and allows(["gpt-*", "fast"], "fast")
    assert not allows(["gpt-*", "fast"], "claude") and not allows(["fast"], "faster")


def test_targets_with_weights_are_equals_and_the_others_fallbacks() -> None:
    assert equals((Target("c"), A, B)) == [A, B]
    assert equals((Target("c"), Target("d"))) == [Target("c")]
    drained = Target("drained", weight=0)
    assert equals((drained, Target("c"))) == [Target("c")] and equals((drained,)) == (drained,)
    assert Route((A, Target("c", context=5))).is_choosy and not Route((A, B)).is_choosy


def test_what_a_request_needs() -> None:
    image = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "data:,"}}]
    ask = {"model": "m", "messages": [{"role": "user", "content": image}], "tools": [{}], "logprobs": True, "n": 2}
    ask["response_format"] = {"type": "json_schema"}
    assert needs(ask) == {"images", "tools", "logprobs", "several-choices", "json-schema"}
    assert needs({"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": []}) == frozenset()
    assert needs({"messages": "nonsense", "tools": 3}) == {"tools"}


def test_only_who_can_do_it_is_asked_and_the_reason_is_told() -> None:
    small, blind, all_round = Target("small", context=100), Target("blind", lacks=frozenset({"images"})), Target("c")
    assert able([small, blind, all_round], frozenset({"images"}), 101) == ([all_round], "")
    found, why = able([blind, Target("mute", lacks=frozenset({"audio", "images"}))], frozenset({"images"}), 5)
    assert found == [] and why == "blind has no images; mute has no images"
    assert able([small, Target("large", context=200)], frozenset(), 300)[0] == [Target("large", context=200)], (
        "the number is an estimate: the roomiest may say for itself"
    )


def test_weights_share_the_load() -> None:
    draw = random.Random(1)
    first = Counter(in_order([B, A], "weighted", b"", draw, {})[0].backend for _ in range(4000))
    assert 0.72 < first["a"] / 4000 < 0.78
    keys = [str(number).encode() for number in range(4000)]
    sticky = [in_order([B, A], "sticky", key, draw, {})[0].backend for key in keys]
    assert 0.72 < sticky.count("a") / 4000 < 0.78
    assert sticky == [in_order([A, B], "sticky", key, draw, {})[0].backend for key in keys], "whatever their order"


def test_only_the_conversations_of_a_lost_backend_move() -> None:
    places = [Target(name, weight=1) for name in "abcd"]
    keys = [str(number).encode() for number in range(400)]
    homes = {key: in_order(places, "sticky", key, random.Random(), {})[0].backend for key in keys}
    after = {key: in_order(places[:3], "sticky", key, random.Random(), {})[0].backend for key in keys}
    assert all(after[key] == home for key, home in homes.items() if home != "d")
    assert {after[key] for key, home in homes.items() if home == "d"} == {"a", "b", "c"}


def test_fallbacks_come_after_equals_and_what_is_drained_last() -> None:
    order = in_order([Target("drained", weight=0), Target("fallback"), A, B], "weighted", b"", random.Random(3), {})
    assert {one.backend for one in order[:2]} == {"a", "b"}
    assert [one.backend for one in order[2:]] == ["fallback", "drained"]


def test_of_two_the_faster_is_asked_and_who_was_not_measured_first() -> None:
    places = [Target(name, weight=1) for name in "abc"]
    pace = {"a": 0.1, "b": 0.2, "c": 0.9}
    draw = random.Random(5)
    first = Counter(in_order(places, "fastest", b"", draw, pace)[0].backend for _ in range(3000))
    assert first["c"] == 0 and first["a"] > first["b"] > 500
    fresh = Counter(in_order(places, "fastest", b"", draw, {"a": 0.1, "b": 0.2})[0].backend for _ in range(900))
    assert fresh["c"] > 500


def test_replicas_keep_their_keys_until_they_carry_too_much() -> None:
    places = ["r1", "r2", "r3"]
    home = ranked(b"prefix", places, {}, 1.25)[0]
    assert ranked(b"prefix", places, {home: 3}, 1.25)[0] == home
    busy = ranked(b"prefix", places, {home: 5}, 1.25)
    assert busy[0] != home and busy[-1] == home
    assert busy[0] == ranked(b"prefix", places, {}, 1.25)[1], "always the same next"
    assert within_load([], {}, 1.25) == []
