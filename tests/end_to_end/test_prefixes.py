"""Prefixes as an operator handles them: templates are warm at the start, after a purge and after a reload."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Gateway, eventually

SYSTEM = "You are a careful assistant who answers in one short sentence and never guesses. " * 12
CONFIG = """
backends:
  local: {{kind: engine, model: {model}, kv: {{device: 256MiB, disk: {{path: kv, size: 1GiB}}}}}}
models:
  m: {{try: [local]}}
templates:
  support: {{system_file: support.txt, normalise: [trim, newlines]}}
"""


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("prefixes")
    (folder / "support.txt").write_text(SYSTEM)
    gateway = Gateway(folder, CONFIG.format(model=model_folder))
    assert eventually(lambda: report(gateway)["prompt_tokens"] >= 0 and "template support on local" in gateway.log, 30)
    yield gateway
    assert gateway.stop() == 0


def report(gateway: Gateway) -> dict[str, Any]:
    return gateway.client.get("/admin/prefix").json()["local"] or {"prompt_tokens": -1}


def cached(gateway: Gateway, question: str, **headers: str) -> tuple[int, dict[str, int]]:
    reply = gateway.chat(question, {"cache-control": "no-cache, no-store", **headers}, max_tokens=2, temperature=0)
    reply.raise_for_status()
    details = reply.json()["usage"]["prompt_tokens_details"]
    return details["cached_tokens"], details["cached_by_tier"]


def hitherto(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_the_first_question_behind_a_template_is_a_hit(gateway: Gateway) -> None:
    tokens, tiers = cached(gateway, "What is the capital of France?", **{"x-hitherto-template": "support"})
    assert tokens > 150 and tiers == {"device": tokens}


def test_a_client_with_its_own_copy_of_the_template_finds_the_same_prefix(gateway: Gateway) -> None:
    copy = "\r\n  " + SYSTEM  # differs at its very beginning: as it is, nothing of it would be found
    messages = [{"role": "system", "content": copy}, {"role": "user", "content": "Name a fruit."}]
    reply = gateway.chat(messages, {"cache-control": "no-cache, no-store"}, max_tokens=2)
    assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 150


def test_hot_prefixes_are_told(gateway: Gateway) -> None:
    for number in range(3):
        cached(gateway, f"What is {number} and one?", **{"x-hitherto-template": "support"})
    hot = report(gateway)["hot"]
    assert hot[0]["times"] >= 3 and hot[0]["saved_tokens"] == hot[0]["times"] * hot[0]["tokens"]
    out = hitherto("doctor", "--url", gateway.url)
    assert out.returncode == 0 and "tokens saved" in out.stdout and "never guesses" in out.stdout


def test_warm_brings_templates_back_after_a_purge(gateway: Gateway) -> None:
    gateway.client.post("/admin/kv/purge").raise_for_status()
    first = hitherto("warm", "--url", gateway.url)
    assert first.returncode == 0 and "support on local" in first.stdout, first.stderr
    assert int(first.stdout.split()[5]) > 150, "computed anew"
    again = hitherto("warm", "--url", gateway.url)
    assert int(again.stdout.split()[5]) <= 16, "nothing but the last block"
    assert cached(gateway, "Name a bird.", **{"x-hitherto-template": "support"})[0] > 150


def test_a_reload_forgets_kv_in_every_tier_and_warms_again(gateway: Gateway) -> None:
    question = {"x-hitherto-template": "support"}
    long = "Is the earth round? " * 20
    cached(gateway, long, **question)
    assert gateway.chat("What is two plus two?", temperature=0).headers["x-hitherto-cache"] == "miss"
    assert gateway.chat("What is two plus two?", temperature=0).headers["x-hitherto-cache"] == "exact"
    gateway.client.post("/admin/kv/purge").raise_for_status()
    cached(gateway, long, **question)
    assert eventually(lambda: gateway.metric("hitherto_kv_bytes", tier="disk") > 250 * 23_000), "all of it is on disk"
    logged = gateway.log.count("template support on local")
    assert gateway.client.post("/admin/engines/local/reload").status_code == 202
    assert eventually(lambda: gateway.log.count("template support on local") > logged, 60)
    tokens, tiers = cached(gateway, long, **question)
    assert 150 < tokens < 250 and set(tiers) == {"device"}, "the question's own blocks on disk are of before"
    again = gateway.chat("What is two plus two?", temperature=0)
    assert again.headers["x-hitherto-cache"] == "miss", "the old model's answers are not the new one's"


def test_an_engine_that_does_not_exist_is_named(gateway: Gateway) -> None:
    reply = gateway.client.post("/admin/engines/nope/reload")
    assert reply.status_code == 404 and "known: local" in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/v1/kv/purge", "/v1/admin/reload", "/v1/%2e%2e/admin/reload", "/v1/..%2fadmin/reload"]
)
def test_clients_do_not_reach_what_is_for_operators(gateway: Gateway, path: str) -> None:
    before = gateway.log.count("loading SmolLM2")
    assert gateway.client.post(path, json={}).status_code in (400, 404)
    assert report(gateway)["prompt_tokens"] > 0 and gateway.log.count("loading SmolLM2") == before


def test_a_web_page_is_no_operator(gateway: Gateway) -> None:
    for headers in ({"origin": "http://evil.example"}, {"sec-fetch-site": "cross-site"}):
        assert gateway.client.post("/admin/kv/purge", headers=headers).status_code == 403


def test_hitherto_warm_and_doctor_say_so_when_nobody_answers() -> None:
    for command in ("warm", "doctor"):
        out = hitherto(command, "--url", "http://127.0.0.1:9")
        assert out.returncode == 2 and "no gateway answers at http://127.0.0.1:9" in out.stderr
