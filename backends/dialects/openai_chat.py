"""OpenAI chat completions: what a request asks, what an answer says, and an answer in any shape a client wants."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from backends.dialects import sse, usage
from backends.protocol import Answer, Usage, View

SURFACE = "openai-chat"
DONE = b"data: [DONE]\n\n"
USAGE_COMMENT = b": hitherto-usage "
"""An SSE comment by which our engine tells the usage of every stream, asked for or not; SSE clients skip comments."""
_COMPLETE = frozenset({"stop", "tool_calls", "function_call"})
_PER_DELIVERY = frozenset({"id", "created", "obfuscation"})
_CHOICE_CORE = frozenset({"index", "delta", "message", "finish_reason", "logprobs"})


class MalformedRequest(ValueError):
    """The body is not a chat completion request; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def parse(body: bytes) -> dict[str, Any]:
    """The body as an object. Raises `MalformedRequest`."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise MalformedRequest(f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise MalformedRequest("the body must be a JSON object")
    return value


def view(body: Mapping[str, Any]) -> View:
    """What the gateway needs to know. Only what it acts on is checked; the rest is the backend's business."""
    model, messages = body.get("model"), body.get("messages")
    if not isinstance(model, str) or not model or not model.isprintable():
        raise MalformedRequest("model must be a string of printable characters", "model")
    if not isinstance(messages, list) or not messages or not all(isinstance(message, dict) for message in messages):
        raise MalformedRequest("messages must be a list of at least one message object", "messages")
    stream, options = body.get("stream"), body.get("stream_options")
    if stream is not None and not isinstance(stream, bool):
        raise MalformedRequest("stream must be true or false", "stream")
    question, reason, shape = _question(messages[-1])
    fields = {name: value for name, value in body.items() if name != "messages"}
    fields["messages"] = messages if question is None else [*messages[:-1], shape]
    temperature, choices = body.get("temperature"), body.get("n")
    return View(
        surface=SURFACE,
        model=model,
        stream=bool(stream),
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
        question=question,
        no_question=reason,
        scope_fields=fields,
        temperature=float(temperature) if isinstance(temperature, int | float) else None,
        choices=choices if isinstance(choices, int) else 1,
        wants_logprobs=body.get("logprobs") is True,
    )


def _question(message: Mapping[str, Any]) -> tuple[str | None, str, dict[str, Any]]:
    """The text of a last user turn, or None and the reason; and the message without that text."""
    if message.get("role") != "user":
        return None, "last-turn-not-user", {}
    content = message.get("content")
    rest = {name: value for name, value in message.items() if name != "content"}
    if isinstance(content, str):
        return content, "", rest
    if not isinstance(content, list) or not content:
        return None, "no-text", {}
    texts = [part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        return None, "not-text-only", {}
    others = [{name: value for name, value in part.items() if name not in ("type", "text")} for part in content]
    if len(texts) > 1 or any(others):  # one bare part is the same as a string; backends may join several differently
        rest["parts"] = [[len(str(text)), other] for text, other in zip(texts, others, strict=True)]
    return "".join(str(text) for text in texts), "", rest


_TOKEN = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[{}\[\]]', re.S)
_COLON = re.compile(rb"[ \t\r\n]*:[ \t\r\n]*")
_SCALAR = re.compile(rb"[^,}\]\s]+")


def with_model(body: bytes, model: str) -> bytes:
    """The same bytes with another value for the top-level `model` (for each of them, should there be two)."""
    return _with_value(body, "model", orjson.dumps(model))


def with_usage(body: bytes, options: object) -> bytes:
    """The bytes of a request for a stream that is to tell its usage; `options`: its `stream_options` as they are."""
    value = orjson.dumps({**(options if isinstance(options, dict) else {}), "include_usage": True})
    asked = _with_value(body, "stream_options", value)
    if asked is not body:
        return asked
    start = body.index(b"{") + 1
    return body[:start] + b'"stream_options":' + value + b"," + body[start:]


def _with_value(body: bytes, name: str, value: bytes) -> bytes:
    """The same bytes with another value for a top-level field, wherever it stands; `body` itself if it does not."""
    out, copied = [], 0
    for start, end in _values(body, name):
        out += [body[copied:start], value]
        copied = end
    return b"".join([*out, body[copied:]]) if out else body


def _values(body: bytes, name: str) -> Iterator[tuple[int, int]]:
    """Where the values of a top-level field begin and end."""
    depth, skip, opened = 0, 0, -1
    for found in _TOKEN.finditer(body):
        start, end = found.span()
        if start < skip:
            continue
        first = body[start]
        if first in b"{[":
            depth += 1
        elif first in b"}]":
            depth -= 1
            if depth == 1 and opened >= 0:
                yield opened, end
                opened = -1
        elif depth == 1 and end - start <= 96 and _is(found[0], name) and (colon := _COLON.match(body, end)):
            skip = colon.end()
            if body[skip : skip + 1] in (b"{", b"["):
                opened = skip
            elif (value := _TOKEN.match(body, skip) or _SCALAR.match(body, skip)) is not None:
                yield skip, value.end()
                skip = value.end()


def _is(token: bytes, name: str) -> bool:
    try:
        return token == b'"%b"' % name.encode() or (b"\\" in token and orjson.loads(token) == name)
    except orjson.JSONDecodeError:
        return False


def answer_from_json(body: bytes) -> Answer:
    """The answer in a complete JSON response; its `flaw` says why it should not be reused."""
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return Answer({}, (), None, "not-json")
    if not isinstance(value, dict):
        return Answer({}, (), None, "not-an-object")
    return _answer({name: field for name, field in value.items() if name not in _PER_DELIVERY})


def answer_from_stream(stream: bytes) -> Answer:
    """The answer that the chunks of a stream add up to. Without `[DONE]` it is flawed: the end may be missing."""
    body: dict[str, Any] = {"object": "chat.completion"}
    choices: dict[int, dict[str, Any]] = {}
    done = False
    # A last blank line may be missing; a cut event is not JSON, and a cut stream has no [DONE].
    for data in sse.data_fields(stream + b"\n\n"):
        if data == b"[DONE]":
            done = True
            break
        try:
            chunk = orjson.loads(data)
        except orjson.JSONDecodeError:
            return Answer({}, (), None, "not-json")
        if not isinstance(chunk, dict):
            return Answer({}, (), None, "not-an-object")
        for name, value in chunk.items():
            if name == "choices":
                for part in value or ():
                    _add_delta(choices.setdefault(part.get("index") or 0, {"message": {}}), part)
            elif name not in _PER_DELIVERY and name != "object" and value is not None:
                body[name] = value
    if "usage" not in body:
        for comment in sse.comments(stream):
            if comment.startswith(USAGE_COMMENT):
                body["usage"] = orjson.loads(comment[len(USAGE_COMMENT) :])
    body["choices"] = [{"index": index, **choices[index]} for index in sorted(choices)]
    for choice in body["choices"]:
        choice["message"].setdefault("content", None)
    answer = _answer(body)
    return answer if done else Answer(answer.body, answer.finish_reasons, answer.usage, "unterminated")


def _add_delta(choice: dict[str, Any], part: Mapping[str, Any]) -> None:
    if part.get("finish_reason") is not None:
        choice["finish_reason"] = part["finish_reason"]
    if part.get("logprobs") is not None:
        _merge(choice.setdefault("logprobs", {}), part["logprobs"])
    _merge(choice, {name: value for name, value in part.items() if name not in _CHOICE_CORE})
    delta = part.get("delta") or {}
    calls = delta.get("tool_calls")
    _merge(choice["message"], {name: value for name, value in delta.items() if name != "tool_calls"})
    if calls:
        known = choice["message"].setdefault("tool_calls", [])
        for call in calls:
            index = call.get("index")
            if index is None:  # some servers send whole calls without an index: a new id is a new call
                fresh = not known or (call.get("id") and known[-1].get("id") not in (None, call["id"]))
                index = len(known) if fresh else len(known) - 1
            while len(known) <= index:
                known.append({})
            _merge(known[index], {name: value for name, value in call.items() if name != "index"})


_ONCE = frozenset({"role", "id", "type", "name"})


def _merge(into: dict[str, Any], delta: Mapping[str, Any]) -> None:
    """Add a delta: text is appended, lists are extended, objects are merged, the rest is replaced."""
    for name, value in delta.items():
        old: Any = into.get(name)
        if value is None:
            continue
        kinds = (type(old), type(value))
        if kinds == (str, str) and name not in _ONCE:
            into[name] = f"{old}{value}"
        elif kinds == (list, list):
            into[name] = [*old, *value]
        elif kinds == (dict, dict):
            _merge(old, value)
        elif not (name in _ONCE and old and not value):
            into[name] = dict(value) if isinstance(value, dict) else value


def _answer(body: dict[str, Any]) -> Answer:
    choices = body.get("choices")
    if body.get("error") is not None:
        return Answer(body, (), usage_of(body), "error")
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, dict) for choice in choices):
        return Answer(body, (), usage_of(body), "no-choices")
    finish = tuple(str(choice.get("finish_reason")) for choice in choices)
    flaw = next((flaw for choice in choices if (flaw := _flaw(choice))), "")
    return Answer(body, finish, usage_of(body), flaw)


def _flaw(choice: Mapping[str, Any]) -> str:
    """Why a choice is not a complete, reusable answer; empty when it is."""
    finish, message = choice.get("finish_reason"), choice.get("message")
    if not isinstance(message, dict):
        return "no-message"
    if finish not in _COMPLETE:
        return f"finish-{finish}"
    if message.get("refusal"):
        return "refusal"
    if message.get("audio"):
        return "audio"
    calls = message.get("tool_calls") or ()
    functions = [call.get("function") for call in calls if call.get("type", "function") == "function"]
    if message.get("function_call"):
        functions.append(message["function_call"])
    if any(not _is_valid_call(function) for function in functions):
        return "tool-arguments"
    if not calls and not functions and not message.get("content"):
        return "empty"
    return ""


def _is_valid_call(function: Any) -> bool:
    try:
        orjson.loads(function["arguments"] or "{}")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return False
    return bool(function.get("name"))


def usage_of(body: Mapping[str, Any]) -> Usage | None:
    """The token counts of an answer, if it tells them."""
    return usage.read(body.get("usage"))


def text_of(body: bytes) -> str:
    """What a stored answer says; empty if it is not one text."""
    choices = orjson.loads(body)["choices"] if body else []
    message = choices[0]["message"] if len(choices) == 1 else {}
    content = message.get("content")
    calls = message.get("tool_calls") or message.get("function_call")
    return content if isinstance(content, str) and not calls else ""


_SHARED = ("model", "system_fingerprint", "service_tier")
_WHOLE = ("object", "choices", "usage")


def render_json(body: bytes, id: str, created: int) -> bytes:
    """A stored answer (JSON object without id and created) as a response of its own."""
    head = b'{"id":' + orjson.dumps(id) + b',"created":' + str(created).encode()
    return head + b"," + body[1:] if len(body) > 2 else head + b"}"


def render_stream(body: bytes, id: str, created: int, include_usage: bool) -> Iterator[bytes]:
    """A stored answer as the chunks that a streaming client expects."""
    value = orjson.loads(body)
    shared = {name: value[name] for name in _SHARED if value.get(name) is not None}
    head = {"id": id, "object": "chat.completion.chunk", "created": created, **shared}
    once = {name: field for name, field in value.items() if name not in _WHOLE and name not in _SHARED}
    pending = {"usage": None} if include_usage else {}

    def chunk(index: int, delta: Mapping[str, Any], logprobs: Any = None, finish: Any = None, **rest: Any) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **rest}
        extra = dict(once)
        once.clear()  # fields of the answer as a whole (citations …) come with its first chunk
        return sse.event(orjson.dumps({**head, "choices": [choice], **pending, **extra}))

    for choice in value["choices"]:
        index, message = choice.get("index", 0), choice["message"]
        yield chunk(
            index,
            {
                "role": message.get("role", "assistant"),
                "content": "" if isinstance(message.get("content"), str) else None,
            },
        )
        for name, text in message.items():
            if name in ("role", "content", "tool_calls") or text is None:
                continue
            yield chunk(index, {name: text})
        yield from (chunk(index, delta, logprobs) for delta, logprobs in _content_deltas(choice))
        for position, call in enumerate(message.get("tool_calls") or ()):
            yield chunk(index, {"tool_calls": [{"index": position, **call}]})
        rest = {name: field for name, field in choice.items() if name not in _CHOICE_CORE}
        yield chunk(index, {}, None, choice.get("finish_reason"), **rest)
    if include_usage:
        yield sse.event(orjson.dumps({**head, "choices": [], "usage": value.get("usage")}))
    yield DONE


def _content_deltas(choice: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], Any]]:
    """The content in pieces: one per token where logprobs are stored, else a few words each."""
    content = choice["message"].get("content")
    logprobs = choice.get("logprobs") or {}
    tokens = logprobs.get("content")
    if isinstance(content, str) and tokens and "".join(entry["token"] for entry in tokens) == content:
        for entry in tokens:
            yield {"content": entry["token"]}, {"content": [entry]}
    elif isinstance(content, str):
        pieces = re.findall(r"(?:\S*\s*){1,4}", content)
        for number, piece in enumerate(piece for piece in pieces if piece):
            yield {"content": piece}, (logprobs or None) if number == 0 else None
    elif content is not None:
        yield {"content": content}, logprobs or None
    elif logprobs:
        yield {}, logprobs
