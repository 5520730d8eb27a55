"""Connections of clients, bounded: headers that are too long or too slow, and responses that nobody reads."""

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
        self._timer: asyncio.TimerHandle | None = None
        self._reader: asyncio.TimerHandle | None = None
        self._head: int | None = 0
        """Bytes of the headers that are coming; None while there are none to come."""
        self._refused = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(b"503 Service Unavailable", b"too many connections")
        else:
            self._timer = self.loop.call_later(self.limits.header_time, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop("_timer")
        self._stop("_reader")
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._head is not None:
            self._head += len(data)
        super().data_received(data)
        if self._head is not None and self._head > self.limits.header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", b"the headers are too long")

    def on_message_begin(self) -> None:
        if self._head is None:
            self._head = 0
            self._timer = self.loop.call_later(self.limits.header_time, self._too_slow)
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._stop("_timer")
        self._head = None
        size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > self.limits.header_bytes:
            self._refuse(b"431 Request Header Fields Too Large", b"the headers are too long")
        if not self._refused:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._reader = self.loop.call_later(self.limits.write_time, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop("_reader")

    def _too_slow(self) -> None:
        self._refuse(b"408 Request Timeout", b"the request headers did not come in time")

    def _refuse(self, status: bytes, why: bytes) -> None:
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        head = b"HTTP/1.1 %b\r\ncontent-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (status, len(why)) + why)
        self.transport.close()

    def _stop(self, name: str) -> None:
        timer = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)


def bounded(limits: ClientLimits) -> type[Bounded]:
    """The protocol, with these limits in this process. One class with one name: uvicorn hands it to its workers."""
    Bounded.limits = limits
    return Bounded
