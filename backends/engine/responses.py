"""The shapes of an answer: chat completion and text completion, whole or in chunks. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from backends.engine.sequence import TokenLogprobs
from backends.engine.text import Text


@dataclass(slots=True)
class Piece:
    """Text of one choice that may be shown, with the tokens behind it. The last one has a finish reason.

    `logprobs` are pairs of where a token begins in the text, and its log-probabilities (None: of a first token).
    """

    index: int
    text: str
    logprobs: list[tuple[int, int, TokenLogprobs | None]]
    finish: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)


class Shape(Protocol):
    """How one surface writes choices."""

    prefix: str
    whole: str
    chunk: str

    def openings(self, index: int) -> Iterator[dict[str, Any]]:
        """The chunks of a choice before its first piece."""
        ...

    def part(self, piece: Piece) -> dict[str, Any]:
        """A choice in a chunk."""
        ...

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        """A whole choice."""
        ...


class ChatShape:
    """`/v1/chat/completions`; `logprobs`: whether they were asked for."""

    prefix, whole, chunk = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, text: Text, logprobs: bool) -> None:
        self._text, self._wants_logprobs = text, logprobs
        self._calls: dict[int, int] = {}

    def openings(self, index: int) -> Iterator[dict[str, Any]]:
        delta = {"role": "assistant", "content": ""}
        yield {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def part(self, piece: Piece) -> dict[str, Any]:
        delta: dict[str, Any] = {"content": piece.text} if piece.text or not (piece.finish or piece.calls) else {}
        if piece.calls:
            first = self._calls.get(piece.index, 0)
            self._calls[piece.index] = first + len(piece.calls)
            delta["tool_calls"] = [{"index": first + number, **call} for number, call in enumerate(piece.calls)]
        logprobs = self._logprobs([piece])
        return {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": piece.finish or None}

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        content, calls = "".join(piece.text for piece in pieces), [call for piece in pieces for call in piece.calls]
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = calls
        logprobs = self._logprobs(pieces)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": pieces[-1].finish}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if not self._wants_logprobs:
            return None
        return {"content": [self._entry(logprobs) for piece in pieces for _, _, logprobs in piece.logprobs if logprobs]}

    def _entry(self, entry: TokenLogprobs) -> dict[str, Any]:
        def one(token: int, logprob: float) -> dict[str, Any]:
            return {"token": self._text.token_text(token), "logprob": logprob, "bytes": self._text.token_bytes(token)}

        return {**one(entry.token, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top]}


class CompletionShape:
    """`/v1/completions`; `logprobs`: whether they were asked for."""

    prefix, whole, chunk = "cmpl-", "text_completion", "text_completion"

    def __init__(self, text: Text, logprobs: bool) -> None:
        self._text, self._wants_logprobs = text, logprobs

    def openings(self, index: int) -> Iterator[dict[str, Any]]:
        return iter(())

    def part(self, piece: Piece) -> dict[str, Any]:
        return self.choice(piece.index, [piece])

    def choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        return {
            "index": index,
            "text": "".join(piece.text for piece in pieces),
            "logprobs": self._logprobs(pieces) if self._wants_logprobs else None,
            "finish_reason": pieces[-1].finish or None,
        }

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        entries = [entry for piece in pieces for entry in piece.logprobs]
        return {
            "tokens": [self._name(token) for _, token, _ in entries],
            "token_logprobs": [None if logprobs is None else logprobs.logprob for *_, logprobs in entries],
            "top_logprobs": [
                None if logprobs is None else {self._name(token): value for token, value in logprobs.top}
                for *_, logprobs in entries
            ],
            "text_offset": [begins for begins, *_ in entries],
        }

    def _name(self, token: int) -> str:
        """A token's text; of a part of a character, its bytes, as OpenAI writes them."""
        raw = bytes(self._text.token_bytes(token))
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"message": message, "type": kind, "param": param, "code": code}
