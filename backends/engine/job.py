"""One request for output: from its sequences to the response, for one choice or several."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson

from backends import asgi
from backends.dialects.openai_chat import USAGE_COMMENT
from backends.engine.engine import Engine
from backends.engine.request import Wanted
from backends.engine.responses import Piece, Shape, error_body
from backends.engine.sequence import Emission, TokenLogprobs
from backends.engine.sequence import Sequence as Request
from backends.engine.stops import StopStrings
from backends.engine.text import Detokenizer, Text
from backends.engine.tools import ToolCalls

Arrival = tuple[int, Emission]
"""What came for which choice."""


class EngineError(Exception):
    """The engine gave up on a request: (status, message)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @classmethod
    def of(cls, emission: Emission) -> EngineError:
        """What an emission without a token means for whoever waits for one."""
        return cls(500 if emission.finish == "error" else 503, emission.error or emission.finish)


class Choice:
    """The text of one choice as it becomes certain.

    `echo` repeats the prompt, as that text, in front; `silent` shows nothing of what is computed; `calls` reads tool
    calls out of the text, which then ends after the first one unless `several_calls`.
    """

    def __init__(
        self,
        index: int,
        text: Text,
        stops: Sequence[str],
        *,
        calls: ToolCalls | None = None,
        several_calls: bool = True,
        echo: tuple[str, Request] | None = None,
        silent: bool = False,
    ) -> None:
        self.finished = False
        self.silent = silent
        self._index, self._text, self._echo = index, text, echo
        self._decoder, self._stops = Detokenizer(text), StopStrings(stops)
        self._calls, self._several = calls, several_calls
        self._waiting: list[tuple[int, int, TokenLogprobs | None]] = []
        """Logprobs whose text is held back: where it begins, and the token."""
        self._decoded = self._shown = 0

    def take(self, emission: Emission) -> Piece | None:
        """What can be shown now that this token came; None if nothing."""
        opening = self._opening() if self._echo is not None else ""
        ended = emission.finish == "stop"  # the end-of-turn token itself is no text
        assert emission.token is not None
        hidden = ended or self.silent
        if emission.logprobs is not None and not hidden:
            self._waiting.append((self._decoded, emission.token, emission.logprobs))
        text = "" if hidden else self._decoder.push(emission.token)
        text += self._decoder.flush() if emission.finish else ""
        self._decoded += len(text)
        shown = opening + self._stops.push(text) + (self._stops.flush() if emission.finish else "")
        self._shown += len(shown)
        finish = "stop" if self._stops.found else emission.finish
        # Of a text that a stop string cuts off, the tokens behind the cut go too.
        cut = self._stops.found
        ready = [entry for entry in self._waiting if entry[0] < self._shown or (finish and not cut)]
        self._waiting = self._waiting[len(ready) :]
        piece = Piece(self._index, shown, ready, finish)
        if self._calls is not None:
            self._read_calls(piece, self._calls)
        self.finished = bool(piece.finish)
        if piece.text or piece.calls or piece.finish:
            return piece
        self._waiting = piece.logprobs + self._waiting  # the text behind them is held back
        return None

    def _opening(self) -> str:
        """The prompt, for a caller who wants it repeated."""
        assert self._echo is not None
        (text, sequence), self._echo = self._echo, None
        if sequence.params.prompt_logprobs is not None:
            # A token that the tokenizer puts in front (like <s>) stands in no text.
            begins = min(0, len(text) - sum(len(self._text.token_text(token)) for token in sequence.prompt))
            for token, logprobs in zip(sequence.prompt, [None, *sequence.prompt_logprobs], strict=True):
                self._waiting.append((max(0, begins), token, logprobs))
                begins += len(self._text.token_text(token))
        self._decoded = len(text)
        return text

    def _read_calls(self, piece: Piece, reader: ToolCalls) -> None:
        piece.text, piece.calls = reader.push(piece.text)
        if piece.finish:
            text, calls = reader.flush()
            piece.text, piece.calls = piece.text + text, piece.calls + calls
        if reader.found and not self._several:
            piece.calls, piece.finish = piece.calls[:1], "tool_calls"
        elif reader.found and piece.finish == "stop":
            piece.finish = "tool_calls"


class Job:
    """A request, its sequences (one a choice), and the response that they become."""

    def __init__(
        self, engine: Engine, request: Wanted, shape: Shape, sequences: Sequence[Request], choices: Sequence[Choice],
        model: str,
    ) -> None:  # fmt: skip
        self.sequences = sequences
        self.arrivals: asyncio.Queue[Arrival] = asyncio.Queue()
        self.sources: Counter[str] = Counter()
        """Prompt tokens that were reused, by tier."""
        self.choices_each = request.choices
        """Of one prompt."""
        self._engine, self._request, self._shape, self._choices = engine, request, shape, choices
        self._head = {
            "id": f"{shape.prefix}{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": request.model or model,
        }
        self._completion_tokens = 0
        self._started: set[int] = set()

    @property
    def cached(self) -> int:
        return sum(self.sources.values())

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
                raise EngineError.of(emission)
            self._completion_tokens += not choice.silent
            if index not in self._started:
                self._started.add(index)
                if index % self._request.choices == 0:  # the other choices reuse what the first one computes
                    self.sources.update(emission.sources)
            piece = choice.take(emission)
            if piece is not None:
                if piece.finish:
                    left -= 1
                    self._engine.cancel(self.sequences[index])
                yield piece

    async def _whole(self, first: Piece, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
        parts: list[list[Piece]] = [[] for _ in self._choices]
        async for piece in _chain(first, pieces):
            parts[piece.index].append(piece)
        choices = [self._shape.choice(index, pieces) for index, pieces in enumerate(parts)]
        return {"object": self._shape.whole, **self._head, "choices": choices, "usage": self._usage()}

    async def _events(self, first: Piece, pieces: AsyncIterator[Piece]) -> AsyncIterator[bytes]:
        for index in range(len(self._choices)):
            for choice in self._shape.openings(index):
                yield self._event(choice)
        try:
            async for piece in _chain(first, pieces):
                yield self._event(self._shape.part(piece))
        except EngineError as error:
            yield b"data: " + orjson.dumps({"error": error_body(error.status, str(error))}) + b"\n\n"
            return
        yield USAGE_COMMENT + orjson.dumps(self._usage()) + b"\n\n"
        if self._request.include_usage:
            tail = {"object": self._shape.chunk, **self._head, "choices": [], "usage": self._usage()}
            yield b"data: " + orjson.dumps(tail) + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _event(self, choice: dict[str, Any]) -> bytes:
        chunk: dict[str, Any] = {"object": self._shape.chunk, **self._head, "choices": [choice]}
        if self._request.include_usage:
            chunk["usage"] = None  # OpenAI sends null on every chunk but the last when usage was asked for
        return b"data: " + orjson.dumps(chunk) + b"\n\n"

    def _usage(self) -> dict[str, Any]:
        prompt = sum(len(sequence.prompt) for sequence in self.sequences[:: self._request.choices])
        completion = self._completion_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached, "cached_by_tier": dict(self.sources)},
        }


async def _chain(first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in rest:
        yield piece
