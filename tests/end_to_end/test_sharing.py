"""Identical requests at the same time make one upstream call, and everybody gets the answer in the shape asked for."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from backends.fake import FakeServer, Script
from gateway.cache.lease import PATIENCE
from tests.conftest import Gateway, comes, eventually, held

KEY = {"authorization": "Bearer sk-client"}
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, upstream: FakeServer) -> Iterator[Gateway]:
    gateway = Gateway(tmp_path_factory.mktemp("sharing"), None, "--upstream", upstream.url)
    yield gateway
    assert gateway.stop() == 0
    assert "Traceback" not in gateway.log and "never retrieved" not in gateway.log


@pytest.fixture
def gateway(running: Gateway, upstream: FakeServer) -> Gateway:
    upstream.app.script, upstream.app.scripts, upstream.app.seen = Script(), [], []
    return running


def body(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": "m", "temperature": 0, "messages": [{"role": "user", "content": text}], **fields}


async def many(gateway: Gateway, bodies: list[dict[str, Any]], headers: dict[str, str] = KEY) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False, limits=limits) as client:
        asked = [client.post("/v1/chat/completions", json=item, headers=headers) for item in bodies]
        return list(await asyncio.gather(*asked))


def text_of(reply: httpx.Response) -> str:
    if reply.headers["content-type"].startswith("application/json"):
        return str(reply.json()["choices"][0]["message"]["content"])
    assert reply.text.endswith("data: [DONE]\n\n")
    chunks = [orjson.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("stream", [False, True])
async def test_fifty_identical_cold_requests_are_one_upstream_call(
    gateway: Gateway, upstream: FakeServer, stream: bool
) -> None:
    before = gateway.looked_up()
    upstream.app.script, go = held(text="a shared answer of several words", chunk_delay=0.02)
    question = f"question {next(NUMBERS)}"
    asking = asyncio.create_task(many(gateway, [body(question, stream=stream)] * 50))
    assert await comes(lambda: gateway.looked_up() >= before + 50)
    go.set()
    replies = await asking
    assert len(upstream.app.seen) == 1
    assert {text_of(reply) for reply in replies} == {"a shared answer of several words"}
    collapsed = [reply for reply in replies if "collapsed" in reply.headers["cache-status"]]
    assert len(collapsed) == 49 and all(reply.headers["x-hitherto-reason"] == "collapsed" for reply in collapsed)
    assert gateway.metric("hitherto_flights_total", role="follower") >= 49


@pytest.mark.parametrize("first_streams", [False, True])
async def test_json_and_streams_of_one_question_are_one_upstream_call(
    gateway: Gateway, upstream: FakeServer, first_streams: bool
) -> None:
    before = gateway.looked_up()
    upstream.app.script, go = held(text="one answer in two shapes", chunk_delay=0.02)
    question = f"question {next(NUMBERS)}"
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    whole, streamed = body(question), body(question, **usage)
    first, second = (streamed, whole) if first_streams else (whole, streamed)
    leading = asyncio.create_task(many(gateway, [first] * 3))
    assert await comes(lambda: upstream.app.seen)
    following = asyncio.create_task(many(gateway, [second] * 5 + [first] * 2))
    assert await comes(lambda: gateway.looked_up() >= before + 10)
    go.set()
    replies = [*await leading, *await following]
    assert len(upstream.app.seen) == 1
    assert {text_of(reply) for reply in replies} == {"one answer in two shapes"}
    for reply in replies:
        if reply.headers["content-type"].startswith("text/event-stream"):
            assert '"completion_tokens":' in reply.text


async def test_who_waits_for_another_shape_in_vain_asks_for_itself(gateway: Gateway, upstream: FakeServer) -> None:
    before = gateway.looked_up()
    cut, go = held(text="cut", finish="length")
    upstream.app.scripts = [cut, Script(text="whole")]
    question = f"question {next(NUMBERS)}"
    leading = asyncio.create_task(many(gateway, [body(question)]))
    assert await comes(lambda: upstream.app.seen)
    waiting = asyncio.create_task(many(gateway, [body(question, stream=True)]))
    assert await comes(lambda: gateway.looked_up() >= before + 2)
    go.set()
    (reply,) = await waiting
    assert text_of(reply) == "whole" and text_of((await leading)[0]) == "cut"
    # A stream that does not tell its usage is of no use to somebody who must have it, so nobody waits for it.
    slow, go = held()
    upstream.app.scripts = [slow, Script(text="at once")]
    question = f"question {next(NUMBERS)}"
    leading = asyncio.create_task(many(gateway, [body(question, stream=True)]))
    assert await comes(lambda: len(upstream.app.seen) == 3)
    began = time.monotonic()
    (reply,) = await many(gateway, [body(question)])
    assert text_of(reply) == "at once" and not leading.done() and time.monotonic() - began < PATIENCE
    go.set()
    await leading


async def test_different_questions_tenants_and_models_share_nothing(gateway: Gateway, upstream: FakeServer) -> None:
    before = gateway.looked_up()
    upstream.app.script, go = held()
    question = f"question {next(NUMBERS)}"
    asking = asyncio.gather(
        many(gateway, [body(question)] * 2),
        many(gateway, [body(question, model="other")] * 2),
        many(gateway, [body(question + "?")] * 2),
        many(gateway, [body(question)] * 2, {"authorization": "Bearer sk-other"}),
        many(gateway, [body(question)] * 2, {**KEY, "cache-control": "no-cache"}),
    )
    assert await comes(lambda: gateway.looked_up() >= before + 10)
    go.set()
    groups = await asking
    assert all(reply.status_code == 200 for group in groups for reply in group)
    assert len(upstream.app.seen) == 4 + 2, "no-cache asks for an answer of its own"


async def test_the_first_client_may_leave(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script = Script(text="still here", chunk_delay=1.0)
    before, followers = gateway.looked_up(), gateway.metric("hitherto_flights_total", role="follower")
    asked = body(f"question {next(NUMBERS)}", stream=True)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=30, trust_env=False) as client:
        async with client.stream("POST", "/v1/chat/completions", json=asked, headers=KEY) as first:
            assert first.status_code == 200
            others = asyncio.create_task(many(gateway, [asked] * 5))
            assert await comes(lambda: gateway.looked_up() >= before + 6)
            assert await comes(lambda: gateway.metric("hitherto_flights_total", role="follower") == followers + 5)
            assert not upstream.app.seen[0].finished
        replies = await others
    assert [text_of(reply) for reply in replies] == ["still here"] * 5 and len(upstream.app.seen) == 1
    assert not upstream.app.seen[0].gone


async def test_the_first_client_may_leave_before_there_is_a_head(gateway: Gateway, upstream: FakeServer) -> None:
    before = gateway.looked_up()
    upstream.app.script, go = held(text="worth the wait")
    asked = body(f"question {next(NUMBERS)}")
    first = asyncio.create_task(many(gateway, [asked]))
    assert await comes(lambda: upstream.app.seen)
    others = asyncio.create_task(many(gateway, [asked] * 5))
    assert await comes(lambda: gateway.looked_up() >= before + 6)
    told = gateway.log.count('"client_gone":true')
    first.cancel()
    assert await comes(lambda: gateway.log.count('"client_gone":true') > told)
    go.set()
    replies = await others
    assert [text_of(reply) for reply in replies] == ["worth the wait"] * 5 and len(upstream.app.seen) == 1


async def test_a_refusal_is_only_for_whoever_was_refused(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.scripts = [Script(status=400, delay=0.3), Script(status=400, delay=0.3)]
    question = f"question {next(NUMBERS)}"
    replies = await many(gateway, [body(question, user=f"u{number}") for number in range(6)])
    assert sorted(reply.status_code for reply in replies) == [200] * 4 + [400] * 2


async def test_when_all_clients_leave_the_upstream_is_told(gateway: Gateway, upstream: FakeServer) -> None:
    before = gateway.looked_up()
    upstream.app.script = Script(text="nobody wants this", endless=True, chunk_delay=0.5)
    asked = body(f"question {next(NUMBERS)}", stream=True)
    tasks = [asyncio.create_task(many(gateway, [asked])) for _ in range(3)]
    assert await comes(lambda: gateway.looked_up() >= before + 3)
    assert await comes(lambda: upstream.app.seen)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert eventually(lambda: upstream.app.seen and upstream.app.seen[0].gone)


async def test_a_failing_upstream_is_asked_twice_and_not_by_everybody(gateway: Gateway, upstream: FakeServer) -> None:
    before = gateway.looked_up()
    upstream.app.script, go = held(status=503, delay=0.2)
    asking = asyncio.create_task(many(gateway, [body(f"question {next(NUMBERS)}")] * 40))
    assert await comes(lambda: gateway.looked_up() >= before + 40)
    go.set()
    replies = await asking
    assert {reply.status_code for reply in replies} == {503} and len(upstream.app.seen) == 2
    upstream.app.seen.clear()
    broken, go = held(status=500)
    upstream.app.scripts, upstream.app.script = [broken], Script(text="second try", delay=0.2)
    asking = asyncio.create_task(many(gateway, [body(f"question {next(NUMBERS)}")] * 40))
    assert await comes(lambda: gateway.looked_up() >= before + 80)
    go.set()
    replies = await asking
    assert sorted(reply.status_code for reply in replies) == [200] * 39 + [500] and len(upstream.app.seen) == 2


async def test_a_thousand_mixed_requests_end_right_or_say_why_not(gateway: Gateway, upstream: FakeServer) -> None:
    """Streams, hang-ups and failures; the answer echoes its question, so that a mix-up would show."""
    chance = random.Random(4)
    upstream.app.scripts = [
        chance.choice([Script(delay=0.02), Script(chunk_delay=0.005), Script(status=500), Script(status=429)])
        for _ in range(400)
    ]
    first = next(NUMBERS) * 1000
    limits = httpx.Limits(max_connections=100)
    outcomes: dict[str, int] = {"right": 0, "refused": 0, "left": 0}

    async def one(client: httpx.AsyncClient) -> None:
        question = f"number {first + chance.randrange(150)}"
        asked = body(question, stream=chance.random() < 0.5)
        patience = 0.01 if chance.random() < 0.15 else 60.0
        try:
            reply = await client.post("/v1/chat/completions", json=asked, headers=KEY, timeout=patience)
        except httpx.TimeoutException:
            outcomes["left"] += 1
            return
        if reply.status_code == 200:
            assert text_of(reply) == f"echo: {question}"
            outcomes["right"] += 1
        else:
            assert reply.status_code in (429, 500) and reply.json()["error"]["message"]
            outcomes["refused"] += 1

    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, limits=limits) as client:
        await asyncio.gather(*(one(client) for _ in range(1000)))
    assert sum(outcomes.values()) == 1000 and outcomes["right"] > 500, outcomes
    assert len(upstream.app.seen) < 700
    upstream.app.scripts = []
    assert gateway.client.post("/v1/chat/completions", json=body("after"), headers=KEY).status_code == 200
