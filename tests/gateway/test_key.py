"""Which requests share an answer: every field changes the key or is ignored for a written reason."""

from __future__ import annotations

from typing import Any, get_type_hints

import orjson
import pytest
from openai.types.chat import completion_create_params

from backends.dialects.openai_chat import parse, view
from gateway.cache.key import DEFAULTS, IGNORED, Scope, key_digest, telling_headers

BASE: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "q"}]}
FIELDS = sorted(get_type_hints(completion_create_params.CompletionCreateParamsNonStreaming))


def key(
    body: dict[str, Any] | bytes,
    tenant: str = "t",
    target: tuple[str, ...] = ("b", "i", "m"),
    query: str = "",
    headers: dict[str, str] | None = None,
    namespace: str = "",
) -> bytes:
    seen = view(parse(body if isinstance(body, bytes) else orjson.dumps(body)))
    scope = Scope(seen, tenant, target, headers or {}, query, namespace).digest()
    return key_digest(scope, seen.question)


@pytest.mark.parametrize("field", [field for field in FIELDS if field not in ("model", "messages")])
def test_every_documented_field_changes_the_key_or_is_ignored_for_a_reason(field: str) -> None:
    one, two = ({"stream": True}, {"stream": False}) if field == "stream" else ({field: 0.25}, {field: {"x": 1}})
    same = key({**BASE, **one}) == key({**BASE, **two}) == key(BASE)
    if field in IGNORED:
        assert same and len(IGNORED[field]) > 5
    else:
        assert len({key({**BASE, **one}), key({**BASE, **two}), key(BASE)}) == 3


def test_ignored_fields_exist_in_the_api_or_in_a_backend() -> None:
    assert set(IGNORED) - set(FIELDS) <= {"cache_salt", "prompt_cache_options"}


@pytest.mark.parametrize("field", sorted(DEFAULTS))
def test_an_explicit_default_is_the_same_as_none_at_all(field: str) -> None:
    assert key({**BASE, field: DEFAULTS[field]}) == key(BASE) == key({**BASE, field: None})


def test_temperature_one_is_not_the_same_as_no_temperature() -> None:
    assert key({**BASE, "temperature": 1}) != key(BASE)
    assert key({**BASE, "temperature": 1}) == key({**BASE, "temperature": 1.0})
    assert key({**BASE, "temperature": 0}) != key({**BASE, "temperature": 1})


def test_unknown_fields_are_in_the_key() -> None:
    assert (
        len({key(BASE), key({**BASE, "num_ctx": 1}), key({**BASE, "num_ctx": 2}), key({**BASE, "num_ctx": None})}) == 4
    )


def test_zero_false_and_none_are_different_where_it_matters() -> None:
    assert len({key({**BASE, "x": value}) for value in (0, False, None, "", [], {})}) == 6
    assert key({**BASE, "n": True}) != key(BASE), "true is not 1"


def test_key_order_and_spacing_do_not_matter_but_list_order_does() -> None:
    a = b'{"model":"m","messages":[{"role":"user","content":"q"}],"tools":[{"a":1,"b":2},{"c":3}]}'
    b = b'{ "tools": [{"b":2,"a":1}, {"c":3}], "messages": [{"content":"q","role":"user"}], "model": "m" }'
    c = a.replace(b'{"a":1,"b":2},{"c":3}', b'{"c":3},{"a":1,"b":2}')
    assert key(a) == key(b) != key(c)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "other"}],
        [{"role": "user", "content": "q "}],
        [{"role": "user", "content": "Q"}],
        [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}],
        [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "q"}],
        [{"role": "user", "content": "q", "name": "bob"}],
        [{"role": "user", "content": [{"type": "text", "text": "q"}, {"type": "text", "text": ""}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,1"}}]}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,2"}}]}],
        [{"role": "assistant", "content": "q"}],
        [{"role": "tool", "content": "q"}],
    ],
)
def test_every_part_of_the_messages_is_in_the_key(messages: list[dict[str, Any]]) -> None:
    assert key({**BASE, "messages": messages}) != key(BASE)


def test_two_images_never_share_a_key() -> None:
    def image(url: str) -> bytes:
        parts = [{"type": "text", "text": "what is it?"}, {"type": "image_url", "image_url": {"url": url}}]
        return key({**BASE, "messages": [{"role": "user", "content": parts}]})

    assert image("data:image/png;base64,AAAA") != image("data:image/png;base64,AAAB")


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, {"data": "AAAB", "format": "wav"}),
        ({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}, {"data": "AAAA", "format": "mp3"}),
        ({"type": "file", "file": {"filename": "a.pdf", "file_data": "AAAA"}},
         {"filename": "a.pdf", "file_data": "AAAB"}),
        ({"type": "file", "file": {"file_id": "file-1"}}, {"file_id": "file-2"}),
        ({"type": "image_url", "image_url": {"url": "https://a/1.png", "detail": "low"}},
         {"url": "https://a/1.png", "detail": "high"}),
    ],
)  # fmt: skip
def test_content_is_told_apart_by_its_bytes_not_by_its_name(part: dict[str, Any], other: dict[str, Any]) -> None:
    def turn(content: dict[str, Any]) -> bytes:
        parts = [{"type": "text", "text": "what is said?"}, content]
        return key({**BASE, "messages": [{"role": "user", "content": parts}]})

    kind = part["type"]
    assert turn(part) != turn({**part, kind: other})
    assert turn(part) == turn(dict(reversed(part.items())))
    assert view({**BASE, "messages": [{"role": "user", "content": [part]}]}).question is None, "no semantic tier"


def test_the_parts_of_a_scope_name_what_differs() -> None:
    def parts(**fields: Any) -> dict[str, str]:
        seen = view({**BASE, **fields})
        return Scope(seen, "t", ("b", "i", "m"), {"x-team": "red"}, "", "").parts()

    one, two = parts(temperature=0), parts(temperature=1, tools=[])
    assert {name for name in one.keys() | two.keys() if one.get(name) != two.get(name)} == {"temperature", "tools"}
    assert "header x-team" in one and all(len(value) == 16 for value in one.values()), "hashes only"


def test_parts_cannot_be_moved_across_a_frame() -> None:
    def turn(*texts: str) -> bytes:
        return key({**BASE, "messages": [{"role": "user", "content": [{"type": "text", "text": t} for t in texts]}]})

    assert turn("ab", "c") != turn("a", "bc")
    assert key(BASE, tenant="ab", namespace="c") != key(BASE, tenant="a", namespace="bc")
    assert key(BASE, target=("a", "bc", "")) != key(BASE, target=("ab", "c", ""))


TELLING = (
    "openai-beta",
    "openai-organization",
    "anthropic-beta",
    "x-portkey-config",
    "helicone-cache-seed",
    "x-unknown",
    "x-forwarded-user",
    "x-forwarded-email",
    "x-forwarded-groups",
    "cf-access-jwt-assertion",
)
NEUTRAL = (
    "user-agent", "accept", "accept-language", "content-type", "x-stainless-retry-count", "traceparent", "x-request-id",
    "x-amzn-trace-id", "x-forwarded-for", "cf-ray", "sec-fetch-mode", "cache-control", "x-hitherto-ttl",
)  # fmt: skip


def test_tenant_target_namespace_query_and_telling_headers_are_in_the_key() -> None:
    others = [
        key(BASE, tenant="u"),
        key(BASE, target=("b", "i", "other")),
        key(BASE, target=("b", "other", "m")),
        key(BASE, namespace="n"),
        key(BASE, query="api-version=2"),
        *(key(BASE, headers={name: "x"}) for name in TELLING),
    ]
    assert len({key(BASE), *others}) == len(others) + 1
    assert key(BASE, headers=dict.fromkeys(NEUTRAL, "x")) == key(BASE) and not telling_headers(
        dict.fromkeys(NEUTRAL, "")
    )


def test_a_question_that_looks_like_none_is_not_none() -> None:
    scope = bytes(32)
    assert key_digest(scope, None) != key_digest(scope, "")


def test_lone_surrogates_do_not_break_it() -> None:
    body = b'{"model":"m","messages":[{"role":"user","content":"\\ud83d"}]}'
    try:
        assert len(key(body)) == 32
    except ValueError as error:
        assert "JSON" in str(error)
