"""One request at one place, until its first byte has come: before that it may be given up and tried elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from backends.protocol import (
    BackendError,
    BackendInterrupted,
    BackendStarting,
    BackendTimeout,
    Call,
    Response,
    Server,
    content_type,
)
from gateway.exchange import COPY_LIMIT
from gateway.places import Place
from policies.breaker import Pass
from policies.retry import Kind, blames, kind_of, retry_after

_ERROR_LIMIT = 64 << 10
_TOO_LONG = (b"context_length_exceeded", b"maximum context length", b"prompt is too long")


class Begun:
    """A response whose first byte has come; a `Reply`."""

    def __init__(self, reply: Response, place: Place, permission: Pass, deadline: float | None, stream: bool) -> None:
        """`stream`: a stream was asked for."""
        self.status, self.headers = reply.status, reply.headers
        self._reply, self._place, self._permission, self._deadline = reply, place, permission, deadline
        self._first: list[bytes] = []
        self.whole: bytes | None = None
        kind = content_type(reply.headers)
        self.is_stream = kind.startswith(b"text/event-stream") or (stream and self.status < 400)
        # What is no JSON (speech, pictures) is as good in pieces, and may be long.
        self._in_pieces = self.is_stream or (self.status < 400 and b"json" not in kind)

    async def arrive(self) -> None:
        """Wait for the first piece of a stream, or for the whole of anything else: until then nothing was passed on."""
        most = 1 if self._in_pieces else _ERROR_LIMIT if self.status >= 400 else COPY_LIMIT
        self._first, ended = await self._reply.begin(most)
        if ended:
            self.whole = self._first[0] if len(self._first) == 1 else b"".join(self._first)

    def says_too_long(self) -> bool:
        """Whether an error says that the request does not fit the model."""
        return self.status in (400, 413) and any(word in b"".join(self._first) for word in _TOO_LONG)

    def begins_with_an_error(self) -> bool:
        """Whether a stream that began with 200 says first of all that nothing will come."""
        first = self._first[0].lstrip() if self.is_stream and self._first else b""
        return first.startswith((b"event: error", b"event:error", b'data: {"error"', b'data:{"error"'))

    async def chunks(self) -> AsyncIterator[bytes]:
        while self._first:
            yield self._first.pop(0)
        if self.whole is not None:
            return
        try:
            if self._deadline is None:
                async for chunk in self._reply.chunks():
                    yield chunk
                return
            source = self._reply.chunks()
            while True:
                async with asyncio.timeout_at(self._deadline):
                    chunk = await anext(source, b"")
                if not chunk:
                    return
                yield chunk
        except TimeoutError as error:
            raise BackendTimeout(self._place.name, "the whole answer took too long") from error
        except BackendError as error:
            self._place.failed(Pass(self._permission.era), error.detail)
            raise

    async def close(self) -> None:
        await self._reply.close()


@dataclass(slots=True)
class Outcome:
    """What became of a try: a response, or an error."""

    kind: Kind
    reply: Begun | None = None
    error: BackendError | None = None
    wait: float | None = None
    """How long the place asked to be left alone."""

    @property
    def told(self) -> str:
        return str(self.error) if self.error is not None else f"answered {self.reply.status if self.reply else 0}"

    async def drop(self) -> None:
        """Give up the response."""
        if self.reply is not None:
            await self.reply.close()


async def attempt(
    server: Server,
    place: Place,
    permission: Pass,
    call: Call,
    limit: float | None,
    deadline: float | None,
    left: float | None,
    fair: bool,
    ours: bool,
    stream: bool,
) -> Outcome:
    """One try: `limit` seconds for its first byte, `deadline` (of the event loop's clock) for its last, `left` seconds
    from now; `fair`: that is enough to blame whoever does not answer in it.

    `ours`: the credential is the gateway's own, so that a refusal of it is the backend's matter. `permission` is told
    exactly one outcome.
    """
    began, reply, told = time.monotonic(), None, False
    try:
        if limit is None and left is None:
            reply = Begun(await server.open(call), place, permission, deadline, stream)
            await reply.arrive()
        else:
            async with asyncio.timeout(left if limit is None else limit if left is None else min(limit, left)):
                reply = Begun(await server.open(call), place, permission, deadline, stream)
                await reply.arrive()
        kind = _kind(reply, server, ours)
        if kind in ("", "too-long", "final"):
            place.succeeded(permission, None if kind else time.monotonic() - began, reply.is_stream)
            told = True
        elif blames(kind, ours) and not (kind == "limited" and server.kind == "engine"):
            place.failed(permission, f"answered {reply.status}")
            told = True
        outcome = Outcome(kind, reply, wait=retry_after(dict(reply.headers), time.time()) if kind else None)
        reply = None  # it is the outcome's now
        return outcome
    except TimeoutError:
        waited = time.monotonic() - began
        if not fair and left is not None and (limit is None or left < limit):
            return Outcome("timeout", error=BackendTimeout(server.name, "all tries together took too long"))
        place.failed(permission, f"no first byte within {waited:.1f} s")
        told = True
        return Outcome("timeout", error=BackendTimeout(server.name, f"no first byte within {waited:.1f} s"))
    except BackendError as error:
        if not isinstance(error, BackendStarting):
            place.failed(permission, error.detail)
            told = True
        return Outcome(_kind_of_error(error), error=error, wait=error.retry_after)
    finally:  # the client may have left, or another try was faster
        if not told:
            place.dropped(permission)
        if reply is not None:
            await reply.close()


def _kind(reply: Begun, server: Server, ours: bool) -> Kind:
    kind = kind_of(reply.status, ours)
    if kind == "final" and reply.says_too_long():
        return "too-long"
    if kind == "broken" and reply.status == 503 and server.kind == "engine":
        return "limited"  # its queue is full: it works as hard as it can
    return "broken" if not kind and reply.begins_with_an_error() else kind


def _kind_of_error(error: BackendError) -> Kind:
    if isinstance(error, BackendTimeout):
        return "timeout"
    return "broken" if isinstance(error, BackendInterrupted) else "unreachable"
