"""Several gateway processes: one engine, shared answers, keys by the name of a variable."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually


def test_workers_share_answers_and_know_their_backends_key(
    tmp_path: Path, fake: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_BACKEND_KEY", "sk-very-secret")
    config = f"""
backends: {{up: {{kind: openai, url: "{fake.url}", key: "env:SOME_BACKEND_KEY"}}}}
models: {{m: {{try: [up]}}}}
cache: {{semantic: {{threshold: 0.9, deadline: 5s}}}}
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


def test_two_workers_run_one_engine(tmp_path: Path, model_folder: Path) -> None:
    config = f"""
backends: {{local: {{kind: engine, model: {model_folder}, kv: {{device: 256MiB}}}}}}
models: {{m: {{try: [local]}}}}
cache: {{semantic: false}}
"""
    gateway = Gateway(tmp_path, config, "--workers", "2")
    assert gateway.chat("Hello", max_tokens=3).status_code == 200
    engines = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if str(tmp_path).encode() in path.read_bytes() and b"backends.engine" in path.read_bytes()
    ]
    assert len(engines) == 1
    gateway.stop()
    assert eventually(lambda: not engines[0].exists(), 40)
