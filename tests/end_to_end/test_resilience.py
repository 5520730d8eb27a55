"""What happens when a backend is slow, dead, flapping, limited, broken, cut, malformed or endless."""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually

Two = tuple[FakeServer, FakeServer]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


CONFIG = """
backends:
  first: {{kind: openai, url: "{first}"}}
  second: {{kind: openai, url: "{second}"}}
  dead: {{kind: openai, url: "http://127.0.0.1:{dead}/v1"}}
models:
  both: {{try: [first, second], retry: {{attempts: 1}}}}
  again: {{try: [first], retry: {{attempts: 3, within: 5s}}}}
  once: {{try: [first], retry: {{attempts: 1}}}}
  quick: {{try: [first, second], retry: {{attempts: 1}}, timeout: {{first_byte: 3s}}}}
  bounded: {{try: [first], retry: {{attempts: 1}}, timeout: {{total: 700ms}}}}
  endless: {{try: [first], retry: {{attempts: 1}}, timeout: {{total: 3s}}}}
  gone: {{try: [dead, second]}}
  late: {{try: [first, dead], retry: {{attempts: 2, within: 4s}}}}
  twice: {{try: [first, second], retry: {{attempts: 2, within: 4s}}}}
  drained: {{try: [{{backend: first, weight: 0}}, second], retry: {{attempts: 1}}}}
  fresh: {{try: [first, second], hedge: 100ms, retry: {{attempts: 1}}}}
  hedged: {{try: [first, second], hedge: 200ms}}
  rarely: {{try: [first, second], hedge: 200ms}}
  small: {{try: [{{backend: first, context: 300, lacks: [images]}}, {{backend: second, lacks: [tools]}}]}}
  shared: {{try: [{{backend: first, weight: 1}}, {{backend: second, weight: 1}}]}}
  fastest: {{try: [{{backend: first, weight: 1}}, {{backend: second, weight: 1}}], choose: fastest}}
cache: {{semantic: false}}
breakers: {{"*": false}}
"""


@pytest.fixture(scope="module")
def two() -> Iterator[Two]:
    with FakeServer() as first, FakeServer() as second:
        yield first, second


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, two: Two) -> Iterator[Gateway]:
    text = CONFIG.format(first=two[0].url, second=two[1].url, dead=free_port())
    running = Gateway(tmp_path_factory.mktemp("resilience"), text)
    yield running
    assert running.stop() == 0


@pytest.fixture(autouse=True)
def both_well(two: Two) -> None:
    for server in two:
        server.app.seen.clear()
        server.app.script, server.app.scripts = Script(text=f"from {server.url}"), []


def ask(gateway: Gateway, model: str, content: object = None, **fields: Any) -> httpx.Response:
    return gateway.chat(content or f"{model} {time.time_ns()}", model=model, temperature=0, **fields)


SICK = {
    "dead": Script(cut_after=0),
    "429": Script(status=429),
    "500": Script(status=500),
    "503": Script(status=503),
    "529": Script(status=529),
    "unauthorised": Script(status=401),
    "cut before its first word": Script(cut_after=0, chunk_delay=0.01),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("script", SICK.values(), ids=SICK)
def test_a_sick_backend_is_fallen_back_from(gateway: Gateway, two: Two, script: Script, stream: bool) -> None:
    two[0].app.script = script
    reply = ask(gateway, "both", stream=stream)
    assert reply.status_code == 200 and two[1].url in reply.text, reply.text
    assert reply.headers["x-hitherto-backend"] == "second"


def test_a_body_that_breaks_off_is_asked_for_elsewhere_while_nothing_was_passed_on(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(text="a long answer " * 50, cut_after=100)
    reply = ask(gateway, "both")
    assert reply.status_code == 200 and two[1].url in reply.text


def test_nothing_is_tried_again_after_the_first_byte(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(text="one two three", cut_after=3, chunk_delay=0.05)
    reply = ask(gateway, "both", stream=True)
    assert "one" in reply.text and "upstream_interrupted" in reply.text
    assert two[1].app.seen == [], "half an answer is not followed by another one"


@pytest.mark.parametrize("status", [400, 404, 409, 422])
def test_a_clients_mistake_is_told_and_not_tried_elsewhere(gateway: Gateway, two: Two, status: int) -> None:
    two[0].app.script = Script(status=status)
    assert ask(gateway, "both").status_code == status
    assert two[1].app.seen == []


def test_what_is_too_long_for_one_may_fit_another(gateway: Gateway, two: Two) -> None:
    told = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'
    two[0].app.script = Script(status=400, raw=told, headers=(("content-type", "application/json"),))
    assert two[1].url in ask(gateway, "both").text
    reply = ask(gateway, "again")
    assert reply.status_code == 400 and reply.content == told
    assert len(two[0].app.seen) == 2, "it will not get shorter by asking again"


def test_a_dead_backend_is_no_error_where_there_is_another(gateway: Gateway, two: Two) -> None:
    assert two[1].url in ask(gateway, "gone").text


def test_a_failure_is_tried_again_after_a_pause(gateway: Gateway, two: Two) -> None:
    two[0].app.scripts = [Script(status=500), Script(status=503)]
    assert ask(gateway, "again").status_code == 200
    assert len(two[0].app.seen) == 3


def test_a_backend_that_says_when_is_not_asked_earlier(gateway: Gateway, two: Two) -> None:
    two[0].app.scripts = [Script(status=429, headers=(("retry-after", "1"),))]
    began = time.monotonic()
    assert ask(gateway, "again").status_code == 200
    assert time.monotonic() - began >= 1.0
    two[0].app.scripts = [Script(status=429, headers=(("retry-after", "60"),))]
    began = time.monotonic()
    reply = ask(gateway, "again")
    assert reply.status_code == 429 and reply.headers["retry-after"] == "60"
    assert time.monotonic() - began < 20.0, "nobody waits a minute where five seconds are allowed"


def test_the_failure_that_says_when_to_come_back_is_told(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(status=429, headers=(("retry-after", "20"),))
    reply = ask(gateway, "late")
    assert reply.status_code == 429 and reply.headers["retry-after"] == "20"
    assert len(two[0].app.seen) == 1, "who said 20 s is not asked again before"


def test_what_one_cannot_take_does_not_keep_others_from_being_asked_again(gateway: Gateway, two: Two) -> None:
    told = b'{"error": {"message": "too long", "code": "context_length_exceeded"}}'
    two[0].app.scripts = [Script(status=500), Script(text="the second time")]
    two[1].app.script = Script(status=400, raw=told, headers=(("content-type", "application/json"),))
    assert "the second time" in ask(gateway, "twice").text
    assert len(two[1].app.seen) == 1, "it will not get shorter"


def test_a_stream_that_begins_with_an_error_is_asked_for_elsewhere(gateway: Gateway, two: Two) -> None:
    for first in (b'data: {"error": {"message": "overloaded"}}\n\n', b"event: error\ndata: {}\n\n"):
        two[0].app.script = Script(raw=first, headers=(("content-type", "text/event-stream"),))
        assert two[1].url in ask(gateway, "both", stream=True).text


def test_who_is_drained_is_asked_last(gateway: Gateway, two: Two) -> None:
    assert ask(gateway, "drained").headers["x-hitherto-backend"] == "second"
    two[1].app.script = Script(status=500)
    assert ask(gateway, "drained").headers["x-hitherto-backend"] == "first"


def test_nothing_stays_counted_when_clients_leave(gateway: Gateway, two: Two) -> None:
    """In a pause between rounds, and while a second candidate is asked after the first has failed."""
    two[0].app.script = Script(status=503, headers=(("retry-after", "2"),))
    two[1].app.script = Script(delay=3)
    for model in ("again", "both", "hedged"):
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": model, "messages": [{"role": "user", "content": f"gone {time.time_ns()}"}]}
            httpx.post(f"{gateway.url}/v1/chat/completions", timeout=0.5, json=body)

    def under_way() -> int:
        return sum(int(one["in_flight"]) for one in gateway.client.get("/admin/breakers").json())

    assert eventually(lambda: under_way() == 0, 5), gateway.client.get("/admin/breakers").text


def test_retries_do_not_multiply_the_load_of_a_storm(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(status=500)
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(lambda _: ask(gateway, "again"), range(100)))
    assert 100 < len(two[0].app.seen) <= 100 + 10 + 20 + 25, "a fifth of the requests, and ten; not three times as many"
    two[0].app.script = Script()
    for _ in range(60):  # the budget fills up again
        ask(gateway, "again")


def test_a_slow_first_byte_is_given_up_for_another_backend(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(delay=30)
    began = time.monotonic()
    reply = ask(gateway, "quick")
    assert two[1].url in reply.text and 3.0 <= time.monotonic() - began < 20
    assert eventually(lambda: two[0].app.seen and two[0].app.seen[0].gone), "the slow one need not go on"


def test_all_tries_together_have_an_end(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(delay=30)
    began = time.monotonic()
    reply = ask(gateway, "bounded")
    assert reply.status_code == 504 and reply.json()["error"]["code"] == "upstream_timeout"
    assert time.monotonic() - began < 20


def test_an_endless_stream_ends(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(text="round and round", endless=True, chunk_delay=0.02)
    began = time.monotonic()
    reply = ask(gateway, "endless", stream=True)
    assert "upstream_interrupted" in reply.text and time.monotonic() - began < 20
    assert eventually(lambda: two[0].app.seen[0].gone)


@pytest.mark.parametrize("raw", [b"", b"<html>", b'{"choices": [', b"\xff\xfe", b"data: {\n\n"])
@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
def test_a_malformed_answer_is_passed_on_and_not_kept(gateway: Gateway, two: Two, raw: bytes, kind: str) -> None:
    two[0].app.script = Script(raw=raw, headers=(("content-type", kind),))
    question = f"malformed {raw!r} {kind}"
    for _ in range(2):
        reply = ask(gateway, "once", question)
        assert reply.status_code == 200 and reply.headers["x-hitherto-cache"] == "miss"


def test_a_second_try_beside_a_slow_first_one_wins(gateway: Gateway, two: Two) -> None:
    for _ in range(200):  # that allows ten hedges, of which a slow machine may have needed some by then
        ask(gateway, "hedged")
    won = gateway.metric("hitherto_hedges_total", result="won")
    two[0].app.script = Script(delay=30)
    began = time.monotonic()
    reply = ask(gateway, "hedged")
    assert two[1].url in reply.text and 0.2 <= time.monotonic() - began < 20
    assert eventually(lambda: two[0].app.seen[-1].gone), "the loser is let go"
    assert gateway.metric("hitherto_hedges_total", result="won") == won + 1


def test_a_hedge_that_may_not_be_sent_leaves_the_fallback_for_later(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(delay=0.4, status=500)
    assert ask(gateway, "fresh").headers["x-hitherto-backend"] == "second"


def test_a_backend_that_hangs_is_to_blame_for_the_whole_time(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(delay=3)
    ask(gateway, "bounded")
    (first,) = [one for one in gateway.client.get("/admin/breakers").json() if one["place"] == "first"]
    found = re.search(r"no first byte within (\d+\.\d) s", first["last_failure"])
    assert found is not None and float(found[1]) >= 0.7


def test_hedges_are_a_small_share_of_all(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(delay=0.4)
    sent = gateway.metric("hitherto_hedges_total", result="sent")
    with ThreadPoolExecutor(20) as pool:
        statuses = list(pool.map(lambda _: ask(gateway, "rarely").status_code, range(60)))
    assert statuses == [200] * 60
    assert gateway.metric("hitherto_hedges_total", result="sent") - sent <= 5
    assert len(two[1].app.seen) <= 5


def test_who_cannot_do_it_is_not_asked(gateway: Gateway, two: Two) -> None:
    parts = [{"type": "text", "text": "?"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]
    image = [{"role": "user", "content": parts}]
    assert ask(gateway, "small", max_tokens=5).headers["x-hitherto-backend"] == "first"
    assert ask(gateway, "small", image, max_tokens=5).headers["x-hitherto-backend"] == "second"
    assert ask(gateway, "small", "word " * 400, max_tokens=5).headers["x-hitherto-backend"] == "second"
    assert ask(gateway, "small", "hi", max_tokens=400).headers["x-hitherto-backend"] == "second"
    tools = [{"type": "function", "function": {"name": "f"}}]
    refused = ask(gateway, "small", image, max_tokens=5, tools=tools)
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "no_backend_can"
    assert "first has no images; second has no tools" in refused.json()["error"]["message"]


def test_equals_share_the_load_by_conversation_and_their_answers_are_one(gateway: Gateway, two: Two) -> None:
    two[0].app.script = two[1].app.script = Script(text="the same")
    for number in range(40):
        turns = [{"role": "user", "content": f"conversation {number}"}]
        backends = set()
        for turn in range(3):
            backends.add(ask(gateway, "shared", turns).headers["x-hitherto-backend"])
            turns += [{"role": "assistant", "content": "the same"}, {"role": "user", "content": f"more {turn}"}]
        assert len(backends) == 1
    assert min(len(server.app.seen) for server in two) >= 24
    question = f"stored {time.time_ns()}"
    two[0].app.script = Script(text="the same")
    assert [ask(gateway, "shared", question).headers["x-hitherto-cache"] for _ in range(2)] == ["miss", "exact"]
    home = ask(gateway, "shared", "where is it?").headers["x-hitherto-backend"]
    sick = two[0] if home == "first" else two[1]
    sick.app.script = Script(status=500)
    reply = ask(gateway, "shared", "where is it?", seed=1)
    assert reply.status_code == 200 and reply.headers["x-hitherto-backend"] != home
    assert ask(gateway, "shared", "where is it?", seed=1).headers["x-hitherto-cache"] == "exact", "no fallback's answer"


def test_the_faster_of_equals_gets_more(gateway: Gateway, two: Two) -> None:
    two[0].app.script = Script(delay=0.4)
    for _ in range(30):
        ask(gateway, "fastest")
    assert len(two[1].app.seen) > 20


BREAKING = """
backends:
  first: {{kind: openai, url: "{first}"}}
  second: {{kind: openai, url: "{second}"}}
models:
  alone: {{try: [first], retry: {{attempts: 1}}}}
  both: {{try: [first, second], retry: {{attempts: 1}}}}
cache: {{semantic: false, ttl: 50ms, stale_if_error: 1h}}
breakers: {{first: {{in_a_row: 3, pause: 5s, probes: 1, slow: 300ms}}}}
"""


@pytest.fixture
def breaking(tmp_path: Path, two: Two) -> Iterator[Gateway]:
    running = Gateway(tmp_path, BREAKING.format(first=two[0].url, second=two[1].url))
    yield running
    assert running.stop() == 0


def state(gateway: Gateway) -> str:
    return str(next(one["state"] for one in gateway.client.get("/admin/breakers").json() if one["place"] == "first"))


def test_a_breaker_opens_tries_again_and_closes(breaking: Gateway, two: Two) -> None:
    assert ask(breaking, "alone", "kept").status_code == 200
    two[0].app.script = Script(status=500)
    assert [ask(breaking, "alone").status_code for _ in range(3)] == [500] * 3
    assert state(breaking) == "open" and breaking.metric("hitherto_breaker_state", backend="first") == 2
    seen = len(two[0].app.seen)
    reply = ask(breaking, "alone")
    assert reply.status_code == 503 and reply.json()["error"]["code"] == "backends_unavailable"
    assert int(reply.headers["retry-after"]) >= 1
    assert len(two[0].app.seen) == seen, "nobody is sent there"
    assert ask(breaking, "both").headers["x-hitherto-backend"] == "second"
    time.sleep(0.1)
    stale = ask(breaking, "alone", "kept")
    assert stale.status_code == 200 and stale.headers["x-hitherto-cache"] == "stale"
    assert "breaker first" in breaking.client.get("/ready").json()["notes"]
    two[0].app.script = Script()
    assert eventually(lambda: ask(breaking, "alone").status_code == 200, 30) and state(breaking) == "closed"
    lines = [line for line in breaking.log.splitlines() if "the breaker of first is" in line]
    assert len(lines) == 3, "once per change: open, half-open, closed"


def test_slow_first_bytes_of_streams_count_and_clients_mistakes_and_leaving_do_not(breaking: Gateway, two: Two) -> None:
    for script in (Script(status=400), Script(status=404), Script(status=422)):
        two[0].app.script = script
        for _ in range(4):
            ask(breaking, "alone")
    assert state(breaking) == "closed"
    two[0].app.script = Script(delay=3)
    for _ in range(4):
        with pytest.raises(httpx.ReadTimeout):
            body = {"model": "alone", "messages": [{"role": "user", "content": f"gone {time.time_ns()}"}]}
            httpx.post(f"{breaking.url}/v1/chat/completions", timeout=0.2, json=body)
    assert state(breaking) == "closed"
    two[0].app.script = Script(delay=0.4)
    for _ in range(3):
        assert ask(breaking, "alone").status_code == 200, "a whole answer may take its time"
    assert state(breaking) == "closed"
    for _ in range(3):
        ask(breaking, "alone", stream=True)
    assert state(breaking) == "open"


def test_a_limit_on_a_clients_own_key_is_nobody_elses_matter(tmp_path: Path, two: Two) -> None:
    gateway = Gateway(tmp_path, None, "--upstream", two[0].url)
    two[0].app.script = Script(status=429)
    for number in range(15):
        assert gateway.chat(f"limited {number}", {"authorization": "Bearer a"}).status_code == 429
    two[0].app.script = Script()
    assert gateway.chat("hi", {"authorization": "Bearer b"}).status_code == 200
    assert len(two[0].app.seen) == 16, "in front of a client's own retries we do not retry"
    gateway.stop()
