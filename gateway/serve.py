"""Running the application under uvicorn: one process or several, what is printed at the start, and how it ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from gateway import logs
from gateway.app import Application, create_app
from gateway.config import Settings
from gateway.settings_file import ConfigError

DRAIN_SECONDS = 30
# How the parent hands its settings to worker processes. Secrets are in there by the name of their variable only.
_SETTINGS, _TRANSPARENT, _ACCESS_LOG = "HITHERTO_SETTINGS", "HITHERTO_TRANSPARENT", "HITHERTO_ACCESS_LOG"
_PROCESSES = "HITHERTO_PROCESSES"


def run(settings: Settings, workers: int, access_log: bool) -> None:
    """Serve until a signal comes; then answer what is under way (30 s at most) and end."""
    listener = _bind(settings)
    port = listener.getsockname()[1]
    options: dict[str, Any] = {
        "log_level": "warning",
        "access_log": False,
        "timeout_graceful_shutdown": DRAIN_SECONDS,
        "timeout_keep_alive": 75,
        "server_header": False,
        "lifespan": "on",
        **_protocol(settings),
        **_tls(settings),
    }
    logs.setup(access_log)
    _collect_garbage_rarely()
    if workers == 1:
        server = _Server(uvicorn.Config(create_app(settings), **options))
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop where there is one
            runner.run(_serve(server, listener, settings, port))
        return
    from uvicorn.supervisors import Multiprocess

    settings.data.mkdir(parents=True, exist_ok=True, mode=0o700)
    handed = settings.data / f"settings-{os.getpid()}.json"  # an environment variable holds 128 KiB at most
    handed.touch(mode=0o600)
    handed.write_text(settings.model_dump_json(by_alias=True))
    os.environ[_SETTINGS] = str(handed)
    os.environ[_TRANSPARENT] = settings.transparent or ""
    os.environ[_ACCESS_LOG] = "1" if access_log else ""
    os.environ[_PROCESSES] = str(workers)
    configuration = uvicorn.Config("gateway.serve:worker", factory=True, workers=workers, **options)
    greeting = threading.Thread(target=lambda: asyncio.run(_greet(settings, _url(settings, port))), daemon=True)
    greeting.start()
    try:
        Multiprocess(configuration, [listener]).run()
    finally:
        handed.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """uvicorn's server, but a stop that was asked for ends with code 0 instead of the signal's."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def worker() -> Application:
    """The application of one of several worker processes."""
    logs.setup(bool(os.environ[_ACCESS_LOG]))
    _collect_garbage_rarely()
    settings = Settings.model_validate_json(Path(os.environ[_SETTINGS]).read_text())
    _protocol(settings)  # its limits are this process' own
    transparent = os.environ[_TRANSPARENT] or None
    return create_app(settings.model_copy(update={"transparent": transparent}), int(os.environ[_PROCESSES]))


def _protocol(settings: Settings) -> dict[str, Any]:
    try:
        from gateway.connection import bounded  # needs httptools
    except ImportError:
        return {"limit_concurrency": settings.clients.connections}
    return {"http": bounded(settings.clients)}


def _tls(settings: Settings) -> dict[str, Any]:
    """uvicorn's options for HTTPS. Raises `ConfigError`."""
    tls = settings.tls
    if tls is None:
        return {}
    for name, path in (("cert", tls.cert), ("key", tls.key), ("client_ca", tls.client_ca)):
        if path is not None and not path.expanduser().is_file():
            raise ConfigError(f"tls.{name}: {path} is not there")
    options: dict[str, Any] = {"ssl_certfile": tls.cert.expanduser(), "ssl_keyfile": tls.key.expanduser()}
    if tls.client_ca is not None:
        options |= {"ssl_ca_certs": str(tls.client_ca.expanduser()), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def _collect_garbage_rarely() -> None:
    """A full collection walks every stored answer's facts: 100 ms and more, for everybody. What is made per request is
    freed by reference counts."""
    gc.set_threshold(50_000, 20, 50)


def _bind(settings: Settings) -> socket.socket:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Accepted connections inherit it. Without it every response waits 40 ms for a delayed ACK, and the event loop sets
    # it by itself only on sockets that it made.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        listener.bind((settings.host, settings.port))
    except OSError as error:
        raise ConfigError(f"cannot listen on {settings.listen}: {error.strerror}") from error
    listener.listen(2048)
    listener.set_inheritable(True)
    return listener


async def _serve(server: uvicorn.Server, listener: socket.socket, settings: Settings, port: int) -> None:
    greeting = asyncio.create_task(_greet(settings, _url(settings, port)))
    try:
        await server.serve(sockets=[listener])
    finally:
        greeting.cancel()


def _url(settings: Settings, port: int) -> str:
    host, scheme = settings.host, "https" if settings.tls is not None else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


async def _greet(settings: Settings, url: str) -> None:
    """Say where we are as soon as a backend can answer, with a line to try."""
    started = time.monotonic()
    print(f"hitherto: starting on {url} …", file=sys.stderr, flush=True)
    # It is ourselves whom we ask, by an address that the certificate need not name.
    async with httpx.AsyncClient(trust_env=False, verify=False) as client:
        while settings.tls is None or settings.tls.client_ca is None:  # else we cannot ask ourselves
            try:
                if (await client.get(f"{url}/ready")).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.1)
    model = next((name for name in settings.models if "*" not in name), "MODEL")
    key = ' -H "Authorization: Bearer $OPENAI_API_KEY"' if settings.transparent else ""
    question = '[{"role": "user", "content": "What is the capital of France?"}]'
    print(
        f"""
hitherto is ready after {time.monotonic() - started:.1f} s
  base URL    {url}/v1
  metrics     {url}/metrics
  dashboard   {url}/dashboard
  try         curl -i {url}/v1/chat/completions -H 'content-type: application/json'{key} \\
                -d '{{"model": "{model}", "temperature": 0, "messages": {question}}}'
""",
        file=sys.stderr,
        flush=True,
    )
