"""The few plain ASGI pieces that our hot routes, the engine server and the fake upstream share.

A FastAPI route costs about half of the throughput of a small relay (docs/performance.md), so the routes that carry
the load are plain ASGI functions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any

import orjson

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Headers = Iterable[tuple[bytes, bytes]]

JSON = (b"content-type", b"application/json")
SSE = (b"content-type", b"text/event-stream; charset=utf-8")


class BodyTooLarge(Exception):
    """The request body is over the limit."""


class ClientGone(Exception):
    """The client closed the connection before its request was complete."""


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole request body, at most `limit` bytes."""
    parts: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        part: bytes = message.get("body", b"")
        size += len(part)
        if size > limit:
            raise BodyTooLarge
        if part:
            parts.append(part)
        if not message.get("more_body", False):
            return parts[0] if len(parts) == 1 else b"".join(parts)


def bounded(receive: Receive, limit: int) -> Receive:
    """`receive` for whoever reads a whole body without asking how long it is. Raises `BodyTooLarge`."""
    left = limit

    async def counted() -> Message:
        nonlocal left
        message = await receive()
        left -= len(message.get("body", b""))
        if left < 0:
            raise BodyTooLarge(f"the request body is over {limit} bytes")
        return message

    return counted


def header_map(scope: Scope) -> dict[str, str]:
    """Header names in lower case → values; repeated headers are joined with a comma (RFC 9110 section 5.2)."""
    headers: dict[str, str] = {}
    for raw_name, raw_value in scope["headers"]:
        name, value = raw_name.decode("latin-1").lower(), raw_value.decode("latin-1")
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return headers


async def send_bytes(send: Send, status: int, headers: Headers, body: bytes) -> None:
    """A complete response."""
    head = [*headers, (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": head})
    await send({"type": "http.response.body", "body": body})


async def send_json(send: Send, status: int, value: object, headers: Headers = ()) -> None:
    """A complete JSON response."""
    await send_bytes(send, status, [JSON, *headers], orjson.dumps(value))


async def send_stream(send: Send, status: int, headers: Headers, chunks: AsyncIterator[bytes]) -> None:
    """A response that is sent as its chunks come."""
    await send({"type": "http.response.start", "status": status, "headers": list(headers)})
    async for chunk in chunks:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


class HangupWatch:
    """Cancels the task that entered it when the client hangs up; a context manager that swallows that cancellation.

    ASGI servers tell of a hang-up only through `receive`, and `send` then silently does nothing, so without this a
    computation would go on for nobody. Watching costs a task, so it begins with `start`: an answer that is at hand
    needs none.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._task: asyncio.Task[Any] | None = None
        self._watcher: asyncio.Task[None] | None = None
        self.gone = False

    def start(self) -> None:
        if self._watcher is None:
            self._task = asyncio.current_task()
            self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._task is not None:
            self._task.cancel()

    async def __aenter__(self) -> HangupWatch:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        task, watcher = self._task, self._watcher
        self._task = self._watcher = None  # which know this: a cycle would be the garbage collector's work
        if watcher is not None:
            watcher.cancel()
        if kind is asyncio.CancelledError and self.gone and task is not None:
            return task.uncancel() == 0  # else somebody else wants this task to end, too
        return False
