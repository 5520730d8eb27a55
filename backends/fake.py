"""An OpenAI-compatible upstream that does what it is told: for tests, drills and demos. Ships with the product.

It is a real server to everybody who talks to it (`FakeServer` runs it under uvicorn), only its answers are scripted.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Self, TypeVar

import orjson

from backends import asgi


@dataclass(frozen=True, slots=True)
class Script:
    """How one request is answered. `text` None echoes the last message."""

    text: str | None = None
    finish: str = "stop"
    status: int = 200
    delay: float = 0.0
    """Seconds before the head."""
    until: Callable[[], bool] | None = None
    """The head of a POST waits for this to come true, too: about 20 s. For what must be under way at once."""
    chunk_delay: float = 0.0
    """Seconds between the pieces of a stream."""
    cut_after: int | None = None
    """Break the connection after so many pieces (of a stream) or bytes (of a JSON body)."""
    omit_done: bool = False
    endless: bool = False
    """A stream says its last word over and over."""
    usage: bool = True
    message: dict[str, Any] | None = None
    """The whole message of the answer, in place of `text`."""
    raw: bytes | None = None
    """The body, word for word."""
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(slots=True)
class Seen:
    """A request that arrived; `gone` when its client hung up before it was answered."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    body: bytes
    gone: bool = False
    finished: bool = False
    status: int = 0
    """How it was answered."""

    def json(self) -> Any:
        return orjson.loads(self.body)


@dataclass
class FakeUpstream:
    """An ASGI application. Set `script`, or queue several in `scripts`; look at `seen`."""

    script: Script = field(default_factory=Script)
    scripts: list[Script] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "lifespan":
            while True:
                message = await receive()
                await send({"type": f"{message['type']}.complete"})
                if message["type"] == "lifespan.shutdown":
                    return
        body = await asgi.read_body(receive, 1 << 30)
        query = scope["query_string"].decode()
        seen = Seen(scope["method"], scope["path"], query, asgi.header_map(scope), body)
        self.seen.append(seen)
        script = self.scripts.pop(0) if self.scripts and seen.method == "POST" else self.script

        async def told(message: asgi.Message) -> None:
            seen.status = message.get("status", seen.status)
            await send(message)

        async with asgi.HangupWatch(receive) as watch:
            watch.start()
            await self._answer(script, seen, told)
            seen.finished = True
        seen.gone = not seen.finished

    async def _answer(self, script: Script, seen: Seen, send: asgi.Send) -> None:
        if script.until is not None and seen.method == "POST":
            for _ in range(2000):
                if script.until():
                    break
                await asyncio.sleep(0.01)
        if script.delay:
            await asyncio.sleep(script.delay)
        extra = [(name.encode(), value.encode()) for name, value in script.headers]
        if script.raw is not None:
            await self._send_raw(script, script.raw, extra, send)
        elif script.status != 200:
            error = {"message": f"scripted {script.status}", "type": "scripted", "param": None, "code": None}
            await asgi.send_json(send, script.status, {"error": error}, extra)
        elif seen.method == "POST" and seen.path.endswith("/embeddings"):
            await asgi.send_json(send, 200, _embeddings(seen.json()), extra)
        elif seen.method == "POST" and seen.path.endswith("/messages"):
            await self._send_message(script, seen.json(), extra, send)
        elif seen.method != "POST" or not seen.path.endswith("/chat/completions"):
            await asgi.send_json(send, 200, {"path": seen.path, "method": seen.method, "bytes": len(seen.body)}, extra)
        elif seen.json().get("stream"):
            await self._send_stream(script, seen.json(), extra, send)
        else:
            await self._send_raw(script, orjson.dumps(_completion(script, seen.json())), [asgi.JSON, *extra], send)

    async def _send_raw(self, script: Script, body: bytes, headers: list[tuple[bytes, bytes]], send: asgi.Send) -> None:
        if script.cut_after is None:
            await asgi.send_bytes(send, script.status, headers, body)
            return
        head = [*headers, (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": script.status, "headers": head})
        await send({"type": "http.response.body", "body": body[: script.cut_after], "more_body": True})
        raise ConnectionAbortedError("scripted cut")

    async def _send_stream(
        self, script: Script, request: dict[str, Any], headers: list[tuple[bytes, bytes]], send: asgi.Send
    ) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [asgi.SSE, *headers]})
        for number, piece in enumerate(_pieces(script, request)):
            if number == script.cut_after:
                raise ConnectionAbortedError("scripted cut")
            await send({"type": "http.response.body", "body": b"data: " + piece + b"\n\n", "more_body": True})
            await asyncio.sleep(script.chunk_delay)
            while script.endless and b'"content":" ' in piece:
                await send({"type": "http.response.body", "body": b"data: " + piece + b"\n\n", "more_body": True})
                await asyncio.sleep(script.chunk_delay)
        await send({"type": "http.response.body", "body": b""})

    async def _send_message(
        self, script: Script, request: dict[str, Any], headers: list[tuple[bytes, bytes]], send: asgi.Send
    ) -> None:
        """Anthropic's Messages API with its rules for `cache_control`; each mark reads 100 tokens from the cache."""
        if (wrong := _wrong_marks(request)) is not None:
            error = {"type": "error", "error": {"type": "invalid_request_error", "message": wrong}}
            await asgi.send_json(send, 400, error, headers)
            return
        message = _anthropic(script, request)
        if not request.get("stream"):
            await self._send_raw(script, orjson.dumps(message), [asgi.JSON, *headers], send)
            return
        await send({"type": "http.response.start", "status": 200, "headers": [asgi.SSE, *headers]})
        for name, data in _anthropic_events(message):
            event = b"event: " + name.encode() + b"\ndata: " + orjson.dumps({"type": name, **data}) + b"\n\n"
            await send({"type": "http.response.body", "body": event, "more_body": True})
            await asyncio.sleep(script.chunk_delay)
        await send({"type": "http.response.body", "body": b""})


def _embeddings(request: dict[str, Any]) -> dict[str, Any]:
    """Three numbers for each input, made of nothing but the input."""
    inputs = request["input"] if isinstance(request["input"], list) else [request["input"]]
    inputs = [inputs] if isinstance(inputs[0], int) else inputs
    digests = [hashlib.blake2b(orjson.dumps(item), digest_size=3).digest() for item in inputs]
    vectors: list[Any] = [[byte / 256 for byte in digest] for digest in digests]
    if request.get("encoding_format") == "base64":
        vectors = [base64.b64encode(struct.pack("<3f", *vector)).decode() for vector in vectors]
    data = [{"object": "embedding", "index": place, "embedding": vector} for place, vector in enumerate(vectors)]
    tokens = sum(len(item) for item in inputs)
    return {"object": "list", "data": data, "model": request["model"],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}  # fmt: skip


def _message(script: Script, request: dict[str, Any]) -> dict[str, Any]:
    if script.message is not None:
        return script.message
    text = script.text if script.text is not None else f"echo: {request['messages'][-1].get('content')}"
    return {"role": "assistant", "content": text}


def _wrong_marks(request: dict[str, Any]) -> str | None:
    """What Anthropic would refuse."""
    lives: list[str] = []

    def look(blocks: Any) -> str | None:
        for block in blocks if isinstance(blocks, list) else ():
            if (wrong := look(block.get("content"))) is not None:
                return wrong
            if "cache_control" not in block:
                continue
            if block.get("type") == "thinking" or block.get("defer_loading") or block.get("text") == "":
                return "cache_control cannot be set here"
            lives.append(block["cache_control"].get("ttl", "5m"))
        return None

    for part in (request.get("tools"), request.get("system"), *(one["content"] for one in request["messages"])):
        if (wrong := look(part)) is not None:
            return wrong
    if len(lives) > 4:
        return f"A maximum of 4 blocks with cache_control may be provided. Found {len(lives)}."
    return "a ttl='1h' block must not come after a ttl='5m' block" if lives != sorted(lives) else None


def _anthropic(script: Script, request: dict[str, Any]) -> dict[str, Any]:
    marked = orjson.dumps(request).count(b'"cache_control"')
    usage = {"input_tokens": 11, "output_tokens": 7, "cache_read_input_tokens": 100 * marked}
    text = script.text if script.text is not None else "echo"
    return {
        "id": "msg_fake", "type": "message", "role": "assistant", "model": request.get("model"),
        "content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "stop_sequence": None,
        "usage": {**usage, "cache_creation_input_tokens": 0},
    }  # fmt: skip


def _anthropic_events(message: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    usage = message["usage"]
    start = {**message, "content": [], "stop_reason": None, "usage": {**usage, "output_tokens": 1}}
    text = message["content"][0]["text"]
    return [
        ("message_start", {"message": start}),
        ("content_block_start", {"index": 0, "content_block": {"type": "text", "text": ""}}),
        *(("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": one}}) for one in text.split()),
        ("content_block_stop", {"index": 0}),
        ("message_delta", {"delta": {"stop_reason": "end_turn", "stop_sequence": None},
                           "usage": {"output_tokens": usage["output_tokens"]}}),
        ("message_stop", {}),
    ]  # fmt: skip


def _usage(script: Script) -> dict[str, Any]:
    details = {"cached_tokens": 3}
    usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18, "prompt_tokens_details": details}
    return {"usage": usage} if script.usage else {}


def _head(kind: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"id": "chatcmpl-fake", "object": kind, "created": 1, "model": request.get("model")}


def _completion(script: Script, request: dict[str, Any]) -> dict[str, Any]:
    choices = [
        {"index": index, "message": _message(script, request), "logprobs": None, "finish_reason": script.finish}
        for index in range(request.get("n") or 1)
    ]
    return {**_head("chat.completion", request), "choices": choices, **_usage(script)}


def _pieces(script: Script, request: dict[str, Any]) -> list[bytes]:
    """The data of each event of a stream: role, one event a word, finish, usage if asked for, [DONE]."""
    head, message = _head("chat.completion.chunk", request), _message(script, request)
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    words = (message.get("content") or "").split(" ")
    deltas += [{"content": word if number == 0 else f" {word}"} for number, word in enumerate(words) if word or number]
    for index, call in enumerate(message.get("tool_calls") or ()):
        function = call["function"]
        first = {"name": function["name"], "arguments": ""}
        deltas.append({"tool_calls": [{"index": index, "id": call["id"], "type": "function", "function": first}]})
        half = len(function["arguments"]) // 2
        for part in (function["arguments"][:half], function["arguments"][half:]):
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": part}}]})
    choices: list[dict[str, Any]] = [
        {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
    ]
    choices.append({"index": 0, "delta": {}, "logprobs": None, "finish_reason": script.finish})
    pieces = [orjson.dumps({**head, "choices": [choice]}) for choice in choices]
    if (request.get("stream_options") or {}).get("include_usage") and script.usage:
        pieces.append(orjson.dumps({**head, "choices": [], **_usage(script)}))
    return pieces if script.omit_done else [*pieces, b"[DONE]"]


App = TypeVar("App")


class Served(Generic[App]):
    """An ASGI application under uvicorn on a free port, in a thread. A context manager."""

    def __init__(self, app: App) -> None:
        import uvicorn

        self.app = app
        self._socket = socket.socket()
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}/v1"
        served: Any = app
        self._server = uvicorn.Server(uvicorn.Config(served, log_level="critical", lifespan="off"))
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            if time.monotonic() > deadline:
                raise TimeoutError("the fake upstream did not start")
            time.sleep(0.01)
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.should_exit = self._server.force_exit = True
        self._thread.join(10)
        self._socket.close()


class FakeServer(Served[FakeUpstream]):
    """A `FakeUpstream` that serves."""

    def __init__(self) -> None:
        super().__init__(FakeUpstream())
