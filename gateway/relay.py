"""A backend's response on its way to the client, and into the answer cache."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator, Callable

from backends.dialects import openai_chat, sse
from backends.dialects.hidden_usage import HiddenUsage
from backends.protocol import BackendError, BackendInterrupted, content_type
from gateway.cache.answers import Answers
from gateway.cache.lookup import Lookup
from gateway.cache.question import Question
from gateway.dispatch import Dispatched, Told
from gateway.errors import refusal
from gateway.exchange import COPY_LIMIT, Body, Served

_OWN = (b"x-hitherto-cost-usd", b"x-hitherto-saved-usd")
"""Headers that a response has for itself, whoever shares its body."""
_TERMINAL = re.compile(rb"data: ?\[DONE\]\s*$")


def relayed(
    answers: Answers,
    question: Question,
    lookup: Lookup,
    dispatched: Dispatched,
    started: float,
    parts: Callable[[], dict[str, str]],
) -> Served:
    """The response; reading its body remembers the answer. `parts` tells what the question's scope is made of."""
    reply, tier = dispatched.reply, lookup.tier
    reason = lookup.reason.encode()
    forwarded = "bypass" if tier == "bypass" else "miss"
    headers = [_renamed(name, value) for name, value in dispatched.headers() if name != b"date"]
    headers += [
        (b"x-hitherto-cache", tier.encode()),
        (b"cache-status", f"hitherto; fwd={forwarded}; fwd-status={reply.status}; detail=".encode() + reason),
        (b"x-hitherto-reason", reason),
        (b"x-hitherto-backend", dispatched.backend.encode()),
        (b"x-hitherto-model", dispatched.model.encode("latin-1", "replace")),
    ]
    if dispatched.prompt_cache:
        headers.append((b"x-hitherto-prompt-cache", dispatched.prompt_cache.encode()))
    served = Served(reply.status, headers, started=started, tenant=question.tenant, model=question.view.model)
    served.backend, served.backend_kind = dispatched.backend, dispatched.kind
    served.cache, served.reason, served.priced = tier, lookup.reason, dispatched.priced
    served.stream, served.similarity = question.view.stream, lookup.similarity
    served.entry = lookup.nearest.hex() if lookup.nearest is not None else ""
    remembering = _Remembering(answers, question, lookup, dispatched, served, parts)
    served.chunks = Body(remembering.chunks(), remembering.end)
    return served


def following(leader: Served, started: float, reason: str = "collapsed") -> Served:
    """The response of somebody who gets what is on its way to somebody else."""
    changed = {
        b"cache-status": f"hitherto; fwd=miss; collapsed; detail={reason}".encode(),
        b"x-hitherto-reason": reason.encode(),
    }
    headers = [(name, changed.get(name, value)) for name, value in leader.headers if name not in _OWN]
    served = Served(leader.status, headers, started=started, tenant=leader.tenant, model=leader.model)
    served.backend, served.backend_kind = leader.backend, leader.backend_kind
    served.reason = served.stored = reason
    served.leader, served.stream = leader, leader.stream
    return served


class _Remembering:
    """Passes a body on, and remembers it at its end."""

    def __init__(
        self,
        answers: Answers,
        question: Question,
        lookup: Lookup,
        dispatched: Dispatched,
        served: Served,
        parts: Callable[[], dict[str, str]],
    ) -> None:
        self._answers, self._question, self._lookup = answers, question, lookup
        self._dispatched, self._served, self._parts = dispatched, served, parts
        headers = dispatched.reply.headers
        self._stream = content_type(headers).startswith(b"text/event-stream")
        self._readable = all(name != b"content-encoding" for name, _ in headers)
        self._passed = self._deltas = 0
        self._settled = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """The upstream's bytes, those of a stream as they come. The answer is stored just before the bytes that end
        it are passed on, so that a client that has them and asks again finds it."""
        reply, served, stream = self._dispatched.reply, self._served, self._stream
        copy, kept, begun = bytearray(), self._readable, False
        hidden = HiddenUsage() if self._dispatched.hides_usage and stream and kept else None
        try:
            if reply.whole is not None and not stream:
                self._passed = len(reply.whole)
                if kept:
                    self._remember(reply.whole)
                    self._tell_cost()
                yield reply.whole
                return
            async for chunk in reply.chunks():
                self._passed += len(chunk)
                self._deltas += sse.deltas(chunk) if stream else 0
                if kept and len(copy) + len(chunk) <= COPY_LIMIT:
                    copy += chunk
                    if not stream:
                        continue  # sent in one piece, so that a body that breaks off becomes a proper error
                    if not served.stored and _TERMINAL.search(copy[-32:]):
                        self._remember(bytes(copy))
                elif kept:
                    kept, served.stored = False, served.stored or "too-long"
                    chunk = chunk if stream else bytes(copy) + chunk
                if hidden is not None:
                    chunk = hidden.passed(chunk)
                if chunk:
                    begun = True
                    yield chunk
            if kept and not served.stored:
                self._remember(bytes(copy))
            if kept and not stream:
                self._tell_cost()
                yield bytes(copy)
            if hidden is not None and (rest := hidden.ended()):
                yield rest
        except BackendError as error:
            served.stored = "interrupted"
            if not stream or not begun:
                raise
            # The head is gone, so an SSE client learns of it by an error event instead of a silent end.
            yield b"data: " + refusal(BackendInterrupted(error.backend, error.detail)).body() + b"\n\n"
        finally:
            await self.end()

    async def end(self) -> None:
        """Settle what it took, and let the backend go."""
        try:
            if not self._settled:
                self._settle()
        finally:
            await self._dispatched.reply.close()

    def _settle(self) -> list[tuple[bytes, bytes]]:
        self._settled = True
        used = self._served.answer.usage if self._served.answer is not None else None
        # The first event of a stream says who speaks, not yet what.
        return self._dispatched.settle(Told(used, self._passed, max(0, self._deltas - 1)))

    def _tell_cost(self) -> None:
        """Of a body that is here before its head is sent."""
        self._served.headers += self._settle()

    def _remember(self, copy: bytes) -> None:
        served, stream = self._served, self._stream
        try:
            answer = openai_chat.answer_from_stream(copy) if stream else openai_chat.answer_from_json(copy)
            served.answer = answer
            if self._dispatched.fallback:
                served.stored = "fallback"  # the key names the first candidate's answer, and this is another's
                return
            # A stream that was not asked for usage does not tell it; a whole body tells all that there is to tell.
            complete = answer.usage is not None or not stream
            status = self._dispatched.reply.status
            backend = self._dispatched.backend
            reason = self._answers.remember(self._question, self._lookup, backend, status, answer, complete)
            if not reason:
                self._answers.describe(self._question, self._parts)
        except Exception:
            self._answers.fault("remember")
            reason = "fault"
        served.stored = reason or "stored"


def _renamed(name: bytes, value: bytes) -> tuple[bytes, bytes]:
    """The upstream's request id beside ours, not in its place."""
    return (b"x-upstream-request-id" if name == b"x-request-id" else name), value
