"""The one HTTP client towards everything remote: cloud APIs, other gateways, and our engine's unix socket.

aiohttp, by measurement (docs/performance.md): a relay on plain httpx does a fifth of its requests per second at 32
connections.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from yarl import URL

from backends.protocol import (
    BackendError,
    BackendInterrupted,
    BackendStarting,
    BackendTimeout,
    BackendUnreachable,
    Call,
    PromptCacheStyle,
)

HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding"}
    | {"upgrade"}
)
"""RFC 9110 section 7.6.1: for one connection only, never passed on."""
_HOP_BY_HOP_BYTES = frozenset(name.encode() for name in HOP_BY_HOP)
_READ_SIZE = 1 << 16
KEEP_ALIVE = 4.0
"""Seconds that an idle connection is kept: less than servers do (uvicorn, and so vLLM: 5 s), so that none is closed by
the other side just when a request is sent on it. What was sent and not answered is not sent again here."""
_CONTROL_SECONDS = 2.0


class UpstreamReply:
    """A response whose head has arrived."""

    def __init__(self, backend: str, response: aiohttp.ClientResponse, over: Callable[[], None]) -> None:
        """`over` is called once, when it is closed."""
        self.status = response.status
        # The raw bytes: header values need not be text in any encoding.
        self.headers = [
            (lower, value) for name, value in response.raw_headers if (lower := name.lower()) not in _HOP_BY_HOP_BYTES
        ]
        self.whole: bytes | None = None
        self._backend, self._response, self._over = backend, response, over

    async def begin(self, most: int) -> tuple[list[bytes], bool]:
        content, pieces, size = self._response.content, list[bytes](), 0
        try:
            while chunk := await content.readany():
                pieces.append(chunk)
                size += len(chunk)
                if content.at_eof():
                    break
                if size >= most:
                    return pieces, False
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise self._broken(error) from error
        return pieces, True

    async def chunks(self) -> AsyncIterator[bytes]:
        content = self._response.content
        try:
            while chunk := await content.readany():
                yield chunk
        except (TimeoutError, aiohttp.ClientError, ConnectionError) as error:
            raise self._broken(error) from error

    def _broken(self, error: Exception) -> BackendError:
        if isinstance(error, TimeoutError):  # aiohttp's timeouts are ClientErrors, too
            return BackendTimeout(self._backend, "the response stopped coming")
        return BackendInterrupted(self._backend, f"the response broke off: {error}")

    async def close(self) -> None:
        over, self._over = self._over, _nothing
        over()
        if self._response.content.at_eof():
            self._response.release()
        else:
            self._response.close()  # a half-read response: the upstream sees a hang-up and can stop computing


def _nothing() -> None: ...


class Upstream:
    """A backend that is reached over HTTP. `base` ends with the version path, like `https://api.openai.com/v1`."""

    def __init__(
        self,
        name: str,
        kind: str,
        base: str,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        identity: str = "",
        prompt_cache: PromptCacheStyle = "none",
        asks_for_usage: bool = False,
        tls: ssl.SSLContext | None = None,
        socket: Path | None = None,
        connect_timeout: float = 5.0,
        idle_timeout: float = 600.0,
        starting: Callable[[], str | None] = lambda: None,
    ) -> None:
        """`headers` are sent where the client sends none of that name."""
        self.name, self.kind, self.prompt_cache = name, kind, prompt_cache
        self.identity, self.asks_for_usage = identity or base, asks_for_usage
        self.in_flight = 0
        self._tls = tls
        self._headers = dict(headers or {})
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
            connector = aiohttp.TCPConnector(
                limit=0, ttl_dns_cache=60, keepalive_timeout=KEEP_ALIVE, ssl=self._tls or True
            )
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

    def places(self, affinity: bytes) -> tuple[Upstream]:
        return (self,)

    async def ready(self) -> str:
        return self._starting() or ""

    async def open(self, call: Call) -> UpstreamReply:
        if self._session is None:
            raise BackendUnreachable(self.name, "not started")
        # aiohttp writes header text as UTF-8, and ASGI hands bytes over as latin-1.
        headers = {
            name: value.encode("latin-1").decode("utf-8", "surrogateescape") for name, value in call.headers.items()
        }
        # The copy for the cache and the ledger is read in passing, so the body must not be compressed.
        headers["accept-encoding"] = "identity"
        headers = {**self._headers, **headers}
        if self._key is not None:
            if self.kind == "anthropic":
                headers["x-api-key"] = self._key
            if self.kind != "anthropic" or call.path == "/chat/completions":  # its OpenAI-compatible path
                headers["authorization"] = f"Bearer {self._key}"
        address = f"{self._base}{call.path}" + (f"?{call.query}" if call.query else "")
        self.in_flight += 1
        try:
            response = await self._send(call, URL(address, encoded=True), headers)
        except BaseException:
            self._done()
            raise
        return UpstreamReply(self.name, response, self._done)

    def _done(self) -> None:
        self.in_flight -= 1

    async def _send(self, call: Call, address: URL, headers: dict[str, str]) -> aiohttp.ClientResponse:
        assert self._session is not None
        try:
            return await self._session.request(
                call.method, address, data=call.body or None, headers=headers, allow_redirects=False
            )
        except TimeoutError as error:
            connected = not isinstance(error, aiohttp.ConnectionTimeoutError)
            why = f"no answer in time ({type(error).__name__})"
            raise BackendTimeout(self.name, why, connected=connected) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = self._starting()
            if reason is not None:
                raise BackendStarting(self.name, reason or "starting", retry_after=2.0) from error
            raise BackendUnreachable(self.name, str(error) or type(error).__name__) from error

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
