"""Marks for Anthropic, keys for OpenAI, and what must not be touched."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.prompt_cache import MOST, PromptCacheConfig, Reuse, minimum, prepare

ON = PromptCacheConfig(mode="on")
LONG = "word " * 4000
TOOL = {"name": "look_up", "description": LONG, "input_schema": {"type": "object"}}
TALK = [{"role": role, "content": role} for role in ("user", "assistant", "user")]


def anthropic(**fields: Any) -> dict[str, Any]:
    return {
        "model": "claude-sonnet-4-5",
        "max_tokens": 10,
        "system": LONG,
        "tools": [TOOL],
        "messages": TALK,
        **fields,
    }


def marked(body: dict[str, Any], config: PromptCacheConfig = ON, reuse: Reuse | None = None, now: float = 0.0) -> Any:
    raw = orjson.dumps(body)
    return orjson.loads(prepare(raw, "breakpoints", config, b"tenant", reuse or Reuse(), now).body)


def test_tools_system_and_history_get_a_mark_each() -> None:
    out = marked(anthropic())
    assert out["tools"][-1]["cache_control"] == {"type": "ephemeral"}
    assert out["system"] == [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}}]
    assert out["messages"][-1]["content"][-1]["cache_control"] == {"type": "ephemeral"}


def test_what_is_shorter_than_the_model_caches_gets_none() -> None:
    raw = orjson.dumps(anthropic(system="short", tools=[]))
    assert prepare(raw, "breakpoints", ON, b"t", Reuse(), 0.0).body == raw
    body = anthropic(system="word " * 1500, tools=[])
    assert "cache_control" in marked(body)["system"][0]
    assert "cache_control" not in orjson.dumps(marked({**body, "model": "claude-haiku-4-5"})).decode()
    assert [minimum(name) for name in ("claude-opus-5", "claude-opus-4-5-20251101", "claude-sonnet-4-5", "new")] == [
        512, 4096, 1024, 1024]  # fmt: skip


def test_the_clients_own_marks_stay_and_there_are_never_more_than_four() -> None:
    own = {"type": "text", "text": LONG, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    out = marked(anthropic(system=[own, {"type": "text", "text": "x"}]))
    assert out["system"] == [own, {"type": "text", "text": "x"}], "a part that has a mark gets no other"
    assert out["tools"][-1]["cache_control"]["ttl"] == "1h", "before one for an hour only such may stand"
    four = [{"type": "text", "text": LONG, "cache_control": {"type": "ephemeral"}} for _ in range(4)]
    body = anthropic(messages=[{"role": "user", "content": four}])
    raw = orjson.dumps(body)
    assert prepare(raw, "breakpoints", ON, b"t", Reuse(), 0.0).body == raw
    automatic = orjson.dumps(anthropic(cache_control={"type": "ephemeral"}))
    assert prepare(automatic, "breakpoints", ON, b"t", Reuse(), 0.0).body == automatic


def test_a_long_conversation_gets_marks_that_this_turn_may_find() -> None:
    turns = [{"role": ("user", "assistant")[number % 2], "content": f"{number} {LONG}"} for number in range(45)]
    out = marked(anthropic(messages=turns, tools=[]))
    places = [number for number, turn in enumerate(out["messages"]) if "cache_control" in turn["content"][0]]
    assert places == [6, 25, 44], "what was written up to 20 blocks before a mark is found"


def test_a_turn_of_many_tools_still_finds_what_the_turn_before_wrote() -> None:
    uses = [{"type": "tool_use", "id": str(n), "name": "f", "input": {"n": LONG}} for n in range(20)]
    results = [{"type": "tool_result", "tool_use_id": str(n), "content": LONG} for n in range(20)]
    talk = [*TALK, {"role": "assistant", "content": uses}, {"role": "user", "content": results}]
    out = marked(anthropic(messages=talk, tools=[]))
    blocks = [block for turn in out["messages"] for block in turn["content"]]
    places = [number for number, block in enumerate(blocks) if "cache_control" in block]
    assert places[-1] == 42 and max(b - a for a, b in pairwise(places)) <= 20 and places[0] <= 4


def test_single_questions_pay_nothing_for_an_end_that_never_comes_again() -> None:
    out = marked(anthropic(messages=[{"role": "user", "content": LONG}]))
    assert "cache_control" not in out["messages"][0]["content"][0] and "cache_control" in out["system"][0]


def test_what_takes_no_mark_gets_none() -> None:
    content = [
        {"type": "text", "text": LONG},
        {"type": "thinking", "thinking": LONG, "signature": "x"},
        {"type": "new"},
    ]
    out = marked(anthropic(messages=[{"role": "assistant", "content": content}]))
    assert ["cache_control" in block for block in out["messages"][0]["content"]] == [True, False, False]
    later = {**TOOL, "name": "z", "defer_loading": True}
    assert ["cache_control" in tool for tool in marked(anthropic(tools=[later, TOOL]))["tools"]] == [True, False]


def test_marks_inside_of_tool_results_count_and_bind_the_order() -> None:
    def body(ttl: dict[str, str]) -> dict[str, Any]:
        nested = [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral", **ttl}}]
        result = {"type": "tool_result", "tool_use_id": "1", "content": nested}
        return anthropic(messages=[*TALK, {"role": "user", "content": [result, {"type": "text", "text": LONG}]}])

    hour = marked(body({"ttl": "1h"}))
    assert hour["system"][0]["cache_control"]["ttl"] == "1h", "nothing shorter may stand before it"
    short = marked(body({}), PromptCacheConfig(mode="on", ttl="1h"))
    assert "cache_control" not in short["messages"][-1]["content"][1], "its part has a mark of the client's own"


def test_the_hour_is_chosen_where_the_prefix_comes_again_that_late_and_nothing_where_later() -> None:
    for gap, life in ((60.0, {"type": "ephemeral"}), (1200.0, {"type": "ephemeral", "ttl": "1h"}), (7200.0, None)):
        reuse = Reuse()
        for number in range(4):
            out = marked(anthropic(), reuse=reuse, now=number * gap)
        assert (out["system"] if life is None else out["system"][0]["cache_control"]) == (life or LONG)


def test_a_forced_life_is_kept() -> None:
    out = marked(anthropic(), PromptCacheConfig(mode="on", ttl="1h"))
    assert out["system"][0]["cache_control"]["ttl"] == "1h"


def test_report_changes_nothing_and_tells() -> None:
    raw = orjson.dumps(anthropic())
    prepared = prepare(raw, "breakpoints", PromptCacheConfig(mode="report"), b"t", Reuse(), 0.0)
    assert prepared.body == raw and prepared.note == "would=tools:5m,system:5m,messages:5m"
    off = prepare(raw, "breakpoints", PromptCacheConfig(), b"t", Reuse(), 0.0)
    assert off.body == raw and off.note == ""


def test_a_key_is_the_same_for_the_same_beginning_of_the_same_tenant() -> None:
    def key(tenant: bytes = b"t", question: str = "q", system: str = "s", **fields: Any) -> Any:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        raw = orjson.dumps({"model": "gpt-5", "messages": messages, **fields})
        return orjson.loads(prepare(raw, "key", ON, tenant, Reuse(), 0.0).body).get("prompt_cache_key")

    assert key() == key(question="other") and key().startswith("h-")
    assert len({key(), key(tenant=b"u"), key(system="x"), key(tools=[{"type": "function"}])}) == 4
    assert key(prompt_cache_key="mine") == "mine"


def test_tools_in_another_order_are_the_same_prefix() -> None:
    def tools(names: str) -> list[dict[str, Any]]:
        return [{"type": "function", "function": {"name": name}} for name in names]

    def sent(names: str) -> Any:
        raw = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "q"}], "tools": tools(names)})
        return orjson.loads(prepare(raw, "key", ON, b"t", Reuse(), 0.0).body)

    assert sent("ab") == sent("ba") and sent("ba")["tools"] == tools("ab")
    own = anthropic(tools=[{**TOOL, "name": "b"}, {**TOOL, "name": "a", "cache_control": {"type": "ephemeral"}}])
    assert [tool["name"] for tool in marked(own)["tools"]] == ["b", "a"], "a mark of the client's own binds the order"


DEEP = b'{"system": [{"type": "text", "text": "x", "y": ' + b"[" * 300 + b"]" * 300 + b"}]}"


@pytest.mark.parametrize(
    "raw",
    [DEEP, b"", b"[]", b"{", b'{"messages": 3}', b'{"messages": [1, null], "tools": [3]}', b'{"system": 5}'],
    ids=lambda raw: repr(raw[:24]),
)
@pytest.mark.parametrize("style", ["key", "breakpoints"])
def test_what_cannot_be_read_goes_as_it_is(raw: bytes, style: Any) -> None:
    sent = prepare(raw, style, ON, b"t", Reuse(), 0.0).body
    assert sent == raw or orjson.loads(sent).items() >= orjson.loads(raw).items(), "at most a key is added"


_block = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_result"]), "text": st.sampled_from(["", "x", LONG])},
    optional={"cache_control": st.sampled_from([{"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}])},
)
_nested = st.builds(
    lambda blocks: {"type": "tool_result", "text": "x", "content": blocks}, st.lists(_block, max_size=3)
)
_content = st.one_of(st.sampled_from(["", "x", LONG]), st.lists(st.one_of(_block, _nested), max_size=6))


_message = st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant"]), "content": _content})


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.none(), _content), st.lists(_message, max_size=8), st.sampled_from(["auto", "5m", "1h"]))
def test_marks_are_never_too_many_nor_in_the_wrong_order_and_texts_never_change(
    system: Any, messages: list[dict[str, Any]], ttl: Any
) -> None:
    body = {"model": "claude-sonnet-4-5", "messages": messages, **({"system": system} if system is not None else {})}
    before = copy.deepcopy(body)
    own = [*_marks(before.get("system")), *_marks(before["messages"])]
    out = marked(body, PromptCacheConfig(mode="on", ttl=ttl))
    marks = [*_marks(out.get("system")), *_marks(out["messages"])]
    assert len(marks) <= max(MOST, len(own)) and len(marks) >= len(own)
    lives = ["ttl" in mark for mark in marks]
    if ["ttl" in mark for mark in own] == sorted(("ttl" in mark for mark in own), reverse=True):
        assert lives == sorted(lives, reverse=True), "an hour's marks come before those for five minutes"
    assert _texts(out) == _texts(before)


def _marks(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        yield from _marks(value.get("content"))
        if "cache_control" in value:
            yield value["cache_control"]
    for item in value if isinstance(value, list) else ():
        yield from _marks(item)


def _texts(value: Any) -> list[str]:
    parts = [value.get("system"), *(message["content"] for message in value["messages"])]
    found = []
    for part in parts:
        found += [part] if isinstance(part, str) and part else []
        found += [block["text"] for block in part if block["text"]] if isinstance(part, list) else []
    return found
