"""Which backend a request reaches, with two real upstreams."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway


@pytest.fixture(scope="module")
def upstreams() -> Iterator[tuple[FakeServer, FakeServer]]:
    with FakeServer() as first, FakeServer() as second:
        yield first, second


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstreams: tuple[FakeServer, FakeServer]) -> Iterator[Gateway]:
    first, second = upstreams
    config = f"""
backends:
  first: {{kind: openai, url: "{first.url}/v1"}}
  second: {{kind: openai, url: "{second.url}/v1"}}
models:
  a: {{try: [first]}}
  b: {{try: [{{backend: second, model: its-name-there}}]}}
  both: {{try: [first, second]}}
cache: {{semantic: false}}
"""
    gateway = Gateway(tmp_path_factory.mktemp("routing"), config)
    yield gateway
    assert gateway.stop() == 0


def test_what_only_computes_goes_to_where_its_model_runs(gateway: Gateway) -> None:
    for path in ("/v1/completions", "/v1/embeddings"):
        for model, backend in (("a", "first"), ("b", "second")):
            reply = gateway.client.post(path, json={"model": model, "prompt": "x", "input": "x"})
            assert reply.headers["x-hitherto-backend"] == backend


def test_a_model_that_nobody_routed_goes_nowhere(gateway: Gateway) -> None:
    reply = gateway.client.post("/v1/completions", json={"model": "typo", "prompt": "confidential"})
    assert reply.status_code == 404 and "'typo' does not exist here" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/audio/speech", "/v1/moderations"])
def test_what_names_a_configured_model_goes_to_where_it_runs(gateway: Gateway, path: str) -> None:
    assert gateway.client.post(path, json={"model": "b"}).headers["x-hitherto-backend"] == "second"
    assert gateway.client.post(path, json={"model": "another"}).headers["x-hitherto-backend"] == "first"


@pytest.mark.parametrize("path", ["/v1/files", "/v1/batches"])
def test_what_later_requests_may_name_stays_with_the_default_backend(gateway: Gateway, path: str) -> None:
    assert gateway.client.post(path, json={"model": "b"}).headers["x-hitherto-backend"] == "first"


def test_a_fallbacks_answer_is_not_kept_as_the_first_ones(
    gateway: Gateway, upstreams: tuple[FakeServer, FakeServer]
) -> None:
    first, second = upstreams
    first.app.script, second.app.script = Script(status=503), Script(text="fallback")
    reply = gateway.chat("who answers?", model="both", temperature=0)
    assert reply.json()["choices"][0]["message"]["content"] == "fallback"
    assert reply.headers["x-hitherto-backend"] == "second"
    vectors = {"model": "both", "input": "who answers?"}
    assert gateway.client.post("/v1/embeddings", json=vectors).headers["x-hitherto-backend"] == "second"
    first.app.script = Script(text="first")
    for expected in ("miss", "exact"):
        reply = gateway.chat("who answers?", model="both", temperature=0)
        assert reply.headers["x-hitherto-cache"] == expected
        assert reply.json()["choices"][0]["message"]["content"] == "first"
    assert gateway.client.post("/v1/embeddings", json=vectors).headers["x-hitherto-cache"] == "miss"
    assert gateway.client.post("/v1/embeddings", json=vectors).headers["x-hitherto-cache"] == "exact"
    first.app.script = second.app.script = Script()


def test_users_behind_a_proxy_that_names_them_share_nothing(gateway: Gateway) -> None:
    def ask(user: str) -> str:
        return gateway.chat("What is my balance?", {"x-forwarded-user": user}, model="a").headers["x-hitherto-cache"]

    assert [ask("alice"), ask("bob"), ask("alice")] == ["miss", "miss", "exact"]


def test_text_completions_are_metered(tmp_path: Path, model_folder: Path) -> None:
    config = f"backends: {{local: {{kind: engine, model: {model_folder}}}}}\nmodels: {{m: {{try: [local]}}}}\n"
    gateway = Gateway(tmp_path, config)
    try:
        for stream in (False, True):
            body = {"model": "m", "prompt": "The capital of France is", "max_tokens": 4, "stream": stream}
            body["ignore_eos"] = True
            gateway.client.post("/v1/completions", json=body).raise_for_status()
        assert gateway.metric("hitherto_tokens_total", kind="completion", model="m") == 8
        assert gateway.metric("hitherto_ttft_seconds_sum") > 0.01
    finally:
        assert gateway.stop() == 0
