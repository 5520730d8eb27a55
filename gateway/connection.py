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
        self._bytes = 0
        """Since the request began."""
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
        before = self._coming
        self._bytes += len(data)
        super().data_received(data)
        coming = self._coming
        if coming == "headers" and self._bytes > self.limits.header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", b"the headers are too long")
        elif not coming:
            if self._waiting is not None:
                self._stop()
        elif coming == "body" or before != coming:  # the time for headers is for all of them, for a body between pieces
            self._wait(self.limits.body_time if coming == "body" else self.limits.header_time)

    def on_message_begin(self) -> None:
        self._coming = "headers"
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        if self._bytes > self.limits.header_bytes:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > self.limits.header_bytes:
                self._refused = b"431 Request Header Fields Too Large", b"the headers are too long"
                raise ValueError("refused")  # which the parser turns into a call of send_400_response
        self._coming = "body"
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._coming, self._bytes = "", 0
        super().on_message_complete()

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
        what = b"headers" if self._coming == "headers" else b"body"
        self._refuse(b"408 Request Timeout", b"the request " + what + b" did not come in time")

    def _refuse(self, status: bytes, why: bytes) -> None:
        self._refused = status, why
        if self.transport.is_closing():
            return
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(why)) + why)
        self.transport.close()


def bounded(limits: ClientLimits) -> type[Bounded]:
    """The protocol, with these limits in this process. One class with one name: uvicorn hands it to its workers."""
    Bounded.limits = limits
    return Bounded
