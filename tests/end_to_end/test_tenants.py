"""Tenants before a real gateway: who gets in, what they may use, and what is kept apart."""

from __future__ import annotations

import gzip
import random
import re
import sqlite3
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from backends.fake import FakeServer, Script
from gateway.tenants import hash_key
from tests.conftest import Gateway, eventually, held

CONFIG = """
tenants: tenants/
backends:
  up: {{kind: openai, url: "{url}", prompt_cache: key}}
  claude: {{kind: anthropic, url: "{url}"}}
models: {{m: {{try: [up], retry: {{attempts: 1}}}}, cheap: {{try: [up]}}, claude-*: {{try: [claude]}}, gpt-x: m}}
prices: {{m: {{input: 1 USD/M, output: 10 USD/M}}, cheap: {{input: 0.1 USD/M, output: 1 USD/M}}}}
cache: {{semantic: false}}
breakers: {{up: {{failures: 1.0, in_a_row: 1000000}}}}
admin: {{key: "env:TEST_ADMIN_KEY"}}
"""
TENANTS = {
    "plain": "",
    "other": "",
    "narrow": "models: [cheap]",
    "rates": "limits: {requests_per_minute: 3}",
    "tokens": "limits: {tokens_per_minute: 150}",
    "charged": "limits: {tokens_per_minute: 100, count_hits: true}",
    "busy": "limits: {concurrency: 2}",
    "users": "limits: {per_user: {requests_per_minute: 2}}\ncache: {per_user: true}",
    "models": "limits: {per_model: {m: {requests_per_minute: 1}}}",
    "poor": "budget: {per_day: 0.0002 USD}",
    "thrifty": "budget: {per_day: 0.0002 USD, when_spent: cache-only}",
    "down": "budget: {per_day: 0.00005 USD, when_spent: {downgrade: cheap}}",
    "private": "redact: {text: false}",
    "masked": "redact: {mask: [emails, cards]}",
    "caching": "prompt_cache: on",
    "reporting": "prompt_cache: report",
    "elsewhere": "routes: {m: {try: [{backend: up, model: its-own}]}, secret: {try: [up]}}",
    "trusted": "relay: all",
    "crowd": "budget: {per_day: 0.001 USD, when_spent: {downgrade: cheap}}\nmodels: [m]",
    "billed": "budget: {per_month: 500 USD}\nlimits: {tokens_per_day: 100000000, concurrency: 100}",
    "spent": "budget: {per_day: 0.00005 USD, when_spent: {downgrade: cheap}}",
    "leaver": "budget: {per_day: 1 USD}\nlimits: {tokens_per_minute: 100000}",
}
ADMIN = {"authorization": "Bearer root"}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream: FakeServer) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("tenants")
    (folder / "tenants").mkdir()
    for name, text in TENANTS.items():
        (folder / f"tenants/{name}.yaml").write_text(f"tenant: {name}\nkeys: ['{hash_key(name)}']\n{text}\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_ADMIN_KEY", "root")
        running = Gateway(folder, CONFIG.format(url=upstream.url))
    yield running
    assert running.stop() == 0


@pytest.fixture(autouse=True)
def _fresh(fresh: None) -> None:
    """Each test has an upstream that has seen nothing."""


def ask(
    gateway: Gateway, key: str, content: object, headers: dict[str, str] | None = None, **fields: Any
) -> httpx.Response:
    return gateway.chat(content, {"authorization": f"Bearer {key}", **(headers or {})}, temperature=0, **fields)


def error(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


def test_nobody_gets_in_without_a_key_and_keys_go_nowhere(gateway: Gateway, upstream: FakeServer) -> None:
    assert error(gateway.chat("hi")) == (401, "invalid_api_key")
    assert error(ask(gateway, "wrong", "hi")) == (401, "invalid_api_key")
    assert error(gateway.client.get("/v1/models")) == (401, "invalid_api_key")
    assert error(gateway.client.post("/v1/embeddings", json={"model": "m", "input": "x"})) == (401, "invalid_api_key")
    assert error(gateway.client.get("/v1/files")) == (401, "invalid_api_key")
    assert upstream.app.seen == []
    assert ask(gateway, "plain", "hi").status_code == 200
    assert "authorization" not in upstream.app.seen[0].headers and "plain" not in str(upstream.app.seen[0].headers)
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_tenants_share_no_answers(gateway: Gateway) -> None:
    tiers = [ask(gateway, key, "whose is it?").headers["x-hitherto-cache"] for key in ("plain", "other", "plain")]
    assert tiers == ["miss", "miss", "exact"]


def test_only_the_models_of_a_tenant_exist_for_it(gateway: Gateway, upstream: FakeServer) -> None:
    assert error(ask(gateway, "narrow", "hi")) == (403, "model_not_allowed")
    assert ask(gateway, "narrow", "hi", model="cheap").status_code == 200
    assert error(ask(gateway, "narrow", "hi", model="nonsense")) == (403, "model_not_allowed"), "it learns nothing"
    assert error(ask(gateway, "plain", "hi", model="nonsense")) == (404, "model_not_found")
    narrow = {"authorization": "Bearer narrow"}
    names = [card["id"] for card in gateway.client.get("/v1/models", headers=narrow).json()["data"]]
    assert names == ["cheap"]
    assert gateway.client.get("/v1/models/m", headers=narrow).status_code == 403
    for path in ("/v1/completions", "/v1/responses", "/v1/embeddings"):
        body = {"model": "m", "input": "x", "prompt": "x"}
        assert error(gateway.client.post(path, json=body, headers=narrow)) == (403, "model_not_allowed"), path
    form = gateway.client.post("/v1/audio/transcriptions", headers=narrow, data={"model": "m"}, files={"file": b"x"})
    assert error(form) == (403, "model_not_allowed")


def test_aliases_and_a_tenants_own_routes(gateway: Gateway, upstream: FakeServer) -> None:
    ask(gateway, "plain", "by an alias", model="gpt-x")
    ask(gateway, "elsewhere", "by its own route")
    ask(gateway, "elsewhere", "by a model that only it has", model="secret")
    assert [seen.json()["model"] for seen in upstream.app.seen] == ["m", "its-own", "secret"]
    assert error(ask(gateway, "plain", "no", model="secret")) == (404, "model_not_found")


def test_what_tenants_share_at_the_provider_is_not_passed_on(gateway: Gateway, upstream: FakeServer) -> None:
    for method, path in (
        ("GET", "/v1/files"),
        ("POST", "/v1/batches"),
        ("GET", "/v1/responses/r1"),
        ("DELETE", "/v1/files/1"),
    ):
        reply = gateway.client.request(method, path, headers={"authorization": "Bearer plain"})
        assert error(reply) == (403, "not_for_tenants"), path
    assert upstream.app.seen == []
    assert gateway.client.get("/v1/files", headers={"authorization": "Bearer trusted"}).status_code == 200


BOUNDARY = "multipart/form-data; boundary=b"


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (b'\xef\xbb\xbf{"model": "m", "input": "x"}', {}),
        ('{"model": "m", "input": "x"}'.encode("utf-16"), {}),
        (b'{"model": "m", "input": NaN}', {}),
        (b'{"Model": "m", "input": "x"}', {}),
        (b'{"model": ["m"], "input": "x"}', {}),
        (b'{"input": "x"}', {}),
        (gzip.compress(b'{"model": "cheap", "input": "x"}'), {"content-encoding": "gzip"}),
        (b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\ncheap\r\n'
         b'--b\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--b--', {"content-type": BOUNDARY}),
        (b'--b\r\ncontent-disposition: form-data; name="file"\r\n\r\nx\r\n--b--', {"content-type": BOUNDARY}),
    ],
)  # fmt: skip
def test_a_tenants_body_that_cannot_be_read_goes_nowhere(
    gateway: Gateway, upstream: FakeServer, body: bytes, headers: dict[str, str]
) -> None:
    """What cannot be read cannot be limited, charged or allowed; some upstreams read more leniently than we do."""
    for path in ("/v1/responses", "/v1/completions", "/v1/audio/transcriptions", "/v1/embeddings"):
        shown = {"authorization": "Bearer narrow", "content-type": "application/json", **headers}
        assert gateway.client.post(path, content=body, headers=shown).status_code == 400, path
    assert upstream.app.seen == []


@pytest.mark.parametrize("name", ["name=model", 'name="model"; x=y', 'NAME="model"'])
def test_forms_name_their_model_in_every_spelling(gateway: Gateway, upstream: FakeServer, name: str) -> None:
    body = f"--b\r\nContent-Disposition: form-data; {name}\r\n\r\nm\r\n--b--".encode()
    headers = {"authorization": "Bearer narrow", "content-type": BOUNDARY}
    reply = gateway.client.post("/v1/audio/transcriptions", content=body, headers=headers)
    assert error(reply) == (403, "model_not_allowed")
    headers["authorization"] = "Bearer plain"
    assert gateway.client.post("/v1/audio/transcriptions", content=body, headers=headers).status_code == 200


def test_a_forms_model_is_renamed_like_any_other(gateway: Gateway, upstream: FakeServer) -> None:
    headers = {"authorization": "Bearer elsewhere"}
    form = gateway.client.post(
        "/v1/audio/transcriptions", data={"model": "m"}, files={"file": b"x\r\n"}, headers=headers
    )
    assert form.status_code == 200
    body = upstream.app.seen[-1].body
    assert (
        b"its-own" in body
        and b'name="file"' in body
        and int(upstream.app.seen[-1].headers["content-length"]) == len(body)
    )


def test_what_cannot_be_downgraded_is_refused(gateway: Gateway, upstream: FakeServer) -> None:
    for number in range(3):
        ask(gateway, "spent", f"q {number}")
    upstream.app.seen.clear()
    headers = {"authorization": "Bearer spent"}
    form = gateway.client.post("/v1/audio/transcriptions", data={"model": "m"}, files={"file": b"x"}, headers=headers)
    odd = gateway.client.post("/v1/responses", content=b'{"a":"' + b'\\"' * 200_000, headers=headers)
    assert form.status_code == odd.status_code == 402 and upstream.app.seen == []
    gateway.client.post("/v1/responses", json={"model": "m", "input": "x"}, headers=headers).raise_for_status()
    assert upstream.app.seen[-1].json()["model"] == "cheap"


def test_a_tenants_own_route_holds_on_every_path(gateway: Gateway, upstream: FakeServer) -> None:
    for path in ("/v1/responses", "/v1/completions", "/v1/embeddings", "/v1/audio/speech", "/v1/rerank"):
        body = {"model": "m", "input": "x", "prompt": "x"}
        gateway.client.post(path, json=body, headers={"authorization": "Bearer elsewhere"}).raise_for_status()
    assert [seen.json()["model"] for seen in upstream.app.seen] == ["its-own"] * 5


def test_embeddings_are_each_tenants_own_and_hits_cost_nothing(gateway: Gateway) -> None:
    def embed(key: str) -> str:
        headers = {"authorization": f"Bearer {key}"}
        reply = gateway.client.post("/v1/embeddings", json={"model": "m", "input": "whose?"}, headers=headers)
        return str(reply.headers["x-hitherto-cache"])

    assert [embed(key) for key in ("leaver", "plain", "leaver", "leaver")] == ["miss", "miss", "exact", "exact"]
    assert eventually(lambda: spent(gateway, "leaver")["spent"] == pytest.approx(6e-6)), "six tokens, once"


def test_a_crowd_does_not_pass_the_budget_of_the_dear_model(gateway: Gateway, upstream: FakeServer) -> None:
    """Each may cost 0.0004: after three of them the budget of 0.001 is held."""
    ask(gateway, "crowd", "the first of the day", model="m", max_tokens=1)
    upstream.app.script = Script(until=lambda: len(upstream.app.seen) >= 13)
    with ThreadPoolExecutor(12) as pool:
        replies = list(pool.map(lambda number: ask(gateway, "crowd", f"q {number}", max_tokens=40), range(12)))
    assert [reply.status_code for reply in replies] == [200] * 12, "the cheaper model need not stand in its list"
    models = [seen.json()["model"] for seen in upstream.app.seen[1:]]
    assert models.count("m") <= 4 and models.count("cheap") >= 8


def test_who_leaves_early_pays_for_the_prompt_and_counting_tokens_is_free(
    gateway: Gateway, upstream: FakeServer
) -> None:
    before = spent(gateway, "leaver")["spent"]
    upstream.app.script = Script(delay=30)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{gateway.url}/v1/chat/completions", headers={"authorization": "Bearer leaver"}, timeout=3,
                   json={"model": "m", "messages": [{"role": "user", "content": "word " * 400}]})  # fmt: skip
    assert eventually(lambda: spent(gateway, "leaver")["spent"] - before > 80e-6), (
        "about 500 tokens, or fewer: this provider tells 11 of every prompt"
    )
    assert spent(gateway, "leaver")["held"] == 0
    upstream.app.script = Script(raw=b'{"input_tokens": 9}', headers=(("content-type", "application/json"),))
    before = spent(gateway, "leaver")["spent"]
    body = {"model": "claude-x", "messages": [{"role": "user", "content": "count me"}]}
    gateway.client.post("/v1/messages/count_tokens", json=body, headers={"x-api-key": "leaver"}).raise_for_status()
    time.sleep(0.2)
    assert spent(gateway, "leaver")["spent"] == before


def test_what_providers_tell_of_our_account_stays_here(gateway: Gateway, upstream: FakeServer) -> None:
    told = ("x-ratelimit-remaining-requests", "anthropic-ratelimit-tokens-limit", "openai-organization", "set-cookie")
    upstream.app.script = Script(headers=tuple((name, "7") for name in told))
    reply = ask(gateway, "plain", "account")
    assert not set(told) & set(reply.headers)
    upstream.app.script = Script(status=401, headers=told[:0])
    refused = ask(gateway, "plain", "our own key is wrong")
    assert refused.status_code == 502 and "refuses the gateway's own key (401)" in refused.text
    assert "scripted 401" not in refused.text


def test_an_endless_body_for_the_administration_ends(gateway: Gateway) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * (1 << 20)

    try:
        status = gateway.client.post("/admin/cache/purge", content=endless()).status_code
    except httpx.TransportError:
        status = 413
    assert status in (400, 401, 413)


def test_requests_a_minute(gateway: Gateway) -> None:
    replies = [ask(gateway, "rates", "often") for _ in range(5)]
    assert [reply.status_code for reply in replies] == [200, 200, 200, 429, 429]
    told = [reply.headers["x-ratelimit-remaining-requests"] for reply in replies]
    assert told == ["2", "1", "0", "0", "0"] and replies[0].headers["x-ratelimit-limit-requests"] == "3"
    assert 50 <= int(replies[3].headers["retry-after"]) <= 61
    message = replies[3].json()["error"]["message"]
    assert re.fullmatch(r"limit reached: 3 requests a minute; again in [56]\d\.\d s", message)
    sdk = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="rates", max_retries=0)
    with pytest.raises(openai.RateLimitError):
        sdk.chat.completions.create(model="m", messages=[{"role": "user", "content": "often"}])
    refused = gateway.client.post("/v1/messages", json={"model": "claude-x"}, headers={"x-api-key": "rates"})
    assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"


def test_tokens_are_estimated_settled_and_cost_nothing_from_the_cache(gateway: Gateway) -> None:
    first = ask(gateway, "tokens", "a question", max_tokens=80)
    assert first.status_code == 200 and int(first.headers["x-ratelimit-remaining-tokens"]) < 150 - 80
    assert ask(gateway, "tokens", "another", max_tokens=80).status_code == 200, "only 18 were really used"
    for _ in range(10):
        assert ask(gateway, "tokens", "a question", max_tokens=80).headers["x-hitherto-cache"] == "exact"
    large = ask(gateway, "tokens", "large " * 150, max_tokens=5)
    assert error(large) == (429, "rate_limit_exceeded") and "larger than the whole limit" in large.text
    statuses = [ask(gateway, "tokens", f"more {number}", max_tokens=80).status_code for number in range(8)]
    assert statuses[0] == 200 and statuses[-1] == 429
    assert ask(gateway, "tokens", "a question", max_tokens=80).status_code == 200, "what is stored still serves"


def test_hits_count_where_the_tenant_says_so(gateway: Gateway) -> None:
    statuses = {
        ask(gateway, "charged", "again and again", max_tokens=10).headers["x-ratelimit-remaining-tokens"]
        for _ in range(5)
    }
    assert len(statuses) >= 4, "each hit takes 18 tokens"


def test_a_few_at_once(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script, go = held()
    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask, gateway, "busy", f"slow {number}") for number in range(6)]
        assert eventually(lambda: sum(each.done() for each in asking) == 4)
        go.set()
    assert sorted(each.result().status_code for each in asking) == [200, 200, 429, 429, 429, 429]
    upstream.app.script = Script()
    assert ask(gateway, "busy", "later").status_code == 200, "what was taken is given back"


def test_a_client_that_leaves_gives_back_what_it_had(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script = Script(delay=5)
    for number in range(2):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{gateway.url}/v1/chat/completions", headers={"authorization": "Bearer busy"}, timeout=0.3,
                       json={"model": "m", "messages": [{"role": "user", "content": f"gone {number}"}]})  # fmt: skip
    upstream.app.script = Script()
    assert eventually(lambda: ask(gateway, "busy", f"there {time.time()}").status_code == 200, 5)


def test_end_users_have_limits_and_answers_of_their_own(gateway: Gateway) -> None:
    def tier(user: str) -> str:
        return ask(gateway, "users", "mine", user=user).headers.get("x-hitherto-cache", "429")

    assert [tier("ann"), tier("ann"), tier("ann"), tier("bob")] == ["miss", "exact", "429", "miss"]


def test_limits_of_one_model(gateway: Gateway) -> None:
    statuses = [ask(gateway, "models", "x", model=model).status_code for model in ("m", "m", "cheap", "cheap")]
    assert statuses == [200, 429, 200, 200]


def spent(gateway: Gateway, tenant: str) -> dict[str, Any]:
    listing = gateway.client.get("/admin/tenants", headers=ADMIN).json()["tenants"]
    return next(one["budget"][0] for one in listing if one["tenant"] == tenant)


def test_a_spent_budget_refuses(gateway: Gateway, upstream: FakeServer) -> None:
    """An answer costs 11 + 70 millionths of a dollar; 200 are there."""
    replies = [ask(gateway, "poor", f"q {number}", max_tokens=5) for number in range(4)]
    assert [reply.status_code for reply in replies] == [200, 200, 402, 402]
    assert replies[3].json()["error"]["message"] == "the budget of poor is spent (0.0002 USD a day)"
    assert eventually(lambda: spent(gateway, "poor")["held"] == 0)
    assert spent(gateway, "poor")["spent"] == pytest.approx(2 * 81e-6)
    assert len(upstream.app.seen) == 2


def test_cache_only_still_serves_what_is_stored(gateway: Gateway) -> None:
    statuses = [ask(gateway, "thrifty", f"q {number}", max_tokens=5).status_code for number in range(4)]
    assert statuses == [200, 200, 402, 402]
    hit = ask(gateway, "thrifty", "q 0", max_tokens=5)
    assert hit.status_code == 200 and hit.headers["x-hitherto-cache"] == "exact"


def test_downgrade_goes_on_with_another_model(gateway: Gateway, upstream: FakeServer) -> None:
    models = [ask(gateway, "down", f"q {number}").headers["x-hitherto-model"] for number in range(3)]
    assert models == ["m", "cheap", "cheap"]
    assert [seen.json()["model"] for seen in upstream.app.seen] == models


def test_hits_cost_nothing_and_streams_without_usage_something(gateway: Gateway, upstream: FakeServer) -> None:
    key = "down"
    before = spent(gateway, key)["spent"]
    ask(gateway, key, "streamed", stream=True)
    assert eventually(lambda: spent(gateway, key)["spent"] > before)
    once = spent(gateway, key)["spent"]
    ask(gateway, key, "streamed", stream=True)
    time.sleep(0.2)
    assert spent(gateway, key)["spent"] == once


def test_what_is_booked_is_the_providers_own_bill(gateway: Gateway, upstream: FakeServer) -> None:
    """Streams and whole answers, hits, followers and failures, many at once: every computed answer is booked once."""
    draw = random.Random(7)
    scripts = [Script(), Script(), Script(delay=0.05), Script(status=500), Script(status=429), Script(status=400)]

    def one(number: int) -> int:
        upstream.app.script = draw.choice(scripts)
        fields: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}} if number % 2 else {}
        return ask(gateway, "billed", f"question {draw.randrange(60)}", max_tokens=20, **fields).status_code

    with ThreadPoolExecutor(16) as pool:
        statuses = list(pool.map(one, range(300)))
    assert 200 in statuses and 500 in statuses
    assert eventually(lambda: spent(gateway, "billed")["held"] == 0)
    bill = sum(seen.status == 200 for seen in upstream.app.seen) * 81
    assert bill > 0 and round(spent(gateway, "billed")["spent"] * 1e6) == bill
    left = ask(gateway, "billed", "one more", max_tokens=1).headers["x-ratelimit-remaining-tokens"]
    assert 100_000_000 - int(left) - 18 * bill // 81 < 60, "and so are the tokens"


def stored(gateway: Gateway) -> bytes:
    with sqlite3.connect(gateway.folder / "data/answers.sqlite") as connection:
        rows = connection.execute("SELECT question FROM answers").fetchall()
    return "\n".join(str(row[0]) for row in rows).encode()


def test_what_is_stored_is_masked_or_nothing(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script = Script(text="noted")
    assert ask(gateway, "private", "my secret wish").headers["x-hitherto-cache"] == "miss"
    assert ask(gateway, "private", "my secret wish").headers["x-hitherto-cache"] == "exact"
    text = "mail jane@example.org about 4111 1111 1111 1111"
    for other in (text, text.replace("jane", "john")):
        assert ask(gateway, "masked", other).headers["x-hitherto-cache"] == "miss", (
            "other addresses are other questions"
        )
        assert ask(gateway, "masked", other).headers["x-hitherto-cache"] == "exact"
    assert eventually(lambda: stored(gateway).count(b"<email:") == 2), "written behind"
    kept = stored(gateway)
    assert b"secret wish" not in kept and b"jane" not in kept and b"4111" not in kept
    assert re.search(rb"mail <email:\w{6}> about <card:\w{6}>", kept)
    assert upstream.app.seen[-1].json()["messages"][0]["content"].startswith("mail john@"), "the backend gets it whole"


def test_prompt_caches_of_providers(gateway: Gateway, upstream: FakeServer) -> None:
    rules = "Mind our rules. " * 400
    system = [{"role": "system", "content": rules}, {"role": "user", "content": "?"}]
    plain, reported, on = (ask(gateway, key, system) for key in ("plain", "reporting", "caching"))
    sent = [seen.json().get("prompt_cache_key") for seen in upstream.app.seen]
    assert sent[:2] == [None, None] and sent[2].startswith("h-")
    told = [reply.headers.get("x-hitherto-prompt-cache") for reply in (plain, reported, on)]
    assert told == [None, "would=key", "did=key"]
    upstream.app.seen.clear()
    for key, marks in (("plain", 0), ("caching", 1)):
        sdk = anthropic.Anthropic(base_url=gateway.url, api_key=key, max_retries=0)
        message = sdk.messages.create(model="claude-sonnet-4-5", max_tokens=9, system=rules,
                                      messages=[{"role": "user", "content": "hello"}])  # fmt: skip
        assert message.content[0].text == "echo" and message.usage.cache_read_input_tokens == marks * 100
        with sdk.messages.stream(model="claude-sonnet-4-5", max_tokens=9, system=rules,
                                 messages=[{"role": "user", "content": "hello"}]) as stream:  # fmt: skip
            assert stream.get_final_message().usage.output_tokens == 7
    seen = upstream.app.seen[-1]
    assert seen.path == "/v1/messages" and "x-api-key" not in seen.headers, "a tenant's key is ours"
    bare = {"model": "claude-x", "max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
    gateway.client.post("/v1/messages", json=bare, headers={"x-api-key": "plain"}).raise_for_status()
    assert upstream.app.seen[-1].headers["anthropic-version"] == "2023-06-01", "where the client names none"
    assert gateway.metric("hitherto_prefix_tokens_total", source="upstream") >= 200


def test_errors_in_the_words_of_the_messages_api(gateway: Gateway) -> None:
    sdk = anthropic.Anthropic(base_url=gateway.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError) as caught:
        sdk.messages.create(model="claude-sonnet-4-5", max_tokens=9, messages=[{"role": "user", "content": "hello"}])
    assert caught.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]


def test_administration_needs_its_own_key(gateway: Gateway) -> None:
    for headers in ({}, {"authorization": "Bearer plain"}, {"x-api-key": "wrong"}):
        assert gateway.client.get("/admin/tenants", headers=headers).status_code == 401
        assert gateway.client.post("/admin/cache/purge", json={"all": True}, headers=headers).status_code == 401
    listing = gateway.client.get("/admin/tenants", headers={"x-api-key": "root"}).json()
    assert {one["tenant"] for one in listing["tenants"]} == set(TENANTS)
    assert hash_key("plain") not in str(listing)
    assert gateway.client.get("/admin/breakers", headers=ADMIN).json()[0]["state"] == "closed"


def test_a_change_of_a_file_is_in_force_and_a_broken_one_is_told(gateway: Gateway) -> None:
    path = gateway.folder / "tenants/other.yaml"
    good = path.read_text()
    path.write_text(good + "models: [cheap]\n")
    done = gateway.client.post("/admin/reload", headers=ADMIN).json()
    assert done["changes"] in ([], ["other: models: ('*',) → ('cheap',)"]), "by itself, or by this"
    assert eventually(lambda: ask(gateway, "other", "hi").status_code == 403)
    path.write_text("tenant: other\nmodles: []\n")
    gateway.client.post("/admin/reload", headers=ADMIN)
    assert "other.yaml" in gateway.client.get("/ready").json()["notes"]["tenants"]
    wrong = gateway.client.get("/admin/tenants", headers=ADMIN).json()["wrong"]
    assert "modles: this key is not known here (did you mean 'models'?)" in wrong[str(path)]
    assert gateway.metric("hitherto_config_reload_failed") == 1
    assert ask(gateway, "other", "hi").status_code == 403, "the last good one"
    path.write_text(good)
    gateway.client.post("/admin/reload", headers=ADMIN)
    assert ask(gateway, "other", "hi").status_code == 200 and gateway.metric("hitherto_config_reload_failed") == 0


def test_what_was_spent_is_still_spent_after_a_restart(tmp_path: Path, upstream: FakeServer) -> None:
    def started() -> Gateway:
        config = CONFIG.replace("admin:", "#").format(url=upstream.url)
        return Gateway(tmp_path, config + "budget: {{per_month: 0.0001 USD}}\n".replace("{{", "{").replace("}}", "}"))

    (tmp_path / "tenants").mkdir()
    (tmp_path / "tenants/a.yaml").write_text(f"tenant: a\nkeys: ['{hash_key('a')}']\n")
    gateway = started()
    assert [ask(gateway, "a", f"{number}", max_tokens=3).status_code for number in range(3)] == [200, 402, 402]
    gateway.stop()
    gateway = started()
    assert ask(gateway, "a", "new", max_tokens=3).status_code == 402
    gateway.stop()
