"""Tool calls out of a text that comes in pieces: found wherever it is cut, and nothing else is taken for one."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.engine.request import BadRequest, parse_chat
from backends.engine.tools import EXPLAINED, HERMES, LLAMA, ToolCalls, ToolForm, form_of

NAMES = frozenset({"weather", "time"})
CALL = '{"name": "weather", "arguments": {"city": "São <tool_call> {Paulo}"}}'


def read(form: ToolForm, text: str, cuts: list[int]) -> tuple[str, list[dict[str, Any]]]:
    reader, said, calls = ToolCalls(form, NAMES), "", []
    bounds = [0, *sorted({cut for cut in cuts if 0 < cut < len(text)}), len(text)]
    for start, end in itertools.pairwise(bounds):
        more, found = reader.push(text[start:end])
        said, calls = said + more, calls + found
    more, found = reader.flush()
    return said + more, calls + found


HERMES_TEXTS = [
    (f"<tool_call>\n{CALL}\n</tool_call>", "", 1),
    (f"I look.\n<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "I look.\n", 2),
    (f"<tool_call>{CALL}", "", 1),
    ("a < b and <tool_ is no mark", "a < b and <tool_ is no mark", 0),
    ("<tool_call>not json</tool_call> then", "<tool_call>not json</tool_call> then", 0),
    ('<tool_call>{"name": "stock", "arguments": {}}</tool_call>',
     '<tool_call>{"name": "stock", "arguments": {}}</tool_call>', 0),
    ('<tool_call>{"name": [], "arguments": {}}</tool_call>', '<tool_call>{"name": [], "arguments": {}}</tool_call>', 0),
    ("<tool_call>" + "[" * 100_000, "<tool_call>" + "[" * 100_000, 0),
    ("", "", 0),
]  # fmt: skip


@given(data=st.data())
@pytest.mark.parametrize(("text", "said", "count"), HERMES_TEXTS)
def test_hermes_calls_however_the_text_is_cut(text: str, said: str, count: int, data: st.DataObject) -> None:
    cuts = data.draw(st.lists(st.integers(0, min(len(text), 200)), max_size=20))
    shown, calls = read(HERMES, text, cuts)
    assert shown == said and len(calls) == count
    for call in calls:
        assert call["function"]["name"] == "weather"
        assert json.loads(call["function"]["arguments"]) == {"city": "São <tool_call> {Paulo}"}


@given(cuts=st.lists(st.integers(0, 80), max_size=20))
def test_llama_calls_are_the_whole_text_or_nothing(cuts: list[int]) -> None:
    call = '  {"name": "time", "parameters": {"zone": "UTC"}}'
    shown, calls = read(LLAMA, call, cuts)
    assert shown == "" and json.loads(calls[0]["function"]["arguments"]) == {"zone": "UTC"}
    for text in ("function f() { return 1 }", f"Here: {call}", '{"colour": "red"}'):
        assert read(LLAMA, text, cuts) == (text, [])


def test_forms_are_known_by_their_templates_and_others_refused() -> None:
    assert form_of("{{ messages }}") == EXPLAINED
    assert form_of("{% if tools %}<tool_call>") == HERMES
    assert form_of('{% if tools %}<|python_tag|> "parameters"') == LLAMA
    for strange in (
        "{% if tools %}[TOOL_CALLS]",
        "{% if tools %}<tool_call><function=",
        "{{ tools }}<tool_call><arg_key>",
    ):
        with pytest.raises(BadRequest, match="cannot read"):
            form_of(strange)


def test_a_null_tool_choice_is_none_at_all() -> None:
    tools = [{"type": "function", "function": {"name": "time"}}]
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": None}
    assert parse_chat(body).tools == tools
    assert parse_chat({**body, "tool_choice": "none"}).tools == []
