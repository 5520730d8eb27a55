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
import stat
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
        # Named for the settings too: two gateways that share a data folder share an engine only if it is the same one.
        digest = hashlib.sha256(f"{data.resolve()} {config.model_dump_json()}".encode()).hexdigest()[:12]
        self._folder = data / "run"
        self.socket = self._folder / f"{name}-{digest}.sock"
        if len(str(self.socket).encode()) > 100:  # the system's limit for a unix socket's path is 107 bytes
            self._folder = Path(f"/tmp/hitherto-{os.getuid()}")
            self.socket = self._folder / f"{digest}.sock"
        self._task: asyncio.Task[None] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self.failure = ""
        """Why the last start failed; empty while it runs."""

    def start(self) -> None:
        _private_folder(self._folder)
        self._lock = self.socket.with_suffix(".lock").open("w")
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")

    async def stop(self) -> None:
        """Stop watching and end the process; it finishes what it is computing, 30 s at most."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def _supervise(self) -> None:
        with self._lock as lock:
            while not _try_lock(lock.fileno()):  # noqa: ASYNC110 — a file lock has no event to wait for
                await asyncio.sleep(1.0)  # another worker supervises; take over if it ends
            try:
                await self._keep_running()
            finally:
                await self._end_process()  # before the lock goes: its successor must find no engine running

    async def _keep_running(self) -> None:
        failures = 0
        while True:
            started = time.monotonic()
            try:
                ended = f"the engine process ended with code {await self._run_once()}"
            except OSError as error:
                ended = f"the engine process could not be started: {error}"
            failures = 1 if time.monotonic() - started > 60 else failures + 1
            pause = BACKOFF[min(failures, len(BACKOFF)) - 1]
            self.failure = f"{ended}; next start in {pause:g} s"
            log.error("engine %s: %s", self.name, self.failure)
            await asyncio.sleep(pause)

    async def _run_once(self) -> int:
        self.socket.unlink(missing_ok=True)
        arguments = ["--name", self.name, "--data", str(self.data), "--listen", f"unix:{self.socket}", "--with-parent"]
        self._process = await asyncio.create_subprocess_exec(
            # -P: modules of the folder we happen to be started in are not ours.
            *(sys.executable, "-P", "-m", "backends.engine", *arguments, "--config", self.config.model_dump_json()),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for the gateway, which then ends us in its own time
        )
        self.failure = ""
        return await self._process.wait()

    async def _end_process(self) -> None:
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 35)
        except TimeoutError:
            process.kill()
            await process.wait()


def _private_folder(folder: Path) -> None:
    """Make sure that only we can reach the socket. Raises OSError if somebody else owns the folder."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    facts = folder.lstat()
    if not stat.S_ISDIR(facts.st_mode) or facts.st_uid != os.getuid():
        raise PermissionError(f"{folder} is not a folder of our own")
    folder.chmod(0o700)


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
