"""A provider that counts tokens, caches prompts, fails now and then, and keeps its own bill: for tests and demos.

It speaks chat completions, text embeddings and Anthropic's messages. What it charges is what providers charge: nothing
for errors; the prompt, and what was sent of the answer, where the client left or the answer broke off.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import orjson

from backends import asgi
from backends.dialects import sse
from backends.protocol import Usage

_WORDS = "the a one we you it this is can must will find use take give more other same new way time work part".split()


@dataclass(frozen=True, slots=True)
class Habits:
    """How it behaves: shares are of 1, times in seconds."""

    first: float = 0.0
    """Before the first byte, at least."""
    token: float = 0.0
    """Between two pieces of a stream; of what is no stream, for each token."""
    slow: float = 0.0
    """Share of answers that take `slow_by` longer to begin."""
    slow_by: float = 0.0
    failing: float = 0.0
    """Share of requests that get 503, or 429."""
    cutting: float = 0.0
    """Share of streams that break off."""
    caches: bool = True
    longest: int = 40
    """Tokens of an answer, at most."""


@dataclass(slots=True)
class Charge:
    """One line of its bill."""

    request: str
    model: str
    usage: Usage
    whole: bool = True
    """Whether the answer was sent to its end, with its usage."""


@dataclass
class Provider:
    """An ASGI application; `bill` has a line for all that is to be paid."""

    habits: Habits = field(default_factory=Habits)
    seed: int = 1
    bill: list[Charge] = field(default_factory=list)
    requests: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._prefixes: set[str] = set()

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] != "http":
            return
        body = await asgi.read_body(receive, 1 << 26)
        path = scope["path"].removeprefix("/v1")
        if scope["method"] != "POST":
            await asgi.send_json(send, 200, {"object": "list", "data": []}, [])
            return
        self.requests += 1
        request, draw = orjson.loads(body), self._random.random()
        if draw < self.habits.failing:
            status = 503 if draw < self.habits.failing / 2 else 429
            error = {"message": "please come back", "type": "overloaded", "param": None, "code": None}
            await asgi.send_json(send, status, {"error": error}, [(b"retry-after", b"0")])
            return
        usage = self._usage(request, path)
        charge = Charge(asgi.header_map(scope).get("x-request-id", ""), str(request.get("model")), usage, False)
        self.bill.append(charge)
        async with asgi.HangupWatch(receive) as watch:
            watch.start()
            await self._answer(request, path, charge, send)
            charge.whole = True

    async def _answer(self, request: dict[str, Any], path: str, charge: Charge, send: asgi.Send) -> None:
        usage, habits = charge.usage, self.habits
        charge.usage = Usage(usage.prompt, 0, usage.cached, {}, usage.written)  # so far
        slow = habits.slow_by if self._random.random() < habits.slow else 0.0
        stream = request.get("stream") is True
        await asyncio.sleep(habits.first + slow + (0.0 if stream else habits.token * usage.completion))
        if not stream:
            charge.usage = usage
            await asgi.send_json(send, 200, _body(request, path, usage), [])
            return
        cut = self._random.randrange(usage.completion + 1) if self._random.random() < habits.cutting else None
        await send({"type": "http.response.start", "status": 200, "headers": [asgi.SSE]})
        for event, tokens in _events(request, path, usage):
            if cut is not None and tokens > cut:
                raise ConnectionAbortedError("it breaks off")
            await send({"type": "http.response.body", "body": event, "more_body": True})
            charge.usage = Usage(usage.prompt, tokens, usage.cached, {}, usage.written)
            if habits.token:
                await asyncio.sleep(habits.token)
        await send({"type": "http.response.body", "body": b""})

    def _usage(self, request: dict[str, Any], path: str) -> Usage:
        """A token is four characters of the prompt, or a word of the answer; of what was seen before, the system
        prompt is cached, and Anthropic charges for writing it."""
        texts = [str(one.get("content")) for one in request.get("messages") or [{"content": request.get("input")}]]
        system = str(request["system"]) if request.get("system") else texts[0] if len(texts) > 1 else ""
        if request.get("system"):
            texts.append(system)
        prompt = sum(-(-len(text) // 4) for text in texts)
        size, known = -(-len(system) // 4), system in self._prefixes
        caches = self.habits.caches and size > 0
        self._prefixes.add(system)
        answer = 0 if path == "/embeddings" else self._random.randint(1, self.habits.longest)
        cached = size if caches and known else 0
        written = size if caches and not known and path == "/messages" else 0
        return Usage(prompt, answer, cached, {}, written)


def _text(count: int) -> list[str]:
    return [_WORDS[number * 7 % len(_WORDS)] for number in range(count)]


def _openai_usage(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.completion,
        "total_tokens": usage.prompt + usage.completion,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _anthropic_usage(usage: Usage, completion: int) -> dict[str, Any]:
    cached, written = usage.cached or 0, usage.written or 0
    return {
        "input_tokens": usage.prompt - cached - written,
        "output_tokens": completion,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": written,
    }


def _body(request: dict[str, Any], path: str, usage: Usage) -> dict[str, Any]:
    text, model = " ".join(_text(usage.completion)), request.get("model")
    if path == "/embeddings":
        inputs = request["input"] if isinstance(request["input"], list) else [request["input"]]
        data = [{"object": "embedding", "index": place, "embedding": [0.5]} for place in range(len(inputs))]
        told = {"prompt_tokens": usage.prompt, "total_tokens": usage.prompt}
        return {"object": "list", "data": data, "model": model, "usage": told}
    if path == "/messages":
        content = [{"type": "text", "text": text}]
        head = {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "stop_sequence": None}
        return {
            **head,
            "content": content,
            "stop_reason": "end_turn",
            "usage": _anthropic_usage(usage, usage.completion),
        }
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "logprobs": None, "finish_reason": "stop"}
    head = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model}
    return {**head, "choices": [choice], "usage": _openai_usage(usage)}


def _events(request: dict[str, Any], path: str, usage: Usage) -> Iterator[tuple[bytes, int]]:
    """Each event, with how many tokens of the answer were sent when it was."""
    words, model = _text(usage.completion), request.get("model")
    if path == "/messages":
        yield from _anthropic_events(words, model, usage)
        return
    told = (request.get("stream_options") or {}).get("include_usage") is True
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}
    pending = {"usage": None} if told else {}

    def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        return sse.event(orjson.dumps({**head, "choices": choices, **pending}))

    yield chunk({"role": "assistant", "content": ""}), 0
    for number, word in enumerate(words, 1):
        yield chunk({"content": word if number == 1 else f" {word}"}), number
    yield chunk({}, "stop"), len(words)
    if told:
        yield sse.event(orjson.dumps({**head, "choices": [], "usage": _openai_usage(usage)})), len(words)
    yield sse.event(b"[DONE]"), len(words)


def _anthropic_events(words: list[str], model: Any, usage: Usage) -> Iterator[tuple[bytes, int]]:
    def named(name: str, **data: Any) -> bytes:
        return b"event: " + name.encode() + b"\n" + sse.event(orjson.dumps({"type": name, **data}))

    message = {"id": "msg_1", "type": "message", "role": "assistant", "content": [], "model": model}
    yield named("message_start", message={**message, "usage": _anthropic_usage(usage, 0)}), 0
    yield named("content_block_start", index=0, content_block={"type": "text", "text": ""}), 0
    for number, word in enumerate(words, 1):
        yield named("content_block_delta", index=0, delta={"type": "text_delta", "text": f"{word} "}), number
    yield named("content_block_stop", index=0), len(words)
    total = {"output_tokens": len(words)}
    yield named("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage=total), len(words)
    yield named("message_stop"), len(words)
