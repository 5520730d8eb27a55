"""The few plain ASGI pieces that our hot routes, the engine server and the fake upstream share.

A FastAPI route costs about half of the throughput of a small relay (docs/performance.md), so the routes that carry
the load are plain ASGI functions.
"""

from __future__ import annotations

import asyncio
import contextlib
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


async def until_hangup(receive: Receive, work: Awaitable[None]) -> bool:
    """Run `work`, but cancel it as soon as the client hangs up; True if it ran to its end.

    ASGI servers tell of a hang-up only through `receive`, and `send` then silently does nothing, so without this a
    computation would go on for nobody.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
            return True
        return False
    finally:
        watcher.cancel()
        if not task.done():
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
