"""What a running gateway books, tells in headers, keeps over a crash, and shows to whom."""

from __future__ import annotations

import contextlib
import csv
import io
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import orjson
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import ROOT, Gateway, eventually, tenant_file

CONFIG = """
tenants: tenants
admin: {{key: "env:LEDGER_TEST_ADMIN"}}
backends:
  up:     {{kind: openai, url: "{url}"}}
  claude: {{kind: anthropic, url: "{base}"}}
  plain:  {{kind: openai, url: "{url}", stream_usage: false}}
models:
  m: {{try: [up], retry: {{attempts: 2}}}}
  claude: {{try: [claude]}}
  quiet: {{try: [{{backend: plain, model: m}}]}}
  free: {{try: [{{backend: up, model: nobody-knows}}]}}
cache: {{semantic: {{deadline: 5s, audit: 0}}}}
breakers: {{"*": false}}
prices:
  m: {{input: 10 USD/M, cached: 1 USD/M, output: 100 USD/M}}
  claude: {{input: 10 USD/M, cached: 1 USD/M, written: 20 USD/M, output: 100 USD/M}}
  embedder: {{hour: 36 USD/h}}
"""
ADMIN = {"authorization": "Bearer the-admin-key"}
KEYS = {"acme": "key-of-acme", "globex": "key-of-globex"}
COLD = 11 * 10e-6 + 7 * 100e-6
PAID = 8 * 10e-6 + 3 * 1e-6 + 7 * 100e-6


@pytest.fixture(scope="module")
def gateway(upstream: FakeServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    for tenant, key in KEYS.items():
        tenant_file(folder, tenant, key, "budget: {per_month: 20 USD}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LEDGER_TEST_ADMIN", "the-admin-key")
        server = Gateway(folder, CONFIG.format(url=upstream.url, base=upstream.url.removesuffix("/v1")))
    yield server
    server.stop()


def of(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def rows(gateway: Gateway, **conditions: Any) -> list[dict[str, Any]]:
    reply = gateway.client.get("/dashboard/api/requests", params={"limit": 1000, **conditions}, headers=ADMIN)
    assert reply.status_code == 200, reply.text
    found: list[dict[str, Any]] = reply.json()["rows"]
    return found


def row_of(gateway: Gateway, reply: httpx.Response) -> dict[str, Any]:
    found = rows(gateway, request=reply.headers["x-request-id"], part="answer")
    assert len(found) == 1
    return found[0]


def money(reply: httpx.Response) -> tuple[float, float]:
    return float(reply.headers["x-hitherto-cost-usd"]), float(reply.headers["x-hitherto-saved-usd"])


def test_a_miss_a_hit_and_what_each_cost_and_saved(gateway: Gateway, fresh: None) -> None:
    miss = gateway.chat("What does it cost?", of("acme"), temperature=0)
    assert money(miss) == (pytest.approx(PAID), pytest.approx(COLD - PAID))
    row = row_of(gateway, miss)
    assert (row["cost"], row["saved_prefix"], row["saved_answer"]) == (pytest.approx(PAID), pytest.approx(27e-6), 0)
    assert (row["prompt"], row["cached"], row["completion"], row["sources"]) == (11, 3, 7, {"upstream": 3})
    assert (row["tenant"], row["asked"], row["model"], row["backend"], row["stored"]) == (
        "acme",
        "m",
        "m",
        "up",
        "stored",
    )
    assert row["key"] == sha256(KEYS["acme"].encode()).hexdigest()[:12]
    hit = gateway.chat("What does it cost?", of("acme"), temperature=0)
    assert hit.headers["x-hitherto-cache"] == "exact" and money(hit) == (0, pytest.approx(COLD))
    row = row_of(gateway, hit)
    assert (row["cost"], row["prompt"], row["completion"]) == (0, 0, 0), "a hit is neither charged nor counted as paid"
    assert (row["avoided_prompt"], row["avoided_completion"]) == (11, 7)
    assert row["entry"].startswith(hit.headers["x-hitherto-entry"])


def test_a_semantic_hit_is_told_net_of_looking(gateway: Gateway, fresh: None) -> None:
    gateway.chat("How do I reset my password?", of("acme"), temperature=0)
    hit = gateway.chat("how do i reset my password", of("acme"), temperature=0)
    assert hit.headers["x-hitherto-cache"] == "semantic", hit.headers
    cost, saved = money(hit)
    assert cost > 0 and saved == pytest.approx(COLD - cost)
    row = row_of(gateway, hit)
    assert row["lookup"] == row["cost"] == pytest.approx(cost) and row["saved_answer"] == pytest.approx(saved)
    assert row["similarity"] > 0.85


def test_usage_is_asked_for_and_kept_from_who_did_not_ask(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    client = openai.OpenAI(base_url=f"{gateway.url}/v1", api_key=KEYS["acme"], max_retries=0)
    ask: Any = {"model": "m", "messages": [{"role": "user", "content": "Stream this, please"}], "stream": True}
    chunks = list(client.chat.completions.create(**ask, extra_headers={"x-request-id": "stream-1"}))
    assert upstream.app.seen[-1].json()["stream_options"] == {"include_usage": True}
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)
    assert upstream.app.seen[-1].headers["x-request-id"] == "stream-1", "one id, end to end"
    (row,) = rows(gateway, request="stream-1")
    assert (row["prompt"], row["completion"], row["estimated"]) == (11, 7, False) and row["stream"] is True
    told = list(client.chat.completions.create(**ask, stream_options={"include_usage": True}))
    assert told[-1].usage is not None and told[-1].usage.completion_tokens == 7, "a hit can tell it now"
    raw = gateway.client.post("/v1/chat/completions", json={**ask, "n": 1, "seed": 4}, headers=of("acme")).text
    assert '"usage"' not in raw and raw.endswith("data: [DONE]\n\n")
    completions = gateway.client.post(
        "/v1/completions", json={"model": "m", "prompt": "x", "stream": True}, headers=of("acme")
    )
    assert completions.status_code == 200
    assert upstream.app.seen[-1].json()["stream_options"] == {"include_usage": True}


def test_a_server_that_refuses_the_field_is_not_asked(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    reply = gateway.chat("Quietly, four words now", of("acme"), model="quiet", stream=True)
    assert "stream_options" not in upstream.app.seen[-1].json()
    row = row_of(gateway, reply)
    assert row["estimated"] is True and row["completion"] >= 4 and row["cost"] > 0


def test_cache_writes_of_anthropic_are_booked_as_such(gateway: Gateway, fresh: None) -> None:
    client = anthropic.Anthropic(base_url=gateway.url, api_key=KEYS["globex"], max_retries=0)
    message = client.messages.create(model="claude", max_tokens=9, messages=[{"role": "user", "content": "Hello"}])
    assert message.usage.input_tokens == 11
    row = rows(gateway, model="claude")[0]
    read = message.usage.cache_read_input_tokens or 0
    assert row["prompt"] == 11 + read and row["cached"] == read
    assert row["cost"] == pytest.approx(11 * 10e-6 + read * 1e-6 + 7 * 100e-6)


def test_a_broken_stream_is_booked_with_what_came(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    upstream.app.script = Script(text="one two three four five", cut_after=4)
    with gateway.client.stream(
        "POST",
        "/v1/chat/completions",
        headers=of("acme"),
        json={"model": "m", "stream": True, "messages": [{"role": "user", "content": "break"}]},
    ) as reply:
        body = reply.read()
    assert b"upstream_interrupted" in body
    row = row_of(gateway, reply)
    assert (row["estimated"], row["stored"]) == (True, "interrupted")
    assert 1 <= row["completion"] <= 3, "a cut connection may take its last pieces along"


def test_refusals_have_rows_but_strangers_have_none(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    before = len(rows(gateway))
    assert gateway.chat("x", {"authorization": "Bearer nobody"}).status_code == 401
    assert len(rows(gateway)) == before, "whoever has no key fills no ledger"
    refused = gateway.chat("x", of("acme"), model="no-such")
    row = row_of(gateway, refused)
    assert (row["status"], row["reason"], row["cost"]) == (404, "model_not_found", 0)
    upstream.app.script = Script(status=503)
    failed = gateway.chat("never answered", of("acme"))
    row = row_of(gateway, failed)
    assert row["status"] == 503 and row["cost"] == row["lookup"], "errors are not charged"


def test_a_model_without_a_price_is_told_as_such(gateway: Gateway, fresh: None) -> None:
    reply = gateway.chat("for how much", of("globex"), model="free", temperature=0)
    assert "x-hitherto-cost-usd" not in reply.headers
    assert row_of(gateway, reply)["cost"] is None
    totals = gateway.client.get("/admin/usage/totals", headers=ADMIN).json()["rows"][0]
    assert totals["unpriced"] >= 1


@pytest.mark.parametrize("key", ["x" * 300, "=cmd()", "ü"])
def test_names_that_callers_choose_do_no_harm(gateway: Gateway, fresh: None, key: str) -> None:
    reply = gateway.chat("name", {**of("acme"), "x-request-id": key.encode()}, user=key)
    assert reply.status_code == 200
    listed = gateway.client.get("/dashboard/api/requests", params={"format": "csv", "limit": 50}, headers=ADMIN)
    cells = [cell for line in csv.reader(io.StringIO(listed.text)) for cell in line]
    assert not any(cell.startswith("=") for cell in cells), "no formula for a spreadsheet"


# --- who sees what ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["me", "totals", "totals?by=tenant", "quantiles", "entries", "requests", "budgets", "state"]
)
def test_nobody_sees_anything_without_a_key(gateway: Gateway, path: str) -> None:
    assert gateway.client.get(f"/dashboard/api/{path}").status_code == 401
    assert gateway.client.get(f"/dashboard/api/{path}", headers={"x-api-key": "wrong"}).status_code == 401
    assert gateway.client.get(f"/admin/usage/{path}", headers=of("acme")).status_code == 401, "that is the admin's"


def test_a_tenants_key_sees_its_tenant_only(gateway: Gateway, fresh: None) -> None:
    gateway.chat("mine", of("acme"))
    other = gateway.chat("theirs", of("globex"))
    get = gateway.client.get
    assert get("/dashboard/api/me", headers=of("acme")).json()["tenant"] == "acme"
    mine = get("/dashboard/api/totals?by=tenant", headers=of("acme")).json()["rows"]
    assert [row["tenant"] for row in mine] == ["acme"]
    assert get("/dashboard/api/totals?tenant=globex", headers=of("acme")).status_code == 403
    listed = get("/dashboard/api/requests?limit=1000", headers=of("acme")).json()["rows"]
    assert {row["tenant"] for row in listed} == {"acme"}
    number = row_of(gateway, other)["number"]
    assert get(f"/dashboard/api/requests/{number}", headers=of("acme")).status_code == 404
    assert get(f"/dashboard/api/requests/{number}", headers=of("globex")).status_code == 200
    assert {one["tenant"] for one in get("/dashboard/api/budgets", headers=of("acme")).json()} == {"acme"}
    assert get("/dashboard/api/state", headers=of("acme")).status_code == 403
    assert {one["tenant"] for one in get("/dashboard/api/entries", headers=of("acme")).json()["rows"]} <= {"acme"}


def test_the_figures_are_the_sum_of_the_rows(gateway: Gateway) -> None:
    everything = rows(gateway)
    total = gateway.client.get("/dashboard/api/totals?last=3600", headers=ADMIN).json()["rows"][0]
    assert total["cost"] == pytest.approx(sum(row["cost"] or 0 for row in everything), abs=1e-9)
    assert total["parts"] == len(everything)
    saved = sum(row["saved_answer"] + row["saved_prefix"] for row in everything)
    assert total["cold"] - total["cost"] == pytest.approx(saved, abs=1e-6)
    budgets = gateway.client.get("/dashboard/api/budgets", headers=ADMIN).json()
    for one in budgets:
        mine = sum(row["cost"] or 0 for row in everything if row["tenant"] == one["tenant"])
        lookup = sum(row["lookup"] for row in everything if row["tenant"] == one["tenant"])
        assert one["spent"] == pytest.approx(mine - lookup, abs=1e-8), "what providers charge"


@pytest.mark.parametrize(
    "query", ["by=user", "by=number", "by=tenant;drop", "last=0", "last=-1", "from=5&to=4", "step=7", "format=xml"]
)
def test_wrong_questions_are_told_so(gateway: Gateway, query: str) -> None:
    assert gateway.client.get(f"/dashboard/api/totals?{query}", headers=ADMIN).status_code == 422


def test_why_it_missed_is_told(gateway: Gateway, fresh: None) -> None:
    gateway.chat("Is it safe to swim in the lake?", of("acme"), temperature=0)
    reply = gateway.chat("Is it not safe to swim in the lake?", of("acme"), temperature=0)
    number = row_of(gateway, reply)["number"]
    told = gateway.client.get(f"/dashboard/api/requests/{number}", headers=ADMIN).json()
    assert "one is negated" in " ".join(told["why"]), told
    assert told["entry_question"] == "Is it safe to swim in the lake?"


def test_what_operators_change_is_noted(gateway: Gateway) -> None:
    gateway.client.post("/admin/cache/purge", json={"tag": "none-has-it"}, headers=ADMIN)
    gateway.client.post("/admin/cache/purge", json={}, headers=ADMIN)
    gateway.client.post("/admin/cache/feedback", json={"entry": "0" * 16, "question": "private"}, headers=ADMIN)
    gateway.client.post("/admin/cache/purge", json={"all": True}, headers=of("acme"))
    noted = gateway.client.get("/admin/audit", headers=ADMIN).json()
    assert [one["outcome"] for one in noted[:3]] == ["refused (404)", "refused (400)", "done"], (
        "strangers change nothing"
    )
    assert noted[2]["detail"] == '{"tag":"none-has-it"}' and noted[2]["action"] == "/admin/cache/purge"
    wrong = {"entry": "abcdefab", "Question": "my private text", "api_key": "sk-secret"}
    assert gateway.client.post("/admin/cache/feedback", json=wrong, headers=ADMIN).status_code == 422
    noted = gateway.client.get("/admin/audit", headers=ADMIN).json()
    assert noted[0]["outcome"] == "refused (422)" and "sk-secret" not in str(noted)
    assert "private" not in str(noted) and "the-admin-key" not in str(noted)
    path = gateway.folder / "tenants" / "new.yaml"
    path.write_text("tenant: new\n")
    assert eventually(lambda: any("new: new" in one["detail"] for one in _audit(gateway)))


def test_a_stale_answer_and_its_refresh_are_one_answer_of_the_bill(upstream: FakeServer, tmp_path: Path) -> None:
    upstream.app.script, upstream.app.scripts = Script(), []
    config = f"backends: {{up: {{kind: openai, url: '{upstream.url}'}}}}\nmodels: {{m: {{try: [up]}}}}\n"
    config += "cache: {semantic: false, ttl: 300ms, stale_while_revalidate: 1h}\n"
    config += "prices: {m: {input: 10 USD/M, cached: 1 USD/M, output: 100 USD/M}}\n"
    server = Gateway(tmp_path, config)
    server.chat("twice", temperature=0)
    time.sleep(0.5)
    assert server.chat("twice", temperature=0).headers["x-hitherto-cache"] == "stale"
    assert eventually(lambda: _total(server)["parts"] == 3)
    total = _total(server)
    assert total["cost"] == pytest.approx(2 * PAID) and total["cold"] == pytest.approx(2 * COLD)
    server.stop()


def _total(gateway: Gateway) -> dict[str, Any]:
    """Empty while nothing is booked."""
    rows: list[dict[str, Any]] = gateway.client.get("/dashboard/api/totals").json()["rows"]
    return rows[0] if rows else {}


def _audit(gateway: Gateway) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = gateway.client.get("/admin/audit", headers=ADMIN).json()
    return found


def command(gateway: Gateway, *arguments: str, key: str = "the-admin-key") -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "COLUMNS": "200", "HITHERTO_ADMIN_KEY": key}
    environment["LEDGER_TEST_ADMIN"] = "the-admin-key"
    return subprocess.run(
        [sys.executable, "-m", "gateway.cli", *arguments], cwd=gateway.folder, env=environment,
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_reports_on_the_command_line(gateway: Gateway) -> None:
    told = command(gateway, "report", "--by", "tenant", "--since", "7d", "--url", gateway.url)
    assert told.returncode == 0, told.stderr
    assert "acme" in told.stdout and "globex" in told.stdout and "spent instead of" in told.stdout
    mine = command(gateway, "report", "--by", "tenant,cache", "--csv", "--url", gateway.url, key=KEYS["acme"])
    table = list(csv.DictReader(io.StringIO(mine.stdout)))
    assert {line["tenant"] for line in table} == {"acme"} and {"exact", "miss"} <= {line["cache"] for line in table}
    wrong = command(gateway, "report", "--by", "nonsense", "--url", gateway.url)
    assert wrong.returncode == 2 and "by" in wrong.stderr and len(wrong.stderr.splitlines()) == 1
    assert command(gateway, "report", "--since", "yesterdayish", "--url", gateway.url).returncode == 2
    refused = command(gateway, "report", "--url", gateway.url, key="nobody")
    assert refused.returncode == 2 and "HITHERTO_ADMIN_KEY" in refused.stderr


def test_prices_tenants_breakers_and_the_audit_on_the_command_line(gateway: Gateway) -> None:
    told = command(gateway, "price", "m", "gpt-5-mini", "--url", gateway.url)
    assert told.returncode == 0 and "$10/M" in told.stdout and "$0.25/M" in told.stdout
    assert command(gateway, "price", "no-such-model-at-all", "--url", gateway.url).returncode == 1
    assert "acme" in command(gateway, "tenants", "--url", gateway.url).stdout
    assert (
        "closed" in command(gateway, "breakers", "--url", gateway.url).stdout
        or "none" in command(gateway, "breakers", "--url", gateway.url).stdout
    )
    assert command(gateway, "reload", "--url", gateway.url).returncode == 0
    made = command(gateway, "keys", "new", "acme", "--config", str(gateway.folder / "keys.yaml"))
    assert made.returncode == 2, "that file is not there"
    assert "/admin/reload" in command(gateway, "audit", "--url", gateway.url).stdout


SSE = (("content-type", "text/event-stream"),)


def test_a_buffered_stream_stays_whole(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    """Some proxies send a stream with its length, which is another one without the usage."""
    text = b'data: {"choices":[{"index":0,"delta":{"content":"hi"},"finish_reason":"stop"}],"usage":null}\n\n'
    told = (
        b'data: {"choices":[],"usage":{"prompt_tokens":5,"completion_tokens":1,"total_tokens":6}}\n\ndata: [DONE]\n\n'
    )
    upstream.app.script = Script(raw=text + told, headers=(*SSE, ("etag", '"x"')))
    reply = gateway.chat("with a length", of("acme"), stream=True)
    assert reply.text.count("data:") == 2 and "usage" not in reply.text and "etag" not in reply.headers
    assert row_of(gateway, reply)["prompt"] == 5


def test_another_gateway_behind_us_does_not_speak_for_us(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    told = {"x-hitherto-cost-usd": "9", "x-hitherto-cache": "exact", "x-hitherto-cached-tokens": "7", "x-other": "1"}
    upstream.app.script = Script(headers=tuple(told.items()))
    reply = gateway.chat("in a chain", of("acme"), temperature=0)
    assert reply.headers.get_list("x-hitherto-cost-usd") == [f"{row_of(gateway, reply)['cost']:.9f}"]
    assert reply.headers["x-hitherto-cache"] == "miss"
    assert (reply.headers["x-hitherto-cached-tokens"], reply.headers["x-other"]) == ("7", "1")


def test_a_stream_that_begins_with_an_error_costs_nothing(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    upstream.app.script = Script(raw=b'data: {"error":{"message":"overloaded","type":"x"}}\n\n', headers=SSE)
    reply = gateway.chat("an error at once", of("acme"), stream=True)
    row = row_of(gateway, reply)
    assert (row["prompt"], row["completion"]) == (0, 0) and row["cost"] == row["lookup"]


def test_pictures_are_not_counted_by_their_size(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    usage = b'"usage":{"input_tokens":50,"output_tokens":4160,"total_tokens":4210}}'
    for size, prompt in ((100, 50), (5 << 20, 50)):
        raw = b'{"created":1,"data":[{"b64_json":"' + b"A" * size + b'"}],' + usage
        upstream.app.script = Script(raw=raw, headers=(("content-type", "application/json"),))
        reply = gateway.client.post(
            "/v1/images/generations", json={"model": "m", "prompt": "a lake"}, headers=of("globex")
        )
        row = row_of(gateway, reply)
        assert (row["prompt"], row["completion"], row["estimated"]) == (prompt, 4160, False), size
    upstream.app.script = Script(raw=raw.replace(b"usage", b"other"), headers=(("content-type", "application/json"),))
    reply = gateway.client.post("/v1/images/generations", json={"model": "m", "prompt": "x"}, headers=of("globex"))
    assert row_of(gateway, reply)["completion"] == 0


def test_more_cached_than_asked_and_a_lost_try(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    details = {"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 99}}
    answer = {"object": "chat.completion", "choices": [], "usage": details}
    upstream.app.scripts = [Script(text="x", cut_after=0), Script(raw=orjson.dumps(answer))]
    reply = gateway.chat("odd cache", of("acme"))
    assert reply.status_code == 200
    row = row_of(gateway, reply)
    assert (row["prompt"], row["cached"]) == (3, 3)
    lost = rows(gateway, request=reply.headers["x-request-id"], part="attempt")
    assert [(one["prompt"], one["cached"], one["reason"]) for one in lost] == [(3, 3, "interrupted")]


def test_an_embedding_of_absurd_size_stops_no_booking(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    data = b'"data":[{"object":"embedding","index":0,"embedding":[1]}]'
    for digits in (b"9" * 20, b"9" * 5000):
        upstream.app.script = Script(raw=b'{"object":"list",' + data + b',"usage":{"prompt_tokens":' + digits + b"}}")
        body = {"model": "m", "input": f"text {len(digits)}"}
        reply = gateway.client.post("/v1/embeddings", json=body, headers=of("acme"))
        assert reply.status_code == 200 and row_of(gateway, reply)["prompt"] < 1000


def test_long_names_are_cut(gateway: Gateway, fresh: None) -> None:
    reply = gateway.chat("x", of("acme"), model="m" * 10_000)
    assert reply.status_code == 404 and len(row_of(gateway, reply)["asked"]) == 200


def test_odd_numbers_from_a_provider_do_no_harm(gateway: Gateway, upstream: FakeServer, fresh: None) -> None:
    usage = b'{"prompt_tokens": 1e30, "completion_tokens": -5, "total_tokens": 99999999999999999999999999}'
    upstream.app.script = Script(raw=b'{"object":"chat.completion","choices":[],"usage":' + usage + b"}")
    assert gateway.chat("odd", of("acme")).status_code == 200
    usage = b'{"prompt_tokens": 4611686018427387904, "completion_tokens": 4611686018427387904}'
    upstream.app.script = Script(raw=b'{"object":"chat.completion","choices":[],"usage":' + usage + b"}")
    reply = gateway.chat("odder", of("globex"))
    assert reply.status_code == 200
    assert row_of(gateway, reply)["prompt"] <= 1 << 40
    gateway.client.post("/admin/reload", headers=ADMIN)


# --- crashes ---------------------------------------------------------------------------------------------------


def test_a_crash_loses_nothing_of_what_was_booked(upstream: FakeServer, tmp_path: Path) -> None:
    """And what was answered is booked at once, while more answers come."""
    upstream.app.script, upstream.app.scripts = Script(), []
    config = f"cache: {{semantic: false}}\nbackends: {{up: {{kind: openai, url: '{upstream.url}'}}}}\n"
    server = Gateway(tmp_path, config + "models: {m: {try: [up]}}\n")
    answered: list[str] = []

    def ask() -> None:
        with contextlib.suppress(httpx.HTTPError):
            while True:
                answered.append(server.chat(f"question {len(answered)}", temperature=0).headers["x-request-id"])

    def booked() -> set[str]:
        with contextlib.closing(sqlite3.connect(tmp_path / "data" / "ledger.sqlite")) as connection:
            return {row[0] for row in connection.execute("SELECT request FROM rows")}

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    waited = []
    try:
        for goal in range(10, 110, 10):
            assert eventually(lambda: len(answered) >= goal, 60)  # noqa: B023
            given, began = {*answered}, time.monotonic()
            assert eventually(lambda: given <= booked())  # noqa: B023
            waited.append(time.monotonic() - began)
        owed = booked()
    finally:
        server.process.kill()
        asking.join(60)
    server.stop()
    assert owed <= booked() and len(owed) >= 100
    assert min(waited) < 0.2, "a tenth of a second, in at least one of ten where the machine does not stall"


def test_a_stop_loses_nothing_and_a_restart_goes_on(upstream: FakeServer, tmp_path: Path) -> None:
    upstream.app.script, upstream.app.scripts = Script(), []
    config = f"cache: {{semantic: false}}\nbackends: {{up: {{kind: openai, url: '{upstream.url}'}}}}\n"
    config += "models: {m: {try: [up]}}\n"
    for number in range(2):
        server = Gateway(tmp_path, config)
        for question in range(3):
            server.chat(f"{number} {question}", temperature=0)
        server.stop()
    with sqlite3.connect(tmp_path / "data" / "ledger.sqlite") as connection:
        assert connection.execute("SELECT count(*) FROM rows").fetchone()[0] == 6


def test_a_ledger_that_cannot_be_used_stops_no_request(upstream: FakeServer, tmp_path: Path) -> None:
    upstream.app.script, upstream.app.scripts = Script(), []
    (tmp_path / "data").mkdir()
    broken = tmp_path / "data" / "ledger.sqlite"
    broken.write_bytes(b"this is no database, but it may be the only account of what was spent" * 100)
    config = f"cache: {{semantic: false}}\nbackends: {{up: {{kind: openai, url: '{upstream.url}'}}}}\n"
    server = Gateway(tmp_path, config + "models: {m: {try: [up]}}\n")
    assert server.chat("all the same").status_code == 200
    assert "nothing is booked" in server.client.get("/ready").json()["notes"]["ledger"]
    assert server.client.get("/dashboard/api/totals").status_code == 404
    assert broken.read_bytes().startswith(b"this is no database"), "left as it is"
    server.stop()


def test_several_workers_book_into_one_ledger(upstream: FakeServer, tmp_path: Path) -> None:
    upstream.app.script, upstream.app.scripts = Script(), []
    config = f"cache: {{semantic: false}}\nbackends: {{up: {{kind: openai, url: '{upstream.url}'}}}}\n"
    server = Gateway(tmp_path, config + "models: {m: {try: [up]}}\n", "--workers", "2")
    for number in range(30):
        with httpx.Client(base_url=server.url, trust_env=False) as client:  # a connection each, so that both get some
            body = {"model": "m", "messages": [{"role": "user", "content": f"{number}"}]}
            assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert eventually(lambda: _total(server).get("requests") == 30)
    server.stop()
