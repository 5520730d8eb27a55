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
    Reply,
    Server,
)
from gateway.exchange import COPY_LIMIT
from gateway.places import Place
from policies.breaker import Pass
from policies.retry import Kind, blames, kind_of, retry_after

_ERROR_LIMIT = 64 << 10
_TOO_LONG = (b"context_length_exceeded", b"maximum context length", b"prompt is too long")


class Begun:
    """A response whose first byte has come; a `Reply`. It keeps its place's books until it is closed."""

    def __init__(self, reply: Reply, place: Place, permission: Pass, deadline: float | None) -> None:
        self.status, self.headers = reply.status, reply.headers
        self._reply, self._place, self._permission, self._deadline = reply, place, permission, deadline
        self._source = reply.chunks()
        self._first: list[bytes] = []
        self._whole = False
        self._closed = False

    @property
    def is_stream(self) -> bool:
        return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in self.headers)

    async def begin(self) -> None:
        """Wait for the first piece of a stream, or for the whole of anything else: until then nothing was passed on."""
        most = 1 if self.is_stream else _ERROR_LIMIT if self.status >= 400 else COPY_LIMIT
        size = 0
        async for chunk in self._source:
            self._first.append(chunk)
            size += len(chunk)
            if size >= most:
                return
        self._whole = True

    def says_too_long(self) -> bool:
        """Whether an error says that the request does not fit the model."""
        return self.status in (400, 413) and any(word in b"".join(self._first) for word in _TOO_LONG)

    async def chunks(self) -> AsyncIterator[bytes]:
        while self._first:
            yield self._first.pop(0)
        if self._whole:
            return
        try:
            if self._deadline is None:
                async for chunk in self._source:
                    yield chunk
                return
            while True:
                async with asyncio.timeout_at(self._deadline):
                    chunk = await anext(self._source, b"")
                if not chunk:
                    return
                yield chunk
        except TimeoutError as error:
            raise BackendTimeout(self._place.name, "the whole answer took too long") from error
        except BackendError as error:
            self._place.failed(Pass(self._permission.era), error.detail)
            raise

    async def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._place.in_flight -= 1
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
    server: Server, place: Place, permission: Pass, call: Call, limit: float | None, deadline: float | None, ours: bool
) -> Outcome:
    """One try: `limit` seconds for its first byte, `deadline` (of the event loop's clock) for its last.

    `ours`: the credential is the gateway's own, so that a refusal of it is the backend's matter.
    """
    began, told, reply = time.monotonic(), False, None
    place.in_flight += 1
    try:
        async with asyncio.timeout(limit):
            answer = await server.open(call)
            reply = Begun(answer, place, permission, deadline)
            await reply.begin()
        kind = kind_of(reply.status, ours)
        if kind == "final" and reply.says_too_long():
            kind = "too-long"
        if kind == "broken" and reply.status == 503 and server.kind == "engine":
            kind = "limited"  # its queue is full: it works as hard as it can
        if blames(kind, ours) and not (kind == "limited" and server.kind == "engine"):
            place.failed(permission, f"answered {reply.status}")
        elif kind in ("", "too-long", "final"):
            place.succeeded(permission, time.monotonic() - began, reply.is_stream)
        else:
            place.dropped(permission)
        told = True
        return Outcome(kind, reply, wait=retry_after(dict(reply.headers), time.time()) if kind else None)
    except TimeoutError:
        place.failed(permission, f"no first byte within {limit:g} s")
        told = True
        await _close(reply, place)
        return Outcome("timeout", error=BackendTimeout(server.name, f"no first byte within {limit:g} s"))
    except BackendError as error:
        if isinstance(error, BackendStarting):
            place.dropped(permission)
        else:
            place.failed(permission, error.detail)
        told = True
        await _close(reply, place)
        kind = "timeout" if isinstance(error, BackendTimeout) else "unreachable"
        if isinstance(error, BackendInterrupted):
            kind = "broken"
        return Outcome(kind, error=error, wait=error.retry_after)
    except BaseException:  # the client has left, or another try was faster
        if not told:
            place.dropped(permission)
        await _close(reply, place)
        raise


async def _close(reply: Begun | None, place: Place) -> None:
    if reply is None:
        place.in_flight -= 1
    else:
        await reply.close()
