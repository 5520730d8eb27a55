"""The OpenAI chat dialect, judged against the official SDK's models where the shape matters."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from backends.dialects import openai_chat, sse
from backends.dialects.openai_chat import MalformedRequest, answer_from_json, answer_from_stream, view, with_model

TOOL_CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}


def completion(message: dict[str, Any], finish: str = "stop", **extra: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish, **extra}
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}
    return {"object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}


def stream(*chunks: dict[str, Any], done: bool = True) -> bytes:
    events = [sse.event(orjson.dumps({"id": "x", "created": 1, "model": "m", **chunk})) for chunk in chunks]
    return b"".join(events) + (openai_chat.DONE if done else b"")


def delta(content: dict[str, Any], finish: str | None = None, index: int = 0, **extra: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "delta": content, "finish_reason": finish, **extra}]}


def render(body: dict[str, Any], include_usage: bool = True) -> list[ChatCompletionChunk]:
    pieces = b"".join(openai_chat.render_stream(orjson.dumps(body), "chatcmpl-1", 7, include_usage))
    data = list(sse.data_fields(pieces))
    assert data[-1] == b"[DONE]"
    return [ChatCompletionChunk.model_validate(orjson.loads(item), strict=False) for item in data[:-1]]


TWO = completion({"content": "first answer, of several words"})
TWO["choices"].append({**TWO["choices"][0], "index": 1, "message": {"role": "assistant", "content": "second one"}})
BODIES = [
    completion({"content": "Hello there, how are you? I am fine.\n\nBye."}),
    completion({"content": None, "tool_calls": [TOOL_CALL, {**TOOL_CALL, "id": "call_2"}]}, "tool_calls"),
    completion({"content": "Let me look.", "tool_calls": [TOOL_CALL]}, "tool_calls"),
    completion({"content": "4", "reasoning_content": "2+2 is 4"}),
    completion(
        {"content": "ab"},
        logprobs={
            "content": [
                {"token": "a", "logprob": -0.1, "bytes": [97], "top_logprobs": []},
                {"token": "b", "logprob": -0.2, "bytes": [98], "top_logprobs": []},
            ]
        },
    ),
]


@pytest.mark.parametrize("body", [*BODIES, TWO])
@pytest.mark.parametrize("include_usage", [True, False])
def test_an_answer_survives_being_streamed_and_read_back(body: dict[str, Any], include_usage: bool) -> None:
    pieces = b"".join(openai_chat.render_stream(orjson.dumps(body), "chatcmpl-1", 7, include_usage))
    answer = answer_from_stream(pieces)
    assert answer.flaw == ""
    got, want = dict(answer.body), dict(body)
    if not include_usage:
        want.pop("usage")
    assert got == want


@pytest.mark.parametrize("body", BODIES)
def test_the_sdk_reads_every_rendering(body: dict[str, Any]) -> None:
    whole = ChatCompletion.model_validate(orjson.loads(openai_chat.render_json(orjson.dumps(body), "chatcmpl-9", 7)))
    assert (whole.id, whole.created) == ("chatcmpl-9", 7)
    chunks = render(body)
    assert {chunk.id for chunk in chunks} == {"chatcmpl-1"} and all(chunk.created == 7 for chunk in chunks)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == (whole.choices[0].message.content or "")
    assert chunks[-1].usage is not None and chunks[-1].choices == []
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    calls = [call for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.id, call.index) for call in calls] == [
        (call.id, index) for index, call in enumerate(whole.choices[0].message.tool_calls or ())
    ]


def test_long_content_is_not_one_lump_and_usage_comes_only_when_asked_for() -> None:
    chunks = render(completion({"content": "word " * 100}), include_usage=False)
    assert len(chunks) > 20
    assert all(chunk.usage is None for chunk in chunks) and all(chunk.choices for chunk in chunks)


def test_tool_call_deltas_are_put_together() -> None:
    def call(index: int, **fields: Any) -> dict[str, Any]:
        return delta({"tool_calls": [{"index": index, **fields}]})

    answer = answer_from_stream(
        stream(
            delta({"role": "assistant", "content": None}),
            call(0, id="c0", type="function", function={"name": "f", "arguments": ""}),
            call(0, function={"arguments": '{"x"'}),
            call(1, id="c1", type="function", function={"name": "g", "arguments": "{}"}),
            call(0, function={"arguments": ": 1}"}),
            delta({}, "tool_calls"),
        )
    )
    assert answer.flaw == ""
    assert answer.body["choices"][0]["message"]["tool_calls"] == [
        {"id": "c0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
        {"id": "c1", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]


def test_interleaved_choices_are_kept_apart_and_in_order() -> None:
    answer = answer_from_stream(
        stream(
            delta({"role": "assistant", "content": "B"}, index=1),
            delta({"role": "assistant", "content": "A"}, index=0),
            delta({"content": "b"}, "stop", index=1),
            delta({"content": "a"}, "stop", index=0),
        )
    )
    assert [choice["message"]["content"] for choice in answer.body["choices"]] == ["Aa", "Bb"]
    assert answer.finish_reasons == ("stop", "stop")


@pytest.mark.parametrize(
    ("chunks", "done", "flaw"),
    [
        ([delta({"content": "a"}, "stop")], False, "unterminated"),
        ([delta({"content": "a"})], True, "finish-None"),
        ([delta({"content": "a"}, "length")], True, "finish-length"),
        ([delta({"content": "a"}, "content_filter")], True, "finish-content_filter"),
        ([delta({"role": "assistant", "content": ""}), delta({}, "stop")], True, "empty"),
        ([{"error": {"message": "boom"}}], True, "error"),
        ([delta({"content": "a"}, "stop"), {"error": {"message": "boom"}}], True, "error"),
        ([], True, "no-choices"),
        ([delta({"refusal": "no"}, "stop")], True, "refusal"),
        (
            [
                delta({"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": "{"}}]}),
                delta({}, "tool_calls"),
            ],
            True,
            "tool-arguments",
        ),
    ],
)
def test_unfit_streams_say_why(chunks: list[dict[str, Any]], done: bool, flaw: str) -> None:
    assert answer_from_stream(stream(*chunks, done=done)).flaw == flaw


@pytest.mark.parametrize(
    ("body", "flaw"),
    [
        (b"", "not-json"),
        (b"<html>", "not-json"),
        (b"[]", "not-an-object"),
        (b"{}", "no-choices"),
        (b'{"error": {"message": "boom"}}', "error"),
        (orjson.dumps(completion({"content": "x"}, "length")), "finish-length"),
        (orjson.dumps(completion({"content": ""})), "empty"),
        (orjson.dumps(completion({"content": "x", "audio": {"id": "a"}})), "audio"),
        (orjson.dumps(completion({"content": "x"})), ""),
        (orjson.dumps(completion({"content": None, "tool_calls": [TOOL_CALL]}, "tool_calls")), ""),
    ],
)
def test_unfit_bodies_say_why(body: bytes, flaw: str) -> None:
    assert answer_from_json(body).flaw == flaw


def test_usage_in_a_comment_is_read_when_the_client_did_not_ask_for_it() -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    comment = b": hitherto-usage " + orjson.dumps(usage) + b"\n\n"
    answer = answer_from_stream(stream(delta({"content": "a"}, "stop"), done=False) + comment + openai_chat.DONE)
    assert answer.usage is not None and (answer.usage.prompt, answer.usage.cached) == (9, 4)


def test_sse_framing_variants_are_read() -> None:
    assert list(sse.data_fields(b"data: a\r\n\r\ndata:b\n\n: note\n\ndata: c\ndata: d\n\ndata: cut")) == [
        b"a",
        b"b",
        b"c\nd",
    ]


def test_the_question_is_the_last_user_turn_and_the_rest_is_scope() -> None:
    seen = view({"model": "m", "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]})
    assert seen.question == "q"
    assert seen.scope_fields["messages"] == [{"role": "system", "content": "s"}, {"role": "user"}]


@pytest.mark.parametrize(
    ("message", "question", "reason"),
    [
        ({"role": "user", "content": [{"type": "text", "text": "q"}]}, "q", ""),
        ({"role": "assistant", "content": "q"}, None, "last-turn-not-user"),
        ({"role": "tool", "content": "q", "tool_call_id": "c"}, None, "last-turn-not-user"),
        (
            {"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "image_url", "image_url": {}}]},
            None,
            "not-text-only",
        ),
        ({"role": "user", "content": None}, None, "no-text"),
        ({"role": "user"}, None, "no-text"),
    ],
)
def test_what_has_no_question_says_why(message: dict[str, Any], question: str | None, reason: str) -> None:
    seen = view({"model": "m", "messages": [message]})
    assert (seen.question, seen.no_question) == (question, reason)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [{}]}, "model"),
        ({"model": "", "messages": [{}]}, "model"),
        ({"model": 3, "messages": [{}]}, "model"),
        ({"model": "m"}, "messages"),
        ({"model": "m", "messages": []}, "messages"),
        ({"model": "m", "messages": ["hello"]}, "messages"),
        ({"model": "m", "messages": [{}], "stream": "yes"}, "stream"),
    ],
)
def test_malformed_requests_name_the_field(body: dict[str, Any], param: str) -> None:
    with pytest.raises(MalformedRequest) as caught:
        view(body)
    assert caught.value.param == param


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(body=st.dictionaries(st.text() | st.just("model"), JSON, max_size=4), model=st.text(), name=st.text())
def test_only_the_models_value_changes(body: dict[str, Any], model: str, name: str) -> None:
    raw = orjson.dumps({**body, "model": model}, option=orjson.OPT_INDENT_2)
    changed = with_model(raw, name)
    assert orjson.loads(changed) == {**orjson.loads(raw), "model": name}
    assert with_model(changed, model) == raw, "every other byte is as it was"


def test_nested_models_and_odd_spacing_are_left_alone() -> None:
    raw = b'{ "x": {"model": "no"}, "a": ["model", "no"] ,\n"model"  :\t"yes", "n": 1.0, "s": "\\"model\\": 1" }'
    assert with_model(raw, "new") == raw.replace(b'"yes"', b'"new"')


def test_only_what_is_one_text_has_a_text() -> None:
    def stored(*messages: dict[str, Any]) -> bytes:
        return orjson.dumps({"choices": [{"message": message} for message in messages]})

    said = {"role": "assistant", "content": "I'll book that."}
    assert openai_chat.text_of(stored(said)) == "I'll book that."
    call = {"id": "1", "type": "function", "function": {"name": "book", "arguments": '{"city": "Oslo"}'}}
    assert openai_chat.text_of(stored({**said, "tool_calls": [call]})) == "", "what it does is not said"
    assert openai_chat.text_of(stored({**said, "content": None})) == "" == openai_chat.text_of(stored(said, said))
    assert openai_chat.text_of(b"") == ""
