"""Several gateway processes: one engine, shared answers, keys by the name of a variable."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually
from tests.servers import RedisServer


def test_workers_share_answers_and_know_their_backends_key(
    tmp_path: Path, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_BACKEND_KEY", "sk-very-secret")
    config = f"""
backends: {{up: {{kind: openai, url: "{fake.url}", key: "env:SOME_BACKEND_KEY"}}}}
models: {{m: {{try: [up]}}}}
cache: {{semantic: {{threshold: 0.9, deadline: 5s, audit: 0}}}}
"""
    gateway = Gateway(tmp_path, config, "--workers", "2")
    fake.app.script = Script(text="Paris")

    def ask(question: str) -> str:
        with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as client:  # a new connection, any worker
            body = {"model": "m", "messages": [{"role": "user", "content": question}]}
            reply = client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer of-the-client"})
            assert reply.status_code == 200
            return reply.headers["x-hitherto-cache"]

    assert ask("What is the capital of France?") == "miss"
    seen = fake.app.seen[-1]
    assert seen.headers["authorization"] == "Bearer sk-very-secret" and "cookie" not in seen.headers
    assert eventually(lambda: [ask("What is the capital of France?") for _ in range(12)] == ["exact"] * 12, 10)
    assert eventually(lambda: [ask("Tell me the capital of France") for _ in range(12)] == ["semantic"] * 12, 10)
    children = Path(f"/proc/{gateway.process.pid}/task/{gateway.process.pid}/children").read_text().split()
    for pid in [str(gateway.process.pid), *children]:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        settings = re.search(rb"HITHERTO_SETTINGS=([^\0]*)", environment)
        assert settings is None or b"sk-very-secret" not in settings[1]
    assert "sk-very-secret" not in gateway.log
    gateway.stop()


def test_identical_requests_to_several_workers_make_one_upstream_call(tmp_path: Path, fake: FakeServer) -> None:
    config = f"""
backends: {{up: {{kind: openai, url: "{fake.url}"}}}}
models: {{m: {{try: [up]}}}}
cache: {{semantic: {{deadline: 5s, audit: 0}}}}
"""
    gateway = Gateway(tmp_path, config, "--workers", "2")
    fake.app.script = Script(text="once", delay=1.0)

    def ask(stream: bool) -> str:
        with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as client:  # a new connection, any worker
            body = {"model": "m", "messages": [{"role": "user", "content": "shared?"}], "stream": stream}
            return client.post("/v1/chat/completions", json=body, headers={"authorization": "Bearer k"}).text

    with ThreadPoolExecutor(24) as pool:
        texts = list(pool.map(ask, [False] * 24))
    assert len(fake.app.seen) == 1 and all('"once"' in text for text in texts)
    assert ask(True).endswith("data: [DONE]\n\n") and len(fake.app.seen) <= 2

    # An answer that may not be kept is each worker's own, one after the other.
    fake.app.script = Script(text="cut", finish="length", delay=0.3)
    fake.app.seen.clear()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: gateway.chat("cut?", {"authorization": "Bearer k"}), range(8)))
    assert 1 <= len(fake.app.seen) <= 8

    # What one worker purges all have forgotten.
    only = {"authorization": "Bearer k", "cache-control": "only-if-cached"}

    def has() -> set[int]:
        found = set()
        for _ in range(12):
            with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as client:
                body = {"model": "m", "messages": [{"role": "user", "content": "shared?"}]}
                found.add(client.post("/v1/chat/completions", json=body, headers=only).status_code)
        return found

    assert eventually(lambda: has() == {200}, 10)
    assert gateway.client.post("/admin/cache/purge", json={"all": True}).json()["entries"] >= 1
    assert eventually(lambda: has() == {504}, 10)
    # Nor does a flight of before live on in any of them.
    fake.app.script = Script(text="anew")
    assert all('"anew"' in ask(False) for _ in range(12)) and ask(True).endswith("data: [DONE]\n\n")
    gateway.stop()


def test_several_workers_in_front_of_one_upstream_keep_credentials_apart(tmp_path: Path, fake: FakeServer) -> None:
    gateway = Gateway(tmp_path, None, "--upstream", fake.url, "--workers", "2")

    def ask(key: str, **headers: str) -> int:
        with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as client:  # a new connection, any worker
            body = {"model": "m", "messages": [{"role": "user", "content": "mine"}]}
            headers = {"authorization": f"Bearer {key}", **headers}
            return client.post("/v1/chat/completions", json=body, headers=headers).status_code

    assert ask("a") == 200 and fake.app.seen[0].headers["authorization"] == "Bearer a"
    only = {"cache-control": "only-if-cached"}
    assert eventually(lambda: [ask("a", **only) for _ in range(12)] == [200] * 12)
    assert {ask("b", **only) for _ in range(12)} == {504} and len(fake.app.seen) == 1
    gateway.stop()


def test_two_workers_run_one_engine(tmp_path: Path, model_folder: Path) -> None:
    config = f"""
backends: {{local: {{kind: engine, model: {model_folder}, kv: {{device: 256MiB}}}}}}
models: {{m: {{try: [local]}}}}
cache: {{semantic: false}}
"""
    gateway = Gateway(tmp_path, config, "--workers", "2")
    assert gateway.chat("Hello", max_tokens=3).status_code == 200
    commands = {each: " ".join(each.info["cmdline"] or []) for each in psutil.process_iter(["cmdline"])}
    engines = [each for each, line in commands.items() if str(tmp_path) in line and "backends.engine" in line]
    assert len(engines) == 1
    gateway.stop()
    assert eventually(lambda: not engines[0].is_running(), 40)


def test_replicas_share_answers_flights_and_purges_through_redis(tmp_path: Path, fake: FakeServer) -> None:
    with RedisServer(tmp_path) as redis:
        config = f"""
store: "{redis.url}"
backends: {{up: {{kind: openai, url: "{fake.url}"}}}}
models: {{m: {{try: [up]}}}}
cache: {{semantic: {{deadline: 5s, audit: 0}}}}
"""
        one, other = (Gateway(tmp_path / name, config) for name in ("one", "other"))
        fake.app.script = Script(text="Paris", delay=0.5)
        with ThreadPoolExecutor(8) as pool:
            asked = [pool.submit(gateway.chat, "What is the capital of France?") for gateway in (one, other) * 4]
            assert {each.result().json()["choices"][0]["message"]["content"] for each in asked} == {"Paris"}
        assert len(fake.app.seen) == 1, "one upstream call for both"
        for gateway in (one, other):
            assert eventually(
                lambda g=gateway: g.chat("Tell me the capital of France").headers["x-hitherto-cache"] == "semantic"
            )
        reported = {"entry": other.chat("What is the capital of France?").headers["x-hitherto-entry"]}
        assert other.client.post("/admin/cache/feedback", json=reported).json()["removed"]
        only = {"cache-control": "only-if-cached"}
        assert eventually(
            lambda: one.chat("What is the capital of France?", only).headers.get("x-hitherto-cache") != "exact"
        )
        one.chat("kept over a restart")
        assert eventually(lambda: other.chat("kept over a restart", only).headers.get("x-hitherto-cache") == "exact")
        one.stop()
        one = Gateway(tmp_path / "one", config)
        assert one.chat("kept over a restart", only).headers["x-hitherto-cache"] == "exact"
    # Redis is gone: nobody notices but the counter.
    assert one.chat("after Redis").headers["x-hitherto-cache"] == "miss"
    assert one.chat("after Redis").headers["x-hitherto-cache"] == "exact"
    assert eventually(lambda: one.metric("hitherto_faults_total", part="store") > 0)
    one.stop(), other.stop()
