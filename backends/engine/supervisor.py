"""Starts the engine process, watches it, and starts it again when it ends. No torch here.

Several gateway workers share one engine: the one that holds the lock file supervises, the others only look.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import sys
import time
from pathlib import Path

from backends.engine.config import EngineConfig

log = logging.getLogger("hitherto.engine")

BACKOFF = (0.2, 1.0, 3.0, 10.0, 30.0)
"""Seconds before the 1st, 2nd … restart in a row; a minute of good health starts over."""


class Supervisor:
    """One engine process, reachable at `socket`."""

    def __init__(self, name: str, config: EngineConfig, data: Path) -> None:
        self.name, self.config, self.data = name, config, data
        run = data / "run"
        run.mkdir(parents=True, exist_ok=True)
        # Unix socket paths are limited to some 100 bytes, so a long data folder must not make the name longer.
        self.socket = run / f"{name}.sock"
        if len(str(self.socket).encode()) > 100:
            digest = hashlib.sha256(str(self.socket).encode()).hexdigest()[:16]
            self.socket = Path(f"/tmp/hitherto-{os.getuid()}-{digest}.sock")
        self._lock_path = run / f"{name}.lock"
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.failure = ""
        """Why the last start failed; empty while it runs."""
        self.restarts = 0

    def start(self) -> None:
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")

    async def stop(self) -> None:
        """End the process (it finishes what it is computing, 30 s at most) and stop watching."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), 35)
            except TimeoutError:
                process.kill()
                await process.wait()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None and self._process.returncode is None else None

    async def _supervise(self) -> None:
        with self._lock_path.open("w") as lock:
            while not _try_lock(lock.fileno()):  # noqa: ASYNC110 — a file lock has no event to wait for
                await asyncio.sleep(1.0)  # another worker supervises; take over if it ends
            failures = 0
            while True:
                started = time.monotonic()
                code = await self._run_once()
                self.restarts += 1
                failures = 1 if time.monotonic() - started > 60 else failures + 1
                pause = BACKOFF[min(failures, len(BACKOFF)) - 1]
                self.failure = f"the engine process ended with code {code}; next start in {pause:g} s"
                log.error("engine %s: ended with code %s, restarting in %g s", self.name, code, pause)
                await asyncio.sleep(pause)

    async def _run_once(self) -> int:
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        arguments = ["--name", self.name, "--data", str(self.data), "--listen", f"unix:{self.socket}"]
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "backends.engine",
            *arguments,
            "--config",
            self.config.model_dump_json(),
            "--with-parent",
            stdin=asyncio.subprocess.PIPE,
        )
        self.failure = ""
        return await self._process.wait()


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
