"""The engine as an OpenAI-compatible server: `python -m backends.engine` serves it over a unix socket or TCP."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator
from collections.abc import Sequence as Sequence_
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import orjson

from backends import asgi
from backends.dialects.openai_chat import USAGE_COMMENT
from backends.engine.config import EngineConfig
from backends.engine.engine import Engine, EngineFull
from backends.engine.load import Loaded
from backends.engine.request import BadRequest, ChatRequest, parse_chat
from backends.engine.sequence import Emission, SamplingParams, Sequence, TokenLogprobs
from backends.engine.text import Detokenizer, StopStrings, TemplateError, Text
from backends.engine.tiers.contract import Tier

log = logging.getLogger("hitherto.engine")

BODY_LIMIT = 32 << 20


class EngineError(Exception):
    """The engine gave up on a request: (status, message)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EngineServer:
    """An ASGI application around one engine. `model_name` is what `/v1/models` tells."""

    def __init__(
        self,
        loaded: Loaded,
        config: EngineConfig,
        model_name: str,
        thread: ThreadPoolExecutor,
        tiers: Sequence_[Tier] = (),
    ) -> None:
        self.text = loaded.text
        self.eos = loaded.eos
        self.model_name = model_name
        self._outbox: list[tuple[asyncio.Queue[Emission], Emission]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self.engine = Engine(loaded, config, self._flush, lambda: os._exit(70), thread, tiers)
        self.vocabulary = loaded.vocabulary
        self.info = {
            "dtype": loaded.dtype,
            "context": loaded.context,
            "longest": self.engine.longest,
            "block": config.block,
            "self_test_difference": loaded.self_test_difference,
        }

    async def __call__(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
            return
        route = (scope["method"], scope["path"])
        if route == ("POST", "/v1/chat/completions"):
            await self._guarded(self._chat, scope, receive, send)
        elif route == ("GET", "/health"):
            state = {"status": "ok", **self.info, **dataclasses.asdict(self.engine.stats())}
            await asgi.send_json(send, 200, {**state, "tiers": self.engine.tier_stats()})
        elif route == ("GET", "/v1/models"):
            card = {"id": self.model_name, "object": "model", "created": 0, "owned_by": "hitherto"}
            await asgi.send_json(send, 200, {"object": "list", "data": [card]})
        else:
            await _send_error(send, 404, f"{scope['method']} {scope['path']} is not served by the engine")

    async def _lifespan(self, receive: asgi.Receive, send: asgi.Send) -> None:
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._loop = asyncio.get_running_loop()
                self.engine.start()
                await send({"type": "lifespan.startup.complete"})
            else:
                await asyncio.to_thread(self.engine.stop)
                await send({"type": "lifespan.shutdown.complete"})
                return

    async def _guarded(self, handler: Any, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        try:
            await handler(scope, receive, send)
        except asgi.ClientGone:
            pass
        except asgi.BodyTooLarge:
            await _send_error(send, 413, f"the request body is over {BODY_LIMIT} bytes")
        except BadRequest as error:
            await _send_error(send, 400, str(error), error.param, error.code)
        except TemplateError as error:
            await _send_error(send, 400, str(error), "messages")
        except EngineError as error:
            await _send_error(send, error.status, str(error))

    async def _chat(self, scope: asgi.Scope, receive: asgi.Receive, send: asgi.Send) -> None:
        raw = await asgi.read_body(receive, BODY_LIMIT)
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body must be a JSON object")
        request = parse_chat(body)
        prompt = await asyncio.to_thread(self.text.encode_chat, request.messages)
        tenant_salt = asgi.header_map(scope).get("x-hitherto-salt", "")
        job = Job(self, request, prompt, f"{len(tenant_salt)}:{tenant_salt}{request.cache_salt}".removeprefix("0:"))
        async with asgi.HangupWatch(receive) as watch:
            watch.start()
            await job.answer(send)

    def sequence(
        self, prompt: list[int], params: SamplingParams, salt: str, queue: asyncio.Queue[Emission]
    ) -> Sequence:
        """A sequence whose emissions arrive in `queue`."""
        sequence = Sequence(uuid.uuid4().hex, prompt, params, salt=salt, eos=self.eos)
        sequence.emit = lambda emission: self._outbox.append((queue, emission))
        return sequence

    def _flush(self) -> None:
        if self._outbox and self._loop is not None:
            batch, self._outbox = self._outbox, []
            self._loop.call_soon_threadsafe(_deliver, batch)


def _deliver(batch: list[tuple[asyncio.Queue[Emission], Emission]]) -> None:
    for queue, emission in batch:
        queue.put_nowait(emission)


@dataclasses.dataclass(slots=True)
class Piece:
    """Text that may be shown, with the logprobs of the tokens behind it."""

    text: str
    logprobs: list[dict[str, Any]]
    finish: str = ""


class Job:
    """One chat completion: from prompt tokens to the response."""

    def __init__(self, server: EngineServer, request: ChatRequest, prompt: list[int], salt: str) -> None:
        longest = server.engine.longest
        wanted = request.params.max_tokens
        if len(prompt) + max(wanted, 1) > longest:
            raise BadRequest(
                f"this model's maximum context length is {longest} tokens; the prompt has {len(prompt)} and "
                f"max_tokens is {wanted or 'not set'}",
                "messages" if len(prompt) >= longest else "max_tokens",
                "context_length_exceeded",
            )
        if max(prompt) >= server.vocabulary:
            raise BadRequest("messages contain a special token that this model has no embedding for", "messages")
        params = dataclasses.replace(request.params, max_tokens=wanted or longest - len(prompt))
        self.server, self.request, self.prompt = server, request, prompt
        self.queue: asyncio.Queue[Emission] = asyncio.Queue()
        self.sequence = server.sequence(prompt, params, salt, self.queue)
        self.id = f"chatcmpl-{uuid.uuid4().hex}"
        self.created = int(time.time())
        self.cached = 0
        self.completion_tokens = 0

    async def answer(self, send: asgi.Send) -> None:
        """Compute and send; leaves nothing running in the engine, however it ends."""
        try:
            self.server.engine.submit(self.sequence)
        except EngineFull:
            raise EngineError(503, "the engine's queue is full") from None
        try:
            pieces = self._pieces()
            first = await anext(pieces)  # a failure before the first token is still a proper HTTP error
            headers = [(b"x-hitherto-cached-tokens", str(self.cached).encode())]
            if self.request.stream:
                await asgi.send_stream(send, 200, [asgi.SSE, *headers], self._events(first, pieces))
            else:
                await asgi.send_json(send, 200, await self._whole(first, pieces), headers)
        finally:
            self.server.engine.cancel(self.sequence)

    async def _pieces(self) -> AsyncIterator[Piece]:
        """Text as it becomes certain. The last piece has a finish reason."""
        decoder, stops = Detokenizer(self.server.text), StopStrings(self.request.params.stop)
        waiting: list[tuple[int, dict[str, Any]]] = []  # logprobs whose text is still held back, and where it begins
        decoded = shown = 0
        while True:
            emission = await self.queue.get()
            self.cached = emission.cached_tokens
            if emission.token is None:
                raise EngineError(500 if emission.finish == "error" else 503, emission.error or emission.finish)
            self.completion_tokens += 1
            ended = emission.finish == "stop"  # the end-of-turn token itself is no text
            if emission.logprobs is not None and not ended:
                waiting.append((decoded, _logprob_entry(self.server.text, emission.logprobs)))
            text = "" if ended else decoder.push(emission.token)
            text += decoder.flush() if emission.finish else ""
            decoded += len(text)
            piece = stops.push(text) + (stops.flush() if emission.finish else "")
            shown += len(piece)
            finish = "stop" if stops.found else emission.finish
            if piece or finish:
                # Of a text that a stop string cuts off, the tokens behind the cut go too.
                ready = [entry for begins, entry in waiting if begins < shown or (finish and not stops.found)]
                waiting = waiting[len(ready) :]
                yield Piece(piece, ready, finish)
            if finish:
                return

    async def _whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        texts, logprobs, finish = [first.text], list(first.logprobs), first.finish
        async for piece in pieces:
            texts.append(piece.text)
            logprobs += piece.logprobs
            finish = piece.finish
        choice: dict[str, Any] = {
            "index": 0,
            "message": {"role": "assistant", "content": "".join(texts)},
            "logprobs": {"content": logprobs} if self.request.params.top_logprobs is not None else None,
            "finish_reason": finish,
        }
        return {**self._head("chat.completion"), "choices": [choice], "usage": self._usage()}

    async def _events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        yield self._event({"role": "assistant", "content": ""}, None, None)
        try:
            yield self._piece_event(first)
            async for piece in pieces:
                yield self._piece_event(piece)
        except EngineError as error:
            yield b"data: " + orjson.dumps({"error": _error_body(error.status, str(error))}) + b"\n\n"
            return
        yield USAGE_COMMENT + orjson.dumps(self._usage()) + b"\n\n"
        if self.request.include_usage:
            tail = {**self._head("chat.completion.chunk"), "choices": [], "usage": self._usage()}
            yield b"data: " + orjson.dumps(tail) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _piece_event(self, piece: Piece) -> bytes:
        logprobs = {"content": piece.logprobs} if self.request.params.top_logprobs is not None else None
        delta = {"content": piece.text} if piece.text or not piece.finish else {}
        return self._event(delta, piece.finish or None, logprobs)

    def _event(self, delta: dict[str, Any], finish: str | None, logprobs: dict[str, Any] | None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk: dict[str, Any] = {**self._head("chat.completion.chunk"), "choices": [choice]}
        if self.request.include_usage:
            chunk["usage"] = None  # OpenAI sends null on every chunk but the last when usage was asked for
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.request.model or self.server.model_name,
        }

    def _usage(self) -> dict[str, Any]:
        prompt, completion = len(self.prompt), self.completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


def _logprob_entry(text: Text, entry: TokenLogprobs) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": text.token_text(token), "logprob": logprob, "bytes": text.token_bytes(token)}

    return {**one(entry.token, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top]}


def _error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}


async def _send_error(
    send: asgi.Send, status: int, message: str, param: str | None = None, code: str | None = None
) -> None:
    headers = [(b"retry-after", b"2")] if status == 503 else []
    await asgi.send_json(send, status, {"error": _error_body(status, message, param, code)}, headers)
