"""`/v1/embeddings` under the official SDK: each input is computed once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream: FakeServer) -> Iterator[Gateway]:
    config = f"""
backends: {{up: {{kind: openai, url: "{upstream.url}"}}}}
models: {{m: {{try: [up]}}, other: {{try: [up]}}}}
cache: {{semantic: false}}
"""
    gateway = Gateway(tmp_path_factory.mktemp("embeddings"), config)
    yield gateway
    gateway.stop()


def asked(upstream: FakeServer) -> list[object]:
    return [seen.json()["input"] for seen in upstream.app.seen]


def test_of_a_batch_only_what_is_new_is_computed_and_the_order_is_kept(
    sdk: openai.OpenAI, upstream: FakeServer
) -> None:
    alone = {text: sdk.embeddings.create(model="m", input=text).data[0].embedding for text in ("a", "b", "c", "d")}
    upstream.app.seen.clear()
    both = sdk.embeddings.with_raw_response.create(model="m", input=["x", "b", "y", "a", "x"])
    assert asked(upstream) == [["x", "y"]]
    data = both.parse().data
    assert [item.index for item in data] == [0, 1, 2, 3, 4]
    assert data[1].embedding == alone["b"] and data[3].embedding == alone["a"]
    assert data[0].embedding == data[4].embedding != data[2].embedding
    assert both.headers["x-hitherto-cache"] == "miss" and both.headers["x-hitherto-reason"] == "2-of-5-known"
    assert both.parse().usage.prompt_tokens == 2, "usage tells of what was computed"
    upstream.app.seen.clear()
    whole = sdk.embeddings.with_raw_response.create(model="m", input=["y", "x", "c"])
    assert asked(upstream) == [] and whole.headers["x-hitherto-cache"] == "exact"
    assert whole.parse().usage.total_tokens == 0 and whole.parse().model == "m"
    assert whole.parse().data[0].embedding == data[2].embedding


def test_fields_formats_and_models_are_kept_apart(sdk: openai.OpenAI, upstream: FakeServer) -> None:
    sdk.embeddings.create(model="m", input="same", encoding_format="float")
    sdk.embeddings.create(model="m", input="same", encoding_format="base64")
    sdk.embeddings.create(model="other", input="same", encoding_format="float")
    sdk.embeddings.create(model="m", input="same", encoding_format="float", dimensions=2)
    sdk.embeddings.create(model="m", input="same", encoding_format="float", user="somebody")
    assert len(upstream.app.seen) == 4, "only the user makes no difference"


def test_token_inputs_are_inputs_too(gateway: Gateway, upstream: FakeServer) -> None:
    def create(value: object) -> list[object]:
        reply = gateway.client.post("/v1/embeddings", json={"model": "m", "input": value})
        return [item["embedding"] for item in reply.json()["data"]]

    one = create([11, 12, 13])
    many = create([[1, 2], [11, 12, 13]])
    assert len(one) == 1 and many[1] == one[0]
    assert asked(upstream) == [[11, 12, 13], [[1, 2]]]


@pytest.mark.parametrize("value", [None, "", [], ["a", 1], {"x": 1}, [["a"], "b"]])
def test_what_cannot_be_taken_apart_is_the_backends_business(
    gateway: Gateway, upstream: FakeServer, value: object
) -> None:
    upstream.app.script = Script(status=400)
    reply = gateway.client.post("/v1/embeddings", json={"model": "m", "input": value})
    assert reply.status_code == 400 and reply.json()["error"]["message"] == "scripted 400"
    assert upstream.app.seen[-1].json()["input"] == value


def test_failures_are_passed_on_and_not_kept(gateway: Gateway, upstream: FakeServer) -> None:
    ask = {"model": "m", "input": "will fail"}
    for status in (500, 429):
        upstream.app.script = Script(status=status, headers=(("retry-after", "7"),))
        reply = gateway.client.post("/v1/embeddings", json=ask)
        assert reply.status_code == status and reply.headers["retry-after"] == "7"
    upstream.app.script = Script(raw=b'{"object":"list","data":[],"model":"m"}')
    assert gateway.client.post("/v1/embeddings", json=ask).json()["data"] == []
    upstream.app.script = Script()
    gateway.client.post("/v1/embeddings", json={"model": "m", "input": "known"})
    upstream.app.script = Script(raw=b'{"object":"list","data":[],"model":"m"}')
    upstream.app.seen.clear()
    broken = gateway.client.post("/v1/embeddings", json={"model": "m", "input": ["known", "will fail"]})
    assert broken.json()["data"] == [], "the backend's own answer to the whole request"
    assert asked(upstream) == [["will fail"], ["known", "will fail"]]
    upstream.app.script = Script()
    assert gateway.client.post("/v1/embeddings", json=ask).headers["x-hitherto-cache"] == "miss"


def test_controls_hold_for_embeddings(gateway: Gateway, upstream: FakeServer) -> None:
    def post(text: str, **headers: str) -> int | str:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        reply = gateway.client.post("/v1/embeddings", json={"model": "m", "input": text}, headers=sent)
        return reply.headers.get("x-hitherto-cache", reply.status_code)

    assert post("c1", cache_control="no-store") == "miss" and post("c1") == "miss" and post("c1") == "exact"
    assert post("c1", cache_control="no-cache") == "miss" and post("c1", x_hitherto_namespace="n") == "miss"
    assert post("c2", cache_control="only-if-cached") == 504
    assert gateway.client.post("/v1/embeddings", json={"model": "nope", "input": "x"}).status_code == 404


def test_litellms_control_is_obeyed_and_the_order_of_the_reply_does_not_matter(
    gateway: Gateway, upstream: FakeServer
) -> None:
    def post(value: object, **fields: object) -> httpx.Response:
        return gateway.client.post("/v1/embeddings", json={"model": "m", "input": value, **fields})

    post("l1")
    assert post("l1", cache={"no-cache": True}).headers["x-hitherto-cache"] == "miss"
    assert "cache" not in upstream.app.seen[-1].json() and post("l1").headers["x-hitherto-cache"] == "exact"
    rows = b'{"object":"list","model":"m","data":[{"index":1,"embedding":[2]},{"index":0,"embedding":[1]}]}'
    upstream.app.scripts = [Script(raw=rows)]
    post(["first", "second"])
    both = post(["second", "first"])
    assert both.headers["x-hitherto-cache"] == "exact"
    assert [item["embedding"] for item in both.json()["data"]] == [[2], [1]]
    upstream.app.scripts = [Script(raw=b'{"object":"list","model":"m","data":[{"index":0,"embedding":null}]}')]
    post("null")
    assert post("null").headers["x-hitherto-cache"] == "miss", "nothing is no embedding"


def test_stored_embeddings_survive_a_restart(tmp_path: Path, upstream: FakeServer) -> None:
    body = {"model": "m", "input": ["one", "two"]}

    def tier(key: str, **headers: str) -> str:
        reply = gateway.client.post("/v1/embeddings", json=body, headers={"authorization": f"Bearer {key}", **headers})
        return reply.headers.get("x-hitherto-cache", str(reply.status_code))

    gateway = Gateway(tmp_path, None, "--upstream", upstream.url)
    assert (tier("k"), tier("other")) == ("miss", "miss"), "another credential finds nothing"
    gateway.stop()
    gateway = Gateway(tmp_path, None, "--upstream", upstream.url)
    kept = {"cache-control": "only-if-cached"}
    assert eventually(lambda: tier("k", **kept) == "exact"), "a machine that stalls may miss the deadline at first"
    assert tier("third") == "miss"
    gateway.stop()
