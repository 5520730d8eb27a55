"""One chat completion: from sequences to the response, for one choice or several."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from backends import asgi
from backends.dialects.openai_chat import USAGE_COMMENT
from backends.engine.engine import Engine, EngineFull
from backends.engine.request import ChatRequest
from backends.engine.sequence import Emission, TokenLogprobs
from backends.engine.sequence import Sequence as Request
from backends.engine.text import Detokenizer, StopStrings, Text

Arrival = tuple[int, Emission]
"""What came for which choice."""


class EngineError(Exception):
    """The engine gave up on a request: (status, message)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Piece:
    """Text of one choice that may be shown, with the logprobs of the tokens behind it. The last has a finish reason."""

    index: int
    text: str
    logprobs: list[dict[str, Any]]
    finish: str = ""


class Choice:
    """The text of one choice as it becomes certain."""

    def __init__(self, index: int, text: Text, stops: Sequence[str]) -> None:
        self.finished = False
        self._index, self._text = index, text
        self._decoder, self._stops = Detokenizer(text), StopStrings(stops)
        self._waiting: list[tuple[int, dict[str, Any]]] = []  # logprobs whose text is held back, and where it begins
        self._decoded = self._shown = 0

    def take(self, emission: Emission) -> Piece | None:
        """What can be shown now that this token came; None if nothing."""
        ended = emission.finish == "stop"  # the end-of-turn token itself is no text
        assert emission.token is not None
        if emission.logprobs is not None and not ended:
            self._waiting.append((self._decoded, _logprob_entry(self._text, emission.logprobs)))
        text = "" if ended else self._decoder.push(emission.token)
        text += self._decoder.flush() if emission.finish else ""
        self._decoded += len(text)
        shown = self._stops.push(text) + (self._stops.flush() if emission.finish else "")
        self._shown += len(shown)
        stopped = self._stops.found
        finish = "stop" if stopped else emission.finish
        if not shown and not finish:
            return None
        # Of a text that a stop string cuts off, the tokens behind the cut go too.
        ready = [entry for begins, entry in self._waiting if begins < self._shown or (finish and not stopped)]
        self._waiting = self._waiting[len(ready) :]
        self.finished = bool(finish)
        return Piece(self._index, shown, ready, finish)


class Job:
    """A request, its sequences (one a choice), and the response that they become."""

    def __init__(
        self, engine: Engine, text: Text, request: ChatRequest, sequences: Sequence[Request], model: str
    ) -> None:
        self.sequences = sequences
        self.arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self._engine, self._request = engine, request
        self._choices = [Choice(index, text, request.params.stop) for index in range(len(sequences))]
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or model,
        }
        self.cached = self._completion_tokens = 0

    async def answer(self, send: asgi.Send) -> None:
        """Compute and send; leaves nothing running in the engine, however it ends."""
        try:
            for sequence in self.sequences:
                self._engine.submit(sequence)
            pieces = self._pieces()
            first = await anext(pieces)  # a failure before the first token is still a proper HTTP error
            headers = [(b"x-hitherto-cached-tokens", str(self.cached).encode())]
            if self._request.stream:
                await asgi.send_stream(send, 200, [asgi.SSE, *headers], self._events(first, pieces))
            else:
                await asgi.send_json(send, 200, await self._whole(first, pieces), headers)
        except EngineFull:
            raise EngineError(503, "the engine's queue is full") from None
        finally:
            for sequence in self.sequences:
                self._engine.cancel(sequence)

    async def _pieces(self) -> AsyncIterator[Piece]:
        """Pieces of all choices as they come, until each has finished."""
        left = len(self._choices)
        while left:
            index, emission = await self.arrivals.get()
            choice = self._choices[index]
            if choice.finished:
                continue  # cut by a stop string; the engine had not heard of it yet
            if emission.token is None:
                raise EngineError(500 if emission.finish == "error" else 503, emission.error or emission.finish)
            self._completion_tokens += 1
            if index == 0:
                self.cached = emission.cached_tokens  # the other choices reuse what the first one computes
            piece = choice.take(emission)
            if piece is not None:
                if piece.finish:
                    left -= 1
                    self._engine.cancel(self.sequences[index])
                yield piece

    async def _whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        texts: list[list[str]] = [[] for _ in self._choices]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in self._choices]
        finish = [""] * len(self._choices)
        async for piece in _chain(first, pieces):
            texts[piece.index].append(piece.text)
            logprobs[piece.index] += piece.logprobs
            finish[piece.index] = piece.finish
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(texts[index])},
                "logprobs": self._logprobs(logprobs[index]),
                "finish_reason": finish[index],
            }
            for index in range(len(self._choices))
        ]
        return {"object": "chat.completion", **self._head, "choices": choices, "usage": self._usage()}

    async def _events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        for index in range(len(self._choices)):
            yield self._event(index, {"role": "assistant", "content": ""}, None, None)
        try:
            async for piece in _chain(first, pieces):
                delta = {"content": piece.text} if piece.text or not piece.finish else {}
                yield self._event(piece.index, delta, piece.finish or None, self._logprobs(piece.logprobs))
        except EngineError as error:
            yield b"data: " + orjson.dumps({"error": error_body(error.status, str(error))}) + b"\n\n"
            return
        yield USAGE_COMMENT + orjson.dumps(self._usage()) + b"\n\n"
        if self._request.include_usage:
            tail = {"object": "chat.completion.chunk", **self._head, "choices": [], "usage": self._usage()}
            yield b"data: " + orjson.dumps(tail) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _event(self, index: int, delta: dict[str, Any], finish: str | None, logprobs: dict[str, Any] | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        chunk: dict[str, Any] = {"object": "chat.completion.chunk", **self._head, "choices": [choice]}
        if self._request.include_usage:
            chunk["usage"] = None  # OpenAI sends null on every chunk but the last when usage was asked for
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _logprobs(self, entries: list[dict[str, Any]]) -> dict[str, Any] | None:
        return {"content": entries} if self._request.params.top_logprobs is not None else None

    def _usage(self) -> dict[str, Any]:
        prompt, completion = len(self.sequences[0].prompt), self._completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


async def _chain(first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in rest:
        yield piece


def _logprob_entry(text: Text, entry: TokenLogprobs) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": text.token_text(token), "logprob": logprob, "bytes": text.token_bytes(token)}

    return {**one(entry.token, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top]}


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}
