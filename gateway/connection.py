"""Connections of clients, bounded: what comes too slowly or is too long, and answers that nobody reads.

Every request passes here, so a request that comes in one piece costs two comparisons.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.config import ClientLimits


class Bounded(HttpToolsProtocol):
    """uvicorn's protocol with limits that it does not have."""

    limits = ClientLimits()

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._waiting: asyncio.TimerHandle | None = None
        """For the client to send what is missing of its request."""
        self._unread: asyncio.TimerHandle | None = None
        self._coming = "headers"
        """Which part of a request is not complete; empty: no request has begun."""
        self._bytes = self._segment = 0
        """Since the request began, or the last of its body; and in the piece that is being read."""
        self._after_another = self._measure = False
        """Whether a request has ended in this piece; whether the next one's headers must be measured for that."""
        self._refused: tuple[bytes, bytes] | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(b"503 Service Unavailable", b"too many connections")
        else:
            self._wait(self.limits.header_time)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused is not None:
            return
        before, self._segment, self._after_another = self._coming, len(data), False
        self._bytes += self._segment
        super().data_received(data)
        coming = self._coming
        if coming == "headers" and self._bytes > self.limits.header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", b"the headers are too long")
        elif self._answering():
            if self._waiting is not None:  # what comes on top of a request that is being answered has time
                self._stop()
        elif coming == "body":  # between two pieces
            if self._bytes > self.limits.header_bytes:  # without anything of a body
                self._refuse(b"431 Request Header Fields Too Large", b"the trailers are too long")
                return
            self._wait(self.limits.body_time)
        elif before != coming or self._waiting is None:  # for all headers, or for the next request to begin
            self._wait(self.limits.header_time)

    def on_message_begin(self) -> None:
        # What came before it in the same piece is another request's: its headers are measured when they are complete.
        self._coming, self._bytes = "headers", 0 if self._after_another else self._segment
        self._measure = self._after_another
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._measure or self._bytes > self.limits.header_bytes:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > self.limits.header_bytes:
                self._refused = b"431 Request Header Fields Too Large", b"the headers are too long"
                raise ValueError("refused")  # which the parser turns into a call of send_400_response
        self._coming, self._bytes = "body", 0
        super().on_headers_complete()
        self.headers = []  # the application has its own: trailers (RFC 9110 section 6.5) are not among them

    def on_body(self, body: bytes) -> None:
        self._bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._coming, self._after_another = "", True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._coming:  # the next request has begun, or this one has more to come than its answer needed
            self._wait(self.limits.body_time if self._coming == "body" else self.limits.header_time)
        else:
            self._stop()  # uvicorn's own time between two requests begins

    def _answering(self) -> bool:
        """Whether a whole request is being answered."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and (self._coming != "body" or bool(self.pipeline))

    def send_400_response(self, msg: str) -> None:
        if self._refused is not None:
            self._refuse(*self._refused)
        else:
            super().send_400_response(msg)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._unread is None:
            self._unread = self.loop.call_later(self.limits.write_time, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _wait(self, seconds: float) -> None:
        self._stop()
        self._waiting = self.loop.call_later(seconds, self._too_slow)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _too_slow(self) -> None:
        answered = self.cycle is not None and self.cycle.response_complete and self._coming != "headers"
        if answered:  # nobody waits for another word
            self.transport.close()
            return
        what = b"headers" if self._coming == "headers" else b"body"
        self._refuse(b"408 Request Timeout", b"the request " + what + b" did not come in time")

    def _refuse(self, status: bytes, why: bytes) -> None:
        self._refused = status, why
        self._stop()
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete and (cycle.response_started or self._coming == "headers"):
            self.transport.abort()  # where another answer is due nothing else may be said
            return
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(why)) + why)
        self.transport.close()


def bounded(limits: ClientLimits) -> type[Bounded]:
    """The protocol, with these limits in this process. One class with one name: uvicorn hands it to its workers."""
    Bounded.limits = limits
    return Bounded
