"""Every series of the contract is there, has its labels, and moves when what it counts happens."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import httpx
import pytest

from backends.fake import FakeServer, Script
from gateway.config import DEFAULT_MODEL
from tests.conftest import Gateway, eventually, held

CONFIG = """
tenants: tenants
cache: {{ttl: 1h, semantic: {{deadline: 5s, audit: 0}}}}
backends:
  local: {{kind: engine, model: "{model}", dtype: float32, kv: {{device: 52MiB, disk: {{path: kv, size: 1GiB}}}}}}
  up: {{kind: openai, url: "{url}"}}
  dead: {{kind: openai, url: "http://127.0.0.1:9/v1"}}
models:
  engine: {{try: [local]}}
  m: {{try: [up]}}
  slow: {{try: [up, {{backend: up, model: m}}], hedge: {{after: 30ms, extra: 1.0}}}}
  dead: {{try: [dead]}}
prices:
  m: {{input: 10 USD/M, cached: 1 USD/M, output: 100 USD/M}}
"""
LONG = "You are a helpful assistant. " * 60


@pytest.fixture(scope="module")
def gateway(upstream: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("metrics")
    (folder / "tenants").mkdir()
    # "hunter2" as a key
    digest = "f52fbd32b2b3b86ff88ef6c490628285f482af15ddcb29541f94bcf526a3f6c7"
    (folder / "tenants" / "acme.yaml").write_text(f'tenant: acme\nkeys: ["sha256:{digest}"]\n')
    server = Gateway(folder, CONFIG.format(url=upstream.url, model=DEFAULT_MODEL))
    yield server
    server.stop()


def series(gateway: Gateway) -> dict[str, float]:
    found = {}
    for line in gateway.client.get("/metrics").text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found


def summed(found: dict[str, float], name: str, labels: str) -> float:
    wanted = re.compile(rf"{name}(\{{.*\}})?$")
    pairs = re.findall(r'(\w+)="([^"]*)"', labels)
    return sum(
        value
        for key, value in found.items()
        if wanted.match(key) and all(re.search(rf'[{{,]{label}="{text}"', key) for label, text in pairs)
    )


MOVED = [
    ("hitherto_requests_total", 'tenant="acme",surface="openai-chat",model="m",backend="up",cache="miss",status="200"'),
    ("hitherto_requests_total", 'cache="exact"'),
    ("hitherto_requests_total", 'cache="semantic"'),
    ("hitherto_request_seconds_count", 'cache="miss"'),
    ("hitherto_ttft_seconds_count", 'cache="exact",prefix="miss"'),
    ("hitherto_ttft_seconds_count", 'cache="miss",prefix="hit"'),
    ("hitherto_overhead_seconds_count", ""),
    ("hitherto_answer_lookups_total", 'tier="exact",result="hit"'),
    ("hitherto_answer_lookups_total", 'tier="semantic",result="hit"'),
    ("hitherto_answer_lookups_total", 'result="miss",reason="first-in-scope"'),
    ("hitherto_answer_writes_total", 'result="stored"'),
    ("hitherto_answer_writes_total", 'result="skipped",reason="status-500"'),
    ("hitherto_answer_entries", ""),
    ("hitherto_answer_bytes", ""),
    ("hitherto_flights_total", 'role="leader"'),
    ("hitherto_flights_total", 'role="follower"'),
    ("hitherto_prefix_tokens_total", 'source="computed"'),
    ("hitherto_prefix_tokens_total", 'source="upstream"'),
    ("hitherto_prefix_tokens_total", 'source="device"'),
    ("hitherto_kv_bytes", 'tier="device"'),
    ("hitherto_kv_bytes", 'tier="disk"'),
    ("hitherto_kv_evictions_total", 'tier="device"'),
    ("hitherto_tokens_total", 'tenant="acme",model="m",kind="prompt"'),
    ("hitherto_tokens_total", 'model="m",kind="completion"'),
    ("hitherto_tokens_total", 'model="m",kind="cached"'),
    ("hitherto_tokens_total", 'model="m",kind="avoided"'),
    ("hitherto_cost_usd_total", 'tenant="acme",model="m"'),
    ("hitherto_saved_usd_total", 'tenant="acme",model="m",by="exact"'),
    ("hitherto_saved_usd_total", 'model="m",by="semantic"'),
    ("hitherto_saved_usd_total", 'model="m",by="prefix"'),
    ("hitherto_breaker_state", 'backend="dead"'),
    ("hitherto_tries_failed_total", 'backend="dead",kind="unreachable"'),
    ("hitherto_hedges_total", 'result="sent"'),
    ("hitherto_config_reload_failed", ""),
]
THERE = [
    *{name for name, _ in MOVED},
    "hitherto_faults_total",
    "hitherto_kv_checks_total",
    "hitherto_answer_evictions_total",
]


@pytest.fixture(scope="module")
def told(gateway: Gateway, upstream: FakeServer) -> dict[str, float]:
    """The series after everything has happened once."""
    key = {"authorization": "Bearer hunter2"}
    upstream.app.script, upstream.app.scripts = Script(), []
    for _ in range(2):
        assert gateway.chat("How do I reset my password?", key, temperature=0).status_code == 200
    # The first question of a gateway is found by others once the encoder has been loaded.
    wordings = (f"how do i reset my password{'?' * number}" for number in count(2))
    assert eventually(
        lambda: gateway.chat(next(wordings), key, temperature=0).headers["x-hitherto-cache"] == "semantic"
    )
    upstream.app.scripts = [Script(status=500), Script(status=500)]
    gateway.chat("it fails", key, temperature=0)
    before = gateway.looked_up()
    slow, go = held()
    upstream.app.scripts = [slow]
    address = f"{gateway.url}/v1/chat/completions"
    body = {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": "together"}]}
    with httpx.Client(trust_env=False, timeout=30) as client, ThreadPoolExecutor(2) as pool:
        asking = [pool.submit(client.post, address, json=body, headers=key) for _ in range(2)]
        assert eventually(lambda: gateway.looked_up() >= before + 2)
        go.set()
        assert [each.result().status_code for each in asking] == [200, 200]
    upstream.app.scripts = [Script(delay=0.4)]
    gateway.chat("hedged", key, model="slow", temperature=0)
    for number in range(25):
        gateway.chat(f"nobody there {number}", key, model="dead", temperature=0)
    assert eventually(lambda: gateway.client.get("/ready").json()["backends"]["local"] == "ready", 120)
    for number in (0, 0, 1, 2, 3, 4, 0):  # more than the device holds
        messages = [
            {"role": "system", "content": f"{number} {LONG}"},
            {"role": "user", "content": f"Say {time.time()}"},
        ]
        assert gateway.chat(messages, key, model="engine", temperature=0, max_tokens=2).status_code == 200
        time.sleep(0.2)
    Path(gateway.folder / "tenants" / "broken.yaml").write_text("tenant: [")
    assert eventually(lambda: series(gateway)["hitherto_config_reload_failed"] == 1)
    return series(gateway)


@pytest.mark.parametrize(("name", "labels"), MOVED, ids=lambda value: str(value))
def test_it_moves(told: dict[str, float], name: str, labels: str) -> None:
    assert summed(told, name, labels) > 0, [key for key in told if key.startswith(name)]


@pytest.mark.parametrize("name", sorted(THERE))
def test_it_is_there(gateway: Gateway, name: str) -> None:
    text = gateway.client.get("/metrics").text
    assert f"# HELP {re.sub('_(count|total)$', '', name)}" in text or f"# HELP {name}" in text
