"""The one HTTP client towards everything remote: cloud APIs, other gateways, and our engine's unix socket.

aiohttp, by measurement (docs/performance.md): a relay on plain httpx does a fifth of its requests per second at 32
connections.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from yarl import URL

from backends.protocol import (
    BackendInterrupted,
    BackendStarting,
    BackendTimeout,
    BackendUnreachable,
    Call,
    Reply,
)

HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade"}
)
"""RFC 9110 section 7.6.1: for one connection only, never passed on."""
_HOP_BY_HOP_BYTES = frozenset(name.encode() for name in HOP_BY_HOP)
_READ_SIZE = 1 << 16
_CONTROL_SECONDS = 2.0


class UpstreamReply:
    """A response whose head has arrived."""

    def __init__(self, backend: str, response: aiohttp.ClientResponse) -> None:
        self.status = response.status
        # The raw bytes: header values need not be text in any encoding.
        self.headers = [
            (lower, value) for name, value in response.raw_headers if (lower := name.lower()) not in _HOP_BY_HOP_BYTES
        ]
        self._backend = backend
        self._response = response

    async def chunks(self) -> AsyncIterator[bytes]:
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except TimeoutError as error:  # before ClientError: aiohttp's timeouts are both
            raise BackendTimeout(self._backend, "the response stopped coming") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise BackendInterrupted(self._backend, f"the response broke off: {error}") from error

    async def close(self) -> None:
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()  # a half-read response: the upstream sees a hang-up and can stop computing


class Upstream:
    """A backend that is reached over HTTP. `base` ends with the version path, like `https://api.openai.com/v1`."""

    def __init__(
        self,
        name: str,
        kind: str,
        base: str,
        *,
        key: str | None = None,
        socket: Path | None = None,
        connect_timeout: float = 5.0,
        idle_timeout: float = 600.0,
        starting: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.name, self.kind = name, kind
        self.identity = base
        self._base = base.rstrip("/")
        self._key = key
        self._socket = socket
        self._timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect_timeout, sock_read=idle_timeout)
        self._starting = starting
        self._session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        connector: aiohttp.BaseConnector
        if self._socket is not None:
            connector = aiohttp.UnixConnector(path=str(self._socket), limit=0)
        else:
            connector = aiohttp.TCPConnector(limit=0, ttl_dns_cache=60)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=self._timeout,
            auto_decompress=False,
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
            cookie_jar=aiohttp.DummyCookieJar(),
            read_bufsize=_READ_SIZE,
        )

    async def stop(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def ready(self) -> str:
        return self._starting() or ""

    async def open(self, call: Call) -> Reply:
        if self._session is None:
            raise BackendUnreachable(self.name, "not started")
        # aiohttp writes header text as UTF-8, and ASGI hands bytes over as latin-1.
        headers = {
            name: value.encode("latin-1").decode("utf-8", "surrogateescape") for name, value in call.headers.items()
        }
        # The copy for the cache and the ledger is read in passing, so the body must not be compressed.
        headers["accept-encoding"] = "identity"
        if self._key is not None:
            headers["authorization"] = f"Bearer {self._key}"
        address = f"{self._base}{call.path}" + (f"?{call.query}" if call.query else "")
        try:
            response = await self._session.request(
                call.method, URL(address, encoded=True), data=call.body or None, headers=headers, allow_redirects=False
            )
        except TimeoutError as error:
            raise BackendTimeout(self.name, f"no answer in time ({type(error).__name__})") from error
        except (aiohttp.ClientError, OSError) as error:
            reason = self._starting()
            if reason is not None:
                raise BackendStarting(self.name, reason or "starting", retry_after=2.0) from error
            raise BackendUnreachable(self.name, str(error) or type(error).__name__) from error
        return UpstreamReply(self.name, response)

    async def get_json(self, path: str) -> Any:
        """A small control request (`/models`, `/health`); path relative to the base. Raises a `BackendError`."""
        try:
            async with asyncio.timeout(_CONTROL_SECONDS):
                reply = await self.open(Call("GET", path, "", {}, b""))
                try:
                    body = b"".join([chunk async for chunk in reply.chunks()])
                finally:
                    await reply.close()
        except TimeoutError as error:
            raise BackendTimeout(self.name, f"GET {path} did not answer within {_CONTROL_SECONDS:g} s") from error
        if reply.status != 200:
            raise BackendUnreachable(self.name, f"GET {path} answered {reply.status}")
        try:
            return orjson.loads(body)
        except orjson.JSONDecodeError as error:
            raise BackendUnreachable(self.name, f"GET {path} did not answer in JSON") from error
