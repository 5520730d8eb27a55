"""A provider keeps its own bill over ten thousand mixed requests; the ledger equals it."""

from __future__ import annotations

import asyncio
import collections
import random
import sqlite3
import time
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from backends.fake import Served
from backends.fake_provider import Charge, Habits, Provider
from policies.pricing import Price, cost, nano
from tests.conftest import Gateway, eventually, tenant_file

REQUESTS = 10_000
TENANTS = ("acme", "globex", "initech")
PRICES = {
    "a-model": {"input": "0.25 USD/M", "cached": "0.025 USD/M", "output": "2 USD/M"},
    "b-model": {"input": "1 USD/M", "cached": "0.1 USD/M", "written": "1.25 USD/M", "output": "5 USD/M"},
    "vectors": {"input": "0.13 USD/M"},
}
CONFIG = """
tenants: tenants
cache: {{semantic: false}}
backends:
  a: {{kind: openai, url: "{a}"}}
  b: {{kind: openai, url: "{b}"}}
  c: {{kind: anthropic, url: "{b}"}}
models:
  steady:  {{try: [{{backend: a, model: a-model}}], retry: {{attempts: 3, within: 20s}}}}
  falling: {{try: [{{backend: a, model: a-model}}, {{backend: b, model: b-model}}], retry: {{attempts: 2}}}}
  hedged:  {{try: [{{backend: a, model: a-model}}, {{backend: b, model: b-model}}], hedge: 40ms}}
  hasty:   {{try: [{{backend: a, model: a-model}}, {{backend: b, model: b-model}}], timeout: {{first_byte: 60ms}}}}
  claude:  {{try: [{{backend: c, model: b-model}}]}}
  vectors: {{try: [a]}}
breakers: {{"*": false}}
prices:
"""


def key_of(tenant: str) -> str:
    return f"key-of-{tenant}"


@pytest.fixture(scope="module")
def providers() -> Iterator[tuple[Provider, Provider]]:
    habits = Habits(first=0.001, token=0.0005, slow=0.06, slow_by=0.12, failing=0.05, cutting=0.03)
    with Served(Provider(habits, seed=1)) as a, Served(Provider(habits, seed=2)) as b:
        a.app.url, b.app.url = a.url, b.url  # type: ignore[attr-defined]
        yield a.app, b.app


@pytest.fixture(scope="module")
def gateway(providers: tuple[Provider, Provider], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    for tenant in TENANTS:
        tenant_file(folder, tenant, key_of(tenant), "budget: {per_month: 1000 USD}")
    a, b = providers
    config = CONFIG.format(a=a.url, b=b.url)  # type: ignore[attr-defined]
    for name, price in PRICES.items():
        config += f"  {name}: {{{', '.join(f'{kind}: {rate}' for kind, rate in price.items())}}}\n"
    server = Gateway(folder, config)
    yield server
    server.stop()


def request_of(draw: random.Random) -> tuple[str, dict[str, Any]]:
    """A path and a body. Many of the questions were asked before; most have a system prompt that others have, too."""
    system = f"You are assistant number {draw.randrange(8)}. " + "Answer briefly and kindly. " * 12
    number = draw.randrange(40) if draw.random() < 0.5 else draw.randrange(10**9)
    question = f"Please tell me everything about topic number {number}, in simple words."
    kind = draw.choices(["steady", "falling", "hedged", "hasty", "claude", "vectors"], [30, 25, 15, 10, 10, 10])[0]
    if kind == "vectors":
        return "/v1/embeddings", {"model": kind, "input": [question, f"and number {draw.randrange(3000)}"]}
    stream = draw.random() < 0.6
    body: dict[str, Any] = {"model": kind, "messages": [{"role": "user", "content": question}], "stream": stream}
    if kind == "claude":
        return "/v1/messages", {**body, "system": system, "max_tokens": 100}
    body["messages"].insert(0, {"role": "system", "content": system})
    if stream and draw.random() < 0.3:
        body["stream_options"] = {"include_usage": True}
    return "/v1/chat/completions", body


async def load(url: str) -> collections.Counter[str]:
    """Send everything, some of it given up early; what became of it."""
    draw, seen = random.Random(7), collections.Counter[str]()
    todo = iter([(number, *request_of(draw), draw.random()) for number in range(REQUESTS)])

    async def one(session: aiohttp.ClientSession, number: int, path: str, body: dict[str, Any], fate: float) -> None:
        headers = {"authorization": f"Bearer {key_of(TENANTS[number % 3])}", "x-request-id": f"r{number}"}
        limit = aiohttp.ClientTimeout(total=0.003 + fate) if fate < 0.02 else aiohttp.ClientTimeout(total=60)
        sent = asyncio.Event()
        post = session.post(url + path, json=body, headers=headers, timeout=limit, trace_request_ctx=sent)
        try:
            async with post as response:
                seen[f"{response.status} {response.headers.get('x-hitherto-cache', '-')}"] += 1
                if 0.02 <= fate < 0.04 and body.get("stream"):
                    await response.content.readany()
                    response.close()  # in the middle of the answer
                    return
                await response.read()
        except (TimeoutError, aiohttp.ClientError) as error:
            if fate < 0.02 and not sent.is_set():  # on a machine that stalls it may have been given up before it left
                await one(session, number, path, body, 1.0)
                return
            seen[type(error).__name__] += 1

    async def worker(session: aiohttp.ClientSession) -> None:
        for number, path, body, fate in todo:
            await one(session, number, path, body, fate)

    async def leaves(_: aiohttp.ClientSession, context: Any, __: aiohttp.TraceRequestChunkSentParams) -> None:
        context.trace_request_ctx.set()

    tracing = aiohttp.TraceConfig()
    tracing.on_request_chunk_sent.append(leaves)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, trace_configs=[tracing]) as session:
        await asyncio.gather(*(worker(session) for _ in range(48)))
    return seen


def amount(charge: Charge) -> int:
    """What the provider wants for a line of its bill, in billionths of a dollar."""
    return nano(cost(charge.usage, Price.model_validate(PRICES[charge.model])))


def rows_of(folder: Path) -> list[dict[str, Any]]:
    connection = sqlite3.connect(folder / "data" / "ledger.sqlite")
    connection.row_factory = sqlite3.Row
    return [dict(row) for row in connection.execute("SELECT * FROM rows")]


def idle(gateway: Gateway) -> bool:
    """Every request is booked, no backend is asked any more, and nothing more is booked for a second."""
    rows = rows_of(gateway.folder)
    answers = sum(row["part"] == "answer" for row in rows)
    busy = sum(int(one["in_flight"]) for one in gateway.client.get("/admin/breakers").json())
    time.sleep(1.0)
    return answers == REQUESTS and not busy and len(rows_of(gateway.folder)) == len(rows)


def test_the_ledger_equals_the_providers_bill(gateway: Gateway, providers: tuple[Provider, Provider]) -> None:
    seen = asyncio.run(load(gateway.url))
    assert eventually(lambda: idle(gateway), 60)
    bill, rows = [*providers[0].bill, *providers[1].bill], rows_of(gateway.folder)
    charged, booked = collections.Counter[str](), collections.Counter[str]()
    for charge in bill:
        charged[charge.request] += amount(charge)
    guessed = {row["request"] for row in rows if row["estimated"]}
    for row in rows:
        assert row["cost"] is not None, row
        booked[row["request"]] += row["cost"]
    answers = [row for row in rows if row["part"] == "answer"]
    print(dict(seen), f"{len(rows)} rows, {len(guessed)} requests with guesses")
    assert len(answers) == REQUESTS, "one row for every request"
    assert len({row["request"] for row in answers}) == REQUESTS

    # What the provider told: equal to the last billionth, request by request.
    wrong = {one for one in charged | booked if one not in guessed and charged[one] != booked[one]}
    assert not wrong, [(one, charged[one], booked[one], [r for r in rows if r["request"] == one]) for one in wrong][:3]
    assert sum(amount(charge) for charge in bill if charge.request not in guessed) > 0.8 * sum(charged.values())

    # What it did not tell, because its answer was given up or broke off: guessed, and said so. Nobody can know what a
    # provider had ready when it was left.
    theirs, ours = sum(charged[one] for one in guessed), sum(booked[one] for one in guessed)
    print(f"guessed {ours / 1e9:.6f} USD of {theirs / 1e9:.6f}; all {sum(charged.values()) / 1e9:.6f} USD")
    assert abs(ours - theirs) < 0.3 * theirs
    assert 100 < len(guessed) < REQUESTS / 4
    for kind in ("abandoned", "timeout"):
        assert any(row["part"] == "attempt" and row["reason"] == kind for row in rows), kind

    # To the cent, with all guesses in it.
    total = Decimal(sum(charged.values())) / 10**9, Decimal(sum(booked.values())) / 10**9
    print("total", total)
    assert abs(total[0] - total[1]) < Decimal("0.01")


def test_tenants_and_roll_ups_add_up_to_the_whole(gateway: Gateway) -> None:
    rows = rows_of(gateway.folder)
    by_tenant = collections.Counter[str]()
    for row in rows:
        by_tenant[row["tenant"]] += row["cost"]
    assert set(by_tenant) == set(TENANTS)
    connection = sqlite3.connect(gateway.folder / "data" / "ledger.sqlite")
    for span in (60, 3600, 86400):
        sums = "SELECT tenant, sum(cost), sum(requests), sum(parts) FROM totals WHERE span = ? GROUP BY tenant"
        found = {row[0]: row[1:] for row in connection.execute(sums, (span,))}
        for tenant in TENANTS:
            mine = [row for row in rows if row["tenant"] == tenant]
            answers = sum(row["part"] == "answer" for row in mine)
            assert found[tenant] == (by_tenant[tenant], answers, len(mine))
    money = sqlite3.connect(gateway.folder / "data" / "money.sqlite")
    spent = dict(money.execute("SELECT account, amount FROM spent"))
    assert {account.partition("|")[0]: amount for account, amount in spent.items()} == by_tenant, "budgets, too"


def test_hits_cost_nothing_and_save_what_they_would_have_cost(gateway: Gateway) -> None:
    hits = [row for row in rows_of(gateway.folder) if row["cache"] == "exact" and row["surface"] == "openai-chat"]
    assert len(hits) > 100
    for row in hits:
        assert row["cost"] == 0 and row["prompt"] == row["completion"] == 0
        price = Price.model_validate(PRICES["a-model"])
        assert row["saved_answer"] == row["avoided_prompt"] * nano(price.input) + row["avoided_completion"] * nano(
            price.output
        )
