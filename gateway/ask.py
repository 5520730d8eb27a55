"""A request for a model, as dispatch needs to see it, whatever its dialect."""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.tenant import Tenant

FREE = frozenset({"/messages/count_tokens", "/responses/input_tokens", "/moderations", "/tokenize", "/detokenize"})
"""Paths that providers ask no money for."""
_NO_ANSWER = FREE | {"/embeddings", "/rerank", "/score", "/classify"}
_MEDIA = re.compile(rb'(?:;base64,|"data"\s*:\s*")[A-Za-z0-9+/=\\]{256,}')
MEDIA_TOKENS = 1500
"""What a picture or a recording counts as; its bytes say nothing."""
EVENT_BYTES = 200
"""Of a stream, where each token comes in an event of its own."""
PREFIX_BYTES = 2048
"""Requests that begin with the same so many bytes share a prefix."""
_DEFAULT_ANSWER = 256


@dataclass(slots=True)
class Try:
    """One sending of a request to a place that may have to be paid."""

    backend: str
    priced: tuple[str, str, str]
    """What the price depends on: the model, the kind of backend, its URL."""
    began: float = field(default_factory=time.monotonic)
    ended: float | None = None
    outcome: str = "abandoned"
    """What became of it: how it failed, or that nobody waited for it any more; empty: it gave the answer."""

    @property
    def spent(self) -> bool:
        """Whether the provider has probably read the prompt: errors are not charged, silence is."""
        return self.outcome in ("abandoned", "timeout", "interrupted")

    @property
    def seconds(self) -> float:
        """How long it took, or takes."""
        return (time.monotonic() if self.ended is None else self.ended) - self.began


@dataclass(slots=True)
class Ask:
    """One request. `fields` is its JSON body (empty where it is none), of a chat without its question."""

    path: str
    query: str
    headers: Mapping[str, str]
    body: bytes
    model: str
    tenant: Tenant
    fields: Mapping[str, Any]
    question: str | None = None
    tries: list[Try] = field(default_factory=list)
    """Whom it was sent to."""
    _prompt: int = 0

    @property
    def stream(self) -> bool:
        return self.fields.get("stream") is True

    @property
    def prompt_tokens(self) -> int:
        """About how many: a quarter of the bytes of its text."""
        if not self._prompt:
            media = list(_MEDIA.finditer(self.body)) if len(self.body) > 1024 else []
            text = len(self.body) - sum(found.end() - found.start() for found in media)
            if not self.fields:  # a form with a file, say
                text = min(text, 4 * MEDIA_TOKENS)
            self._prompt = max(1, text // 4 + MEDIA_TOKENS * len(media))
        return self._prompt

    @property
    def answer_tokens(self) -> int:
        """How many it may get at most, or a guess where it does not say."""
        if self.path in _NO_ANSWER:
            return 0
        told = [self.fields.get(name) for name in ("max_completion_tokens", "max_tokens", "max_output_tokens")]
        numbers = [int(value) for value in told if isinstance(value, int | float) and 0 <= value < 1 << 30]
        choices = self.fields.get("n")
        return max(numbers, default=_DEFAULT_ANSWER) * (choices if isinstance(choices, int) and choices > 1 else 1)

    @property
    def answers_in_text(self) -> bool:
        """Whether the size of an answer says how many tokens it has."""
        return self.path not in _NO_ANSWER and not self.path.startswith("/images/")

    def conversation(self) -> bytes:
        """What all turns of a conversation have in common, as a hash; tenants have nothing in common."""
        return self._digest(self._beginning())

    def prefix(self) -> bytes:
        """The same for requests that begin alike and may then differ: they share what is cached of it."""
        return self._digest(self._beginning()[:PREFIX_BYTES])

    def _digest(self, beginning: bytes) -> bytes:
        head = f"{self.tenant.name}\0{self.model}\0".encode("utf-8", "surrogatepass")
        return hashlib.blake2b(head + beginning, digest_size=16).digest()

    def _beginning(self) -> bytes:
        """Tools, system prompt, and everything up to the end of the first user turn."""
        fields = self.fields
        messages = fields.get("messages")
        if not isinstance(messages, list):
            return self.body[:PREFIX_BYTES]
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        end = roles.index("user") + 1 if "user" in roles else len(messages)
        said = [[role, text_of(message)] for role, message in zip(roles[:end], messages[:end], strict=True)]
        if said and end == len(messages) and self.question is not None:  # which was taken out of its message
            said[-1][1] = self.question
        try:
            return orjson.dumps([fields.get("tools"), fields.get("system"), said])
        except TypeError:  # orjson reads deeper nesting than it writes
            return self.body[:PREFIX_BYTES]


def text_of(message: Any) -> Any:
    """A message's content; the same for one text, whether it comes as a string or in parts."""
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list):
        return content
    texts = [part.get("text") if isinstance(part, dict) else None for part in content]
    return content if None in texts else "".join(map(str, texts))
