"""What the gateway costs: requests/s and latency of pass-through and exact hits, against a bare relay and direct.

Needs `nginx` (the upstream, with a canned answer) and `wrk` (the load), both Debian packages. Everything is on loopback
and shares the machine, so only the ratios of one run mean anything; the contestants take turns, several rounds, and the
median counts.

    python -m benchmarks.overhead [--seconds 3] [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.table import conditions, show

ANSWER = (
    '{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"m","choices":[{"index":0,"message":'
    '{"role":"assistant","content":"The capital of France is Paris."},"logprobs":null,"finish_reason":"stop"}],'
    '"usage":{"prompt_tokens":37,"completion_tokens":8,"total_tokens":45}}'
)
NGINX = """
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 1024; }}
http {{
  access_log off; client_body_temp_path {folder}/b; proxy_temp_path {folder}/p; fastcgi_temp_path {folder}/f;
  uwsgi_temp_path {folder}/u; scgi_temp_path {folder}/s; keepalive_requests 10000000;
  server {{ listen 127.0.0.1:{port}; default_type application/json; location / {{ return 200 '{answer}'; }} }}
}}
"""
RELAY = """
import aiohttp, sys
from fastapi import FastAPI, Request, Response
app = FastAPI()
session = None
@app.post("/v1/chat/completions")
async def relay(request: Request):
    global session
    session = session or aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    body = await request.body()
    kind = {{"content-type": "application/json"}}
    async with session.post("{url}/v1/chat/completions", data=body, headers=kind) as r:
        return Response(await r.read(), r.status, media_type="application/json")
"""
LUA = """
local n = 0
local id = tostring(os.time()) .. tostring({{}}):sub(8)
request = function()
  n = n + 1
  local q = {unique} and ("What is number " .. id .. n .. " in words?") or "What is the capital of France?"
  local body = '{{"model":"m","temperature":0,"messages":[{{"role":"user","content":"' .. q .. '"}}]}}'
  return wrk.format("POST", "/v1/chat/completions", {{["content-type"] = "application/json"{extra}}}, body)
end
"""


@dataclass(frozen=True)
class Contestant:
    """Somebody to load: where, and with which kind of requests."""

    name: str
    url: str
    unique: bool = False
    extra: str = ""


@contextmanager
def process(*command: str, ready: str, cwd: Path | None = None) -> Iterator[None]:
    """A server that runs until the end of the block."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    running = subprocess.Popen(command, cwd=cwd, env=environment, stdout=subprocess.DEVNULL, stderr=None)
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                httpx.get(ready, timeout=1, trust_env=False)
                break
            except httpx.TransportError:
                if running.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{command[0]} did not start") from None
                time.sleep(0.1)
        yield
    finally:
        running.terminate()
        running.wait(40)


def load(contestant: Contestant, connections: int, seconds: int, folder: Path) -> tuple[float, float, float]:
    """(requests/s, p50 ms, p99 ms) of one turn."""
    script = folder / f"{contestant.unique}{bool(contestant.extra)}.lua"
    script.write_text(LUA.format(unique=str(contestant.unique).lower(), extra=contestant.extra))
    command = ["wrk", "-t1", f"-c{connections}", f"-d{seconds}s", "--latency", "-s", str(script), contestant.url]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if "Non-2xx" in output or "Socket errors" in output:
        raise RuntimeError(f"{contestant.name}: {output}")
    rate = float(re.search(r"Requests/sec:\s+([\d.]+)", output)[1])  # type: ignore[index]
    return rate, *(_milliseconds(output, percent) for percent in ("50%", "99%"))  # type: ignore[return-value]


def _milliseconds(output: str, percent: str) -> float:
    value, unit = re.search(rf"{percent}\s+([\d.]+)(us|ms|s)", output).groups()  # type: ignore[union-attr]
    return float(value) * {"us": 0.001, "ms": 1.0, "s": 1000.0}[unit]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    if missing := [
        tool for tool in ("nginx", "wrk") if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") is None
    ]:
        sys.exit(f"this benchmark needs {' and '.join(missing)}: apt-get install {' '.join(missing)}")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        nginx, relay, exact_only = 18400, 18401, 18402
        upstream = f"http://127.0.0.1:{nginx}"
        (folder / "nginx.conf").write_text(NGINX.format(folder=folder, port=nginx, answer=ANSWER))
        binary = shutil.which("nginx", path=f"{os.environ['PATH']}:/usr/sbin") or "nginx"
        stack.enter_context(process(binary, "-c", str(folder / "nginx.conf"), ready=upstream))
        (folder / "bare.py").write_text(RELAY.format(url=upstream))
        uvicorn = [sys.executable, "-m", "uvicorn", "--log-level", "warning", "--no-access-log", "--port", str(relay)]
        stack.enter_context(process(*uvicorn, "bare:app", ready=f"http://127.0.0.1:{relay}/", cwd=folder))
        (folder / "hitherto.yaml").write_text(
            f"data: {folder / 'data'}\nbackends: {{up: {{kind: openai, url: '{upstream}/v1'}}}}\n"
            "models: {m: {try: [up]}}\ncache: {semantic: false}\n"
        )
        serve = [sys.executable, "-m", "gateway.cli", "serve", "--config", str(folder / "hitherto.yaml"), "--port"]
        stack.enter_context(process(*serve, str(exact_only), ready=f"http://127.0.0.1:{exact_only}/health"))
        ours = f"http://127.0.0.1:{exact_only}"
        bypass = ', ["cache-control"] = "no-cache, no-store"'
        contestants = [
            Contestant("direct (nginx)", upstream),
            Contestant("bare relay (FastAPI + aiohttp)", f"http://127.0.0.1:{relay}"),
            Contestant("Hitherto: pass-through (bypass)", ours, extra=bypass),
            Contestant("Hitherto: miss, looked up and stored", ours, unique=True),
            Contestant("Hitherto: exact hit", ours),
        ]
        rows = []
        for connections in (1, 32):
            turns: dict[str, list[tuple[float, float, float]]] = {item.name: [] for item in contestants}
            for number in range(arguments.rounds + 1):
                for item in contestants:
                    result = load(item, connections, arguments.seconds, folder)
                    if number:  # the first round warms up
                        turns[item.name].append(result)
            median = {
                name: [statistics.median(column) for column in zip(*runs, strict=True)] for name, runs in turns.items()
            }
            bare = median["bare relay (FastAPI + aiohttp)"]
            for name, (rate, p50, p99) in median.items():
                rows.append([str(connections), name, f"{rate:,.0f}", f"{p50:.2f}", f"{p99:.2f}",
                             f"{rate / bare[0]:.2f}", f"{p50 / bare[1]:.2f}"])  # fmt: skip
    headings = ["connections", "contestant", "requests/s", "p50 ms", "p99 ms", "× rate of bare", "× p50 of bare"]
    show("Overhead", headings, rows, conditions(n=f"median of {arguments.rounds} turns of {arguments.seconds} s"))


if __name__ == "__main__":
    main()
