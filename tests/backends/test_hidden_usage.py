"""Usage that only we asked for is kept from the client, whatever the stream is cut into."""

from __future__ import annotations

from itertools import pairwise

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.dialects import sse
from backends.dialects.hidden_usage import HiddenUsage
from backends.dialects.openai_chat import with_usage

HEAD = b'{"id":"c","object":"chat.completion.chunk","created":1,"model":"m",'
TEXT = HEAD + b'"choices":[{"index":0,"delta":{"content":"say \\"usage\\":null, please"},"finish_reason":null}]'
USAGE = HEAD + b'"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}'
PLAIN = [TEXT + b"}", b"[DONE]"]
ASKED = [TEXT + b',"usage":null}', USAGE, b"[DONE]"]


def stream(events: list[bytes], end: bytes = b"\n\n") -> bytes:
    return b"".join(b"data: " + event + end for event in events)


def passed(pieces: list[bytes]) -> bytes:
    hidden = HiddenUsage()
    return b"".join([hidden.passed(piece) for piece in pieces]) + hidden.ended()


@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_the_client_gets_what_it_would_have_got(end: bytes) -> None:
    assert passed([stream(ASKED, end)]) == stream(PLAIN, end)
    assert passed([stream([event], end) for event in ASKED]) == stream(PLAIN, end)


@given(st.lists(st.integers(0, len(stream(ASKED))), max_size=12))
@settings(max_examples=200, deadline=None)
def test_wherever_the_network_cuts_it(cuts: list[int]) -> None:
    whole, places = stream(ASKED), [0, *sorted(cuts), len(stream(ASKED))]
    pieces = [whole[start:end] for start, end in pairwise(places)]
    assert passed(pieces) == stream(PLAIN)


@pytest.mark.parametrize(
    "event",
    [
        TEXT + b',"usage":{"prompt_tokens":3,"completion_tokens":2}}',  # some tell it with the last words, asked or not
        b'{"error":{"message":"usage limit","type":"x"}}',
        b'{"choices":[],"prompt_filter_results":[]}',
        b'"usage"',
        b'{"usage":',
    ],
)
def test_other_events_pass_as_they_are(event: bytes) -> None:
    assert passed([stream([event])]) == stream([event])


def test_a_stream_that_breaks_off_keeps_what_had_come() -> None:
    assert passed([b"data: " + TEXT]) == b"data: " + TEXT
    assert passed([stream(PLAIN[:1]), b"data: {"]) == stream(PLAIN[:1]) + b"data: {"
    endless = b"data: " + b"x" * (2 << 20)
    assert passed([endless[:1000], endless[1000:]]) == endless


@pytest.mark.parametrize(
    ("body", "options"),
    [
        (b'{"model":"m","stream":true}', None),
        (b' {"stream_options": null, "model":"m"}', None),
        (b'{"a":{"stream_options":1},"stream_options":{"include_usage":false,"x":[{}]}}', {"x": [{}]}),
        (b'{"str\\u0065am_options":{"include_obfuscation":false}}', {"include_obfuscation": False}),
        (b'{"stream_options":{},"stream_options":{"include_usage":false}}', {"include_usage": False}),
        (b'{"temperature":1e400000,"n":123456789012345678901234567890}', None),
    ],
)
def test_a_request_that_asks_for_usage_is_the_same_otherwise(body: bytes, options: object) -> None:
    asked = with_usage(body, options)
    value = orjson.loads(asked) if b"1e400000" not in asked else None
    if value is not None:
        told = {**options, "include_usage": True} if isinstance(options, dict) else {"include_usage": True}
        assert value.pop("stream_options") == told
        before = orjson.loads(body)
        before.pop("stream_options", None)
        assert value == before
    else:
        assert asked.endswith(body[1:]), "numbers that no parser reads stay as they are"


def test_pieces_of_streams_are_counted_by_what_they_add() -> None:
    assert sse.deltas(stream(PLAIN)) == 2
    messages = (
        b'event: message_start\ndata: {}\n\nevent: content_block_delta\ndata: {"delta":1}\n\nevent: message_delta\n'
    )
    assert sse.deltas(messages) == 1
    assert sse.deltas(b"event: response.output_text.delta\ndata: {}\n\nevent: response.completed\n") == 1
