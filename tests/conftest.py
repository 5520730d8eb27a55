"""Real parts for the tests: the real model, real servers, real processes."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import hypothesis
import pytest

os.environ.setdefault("GOMP_SPINCOUNT", "2500")  # as the engine process does; read by OpenMP when torch is loaded

from backends.engine.models import resolve
from backends.fake import FakeServer, Script
from gateway.config import DEFAULT_MODEL, Settings

ROOT = Path(__file__).parents[1]
READY = "hitherto is ready"
hypothesis.settings.register_profile(
    "unhurried", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("unhurried")  # a machine that stalls is no fault of what is tested


@pytest.fixture(scope="session")
def model_folder() -> Path:
    """SmolLM2-135M-Instruct, converted; the same folder that `make serve` uses."""
    return resolve(DEFAULT_MODEL, Settings().data, print)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


def tenant_file(folder: Path, tenant: str, key: str, more: str = "") -> None:
    """A tenant's file in `folder/tenants`, with one key."""
    (folder / "tenants").mkdir(exist_ok=True)
    digest = hashlib.sha256(key.encode()).hexdigest()
    (folder / "tenants" / f"{tenant}.yaml").write_text(f'tenant: {tenant}\nkeys: ["sha256:{digest}"]\n{more}\n')


class Gateway:
    """`hitherto serve` as a process of its own."""

    def __init__(self, folder: Path, config: str | None, *arguments: str, says: str = READY) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.log_path = folder / "log"
        command = [sys.executable, "-m", "gateway.cli", "serve", "--port", "0", *arguments]
        command += ["--data", str(folder / "data")]
        if config is not None:
            path = folder / "hitherto.yaml"
            path.write_text(config)
            command += ["--config", str(path)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(command, stderr=log, stdout=log, cwd=folder, env=environment)
        self.url = self._wait(says)
        self.client = httpx.Client(base_url=self.url, timeout=120, trust_env=False)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def _wait(self, says: str, seconds: float = 120.0) -> str:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise RuntimeError(f"the gateway ended with code {self.process.returncode}:\n{self.log}")
            starting = [line.split()[3] for line in self.log.splitlines() if "starting on http" in line]
            if starting and says in self.log:
                return starting[0]
            time.sleep(0.05)
        self.process.kill()
        self.process.wait()
        raise TimeoutError(f"the gateway has not said {says!r} within {seconds} s:\n{self.log}")

    def looked_up(self) -> float:
        """How many questions it has looked up in its cache so far; each then joins what is under way at once."""
        return self.metric("hitherto_answer_lookups_total")

    def chat(
        self, content: object = "Hello", headers: dict[str, str] | None = None, **fields: object
    ) -> httpx.Response:
        """Ask a question; `content` may also be a list of messages."""
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        body = {"model": "m", "messages": messages, **fields}
        return self.client.post("/v1/chat/completions", json=body, headers=headers or {})

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a series over all labels that are not given."""
        total = 0.0
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith((f"{name}{{", f"{name} ")) and all(
                f'{key}="{value}"' in line for key, value in labels.items()
            ):
                total += float(line.rsplit(" ", 1)[1])
        return total

    def stop(self, sig: signal.Signals = signal.SIGTERM, wait: float = 40.0) -> int:
        if self.process.poll() is None:
            self.process.send_signal(sig)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(wait)
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
            raise TimeoutError(f"the gateway did not end:\n{self.log}")
        self.client.close()
        return self.process.returncode


def eventually(condition: object, seconds: float = 10.0) -> bool:
    """Whether a condition comes true within some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.02)
    return bool(condition())  # type: ignore[operator]


async def comes(condition: object, seconds: float = 20.0) -> bool:
    """`eventually`, while the loop goes on."""
    return await asyncio.to_thread(eventually, condition, seconds)


def held(**fields: Any) -> tuple[Script, threading.Event]:
    """A script whose heads wait until the event is set, so that what must be under way at once is, on any machine."""
    go = threading.Event()
    return Script(until=go.is_set, **fields), go
