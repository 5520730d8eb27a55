"""How stored answers age, are purged, reported and explained: through a running gateway and the command line."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually, held

pytestmark = pytest.mark.usefixtures("fresh")

CONFIG = """
backends: {{up: {{kind: openai, url: "{url}"}}}}
models: {{m: {{try: [up], retry: {{attempts: 1}}}}, n: {{try: [up], retry: {{attempts: 1}}}}}}
cache:
  semantic: {{threshold: 0.85, deadline: 5s, share_in_flight: true, audit: 0}}
  ttl: {ttl}
  stale_if_error: 60s
  stale_while_revalidate: {revalidate}
  sampling: {sampling}
  volatile: {{weather: 5s}}
"""


def started(
    folder: Path, upstream: FakeServer, ttl: str = "1h", revalidate: str = "0s", sampling: str = "reuse"
) -> Any:
    config = CONFIG.format(url=upstream.url, ttl=ttl, revalidate=revalidate, sampling=sampling)
    return Gateway(folder, config)


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, upstream: FakeServer) -> Iterator[Gateway]:
    gateway = started(tmp_path_factory.mktemp("lifecycle"), upstream)
    yield gateway
    gateway.stop()


def said(reply: httpx.Response) -> tuple[str, str]:
    return reply.headers["x-hitherto-cache"], reply.json()["choices"][0]["message"]["content"]


def test_an_old_answer_serves_when_no_backend_does(tmp_path: Path, upstream: FakeServer) -> None:
    gateway = started(tmp_path, upstream, ttl="300ms")
    upstream.app.script = Script(text="old")
    assert said(gateway.chat("stale?")) == ("miss", "old")
    time.sleep(0.4)
    for broken in (Script(status=500), Script(status=429), Script(status=503)):
        upstream.app.script = broken
        reply = gateway.chat("stale?")
        assert said(reply) == ("stale", "old") and reply.headers["cache-status"].startswith("hitherto; hit; ttl=")
        assert int(reply.headers["cache-status"].split("ttl=")[1].split(";")[0]) <= 0, "past its time"
    streamed = gateway.chat("stale?", stream=True)
    assert streamed.headers["x-hitherto-cache"] == "stale" and streamed.text.endswith("data: [DONE]\n\n")
    assert gateway.chat("stale?", {"cache-control": "max-age=60"}).status_code == 503, "who wants fresh gets the truth"
    assert gateway.chat("never asked").status_code == 503
    upstream.app.script = Script(status=400)
    assert gateway.chat("stale?").status_code == 400, "a refusal is an answer"
    upstream.app.script = Script(text="new")
    assert said(gateway.chat("stale?")) == ("miss", "new")
    gateway.stop()


def test_an_old_answer_serves_while_a_fresh_one_is_computed_once(tmp_path: Path, upstream: FakeServer) -> None:
    gateway = started(tmp_path, upstream, revalidate="60s")
    upstream.app.script = Script(text="old")
    gateway.chat("swr?", {"x-hitherto-ttl": "1s"})
    time.sleep(1.1)
    upstream.app.seen.clear()
    upstream.app.script, go = held(text="new")
    assert [said(gateway.chat("swr?")) for _ in range(5)] == [("stale", "old")] * 5
    go.set()
    assert eventually(lambda: said(gateway.chat("swr?")) == ("exact", "new"), 5)
    assert len(upstream.app.seen) == 1
    gateway.stop()


def test_nobody_refreshes_what_would_not_be_kept(tmp_path: Path, upstream: FakeServer) -> None:
    gateway = started(tmp_path, upstream, ttl="300ms", revalidate="60s")
    gateway.chat("swr, but no store")
    time.sleep(0.4)
    upstream.app.seen.clear()
    for _ in range(3):
        assert said(gateway.chat("swr, but no store", {"cache-control": "no-store"}))[0] == "stale"
    time.sleep(0.3)
    assert upstream.app.seen == []
    gateway.stop()


def test_a_fresh_answer_was_asked_for_and_a_failure_says_so(gateway: Gateway, upstream: FakeServer) -> None:
    gateway.chat("no stale one, please")
    upstream.app.script = Script(status=500)
    assert gateway.chat("no stale one, please", {"cache-control": "no-cache"}).status_code == 500


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-hitherto-ttl": "4s"}, {}),
        ({}, {"cache": {"ttl": 4}}),
        ({"x-portkey-config": '{"cache": {"mode": "simple", "max_age": 4}}'}, {}),
    ],
)
def test_a_ttl_is_in_seconds_in_every_language(
    gateway: Gateway, headers: dict[str, str], fields: dict[str, object]
) -> None:
    text = f"ttl in {sorted(headers)} {sorted(fields)}"
    gateway.chat(text, headers, **fields)
    hit = gateway.chat(text, headers, **fields)
    assert hit.headers["x-hitherto-cache"] == "exact" and re.search("ttl=[0-3];", hit.headers["cache-status"])
    time.sleep(4.05)
    assert gateway.chat(text, headers, **fields).headers["x-hitherto-cache"] == "miss"


def test_variety_comes_from_buckets_in_turn(tmp_path: Path, upstream: FakeServer) -> None:
    gateway = started(tmp_path, upstream, sampling="{buckets: 3}")
    upstream.app.scripts = [Script(text=f"joke {number}") for number in range(5)]
    told = [said(gateway.chat("Tell me a joke", temperature=0.9)) for _ in range(7)]
    assert told == [("miss", f"joke {n}") for n in range(3)] + [("exact", f"joke {n % 3}") for n in range(4)]
    assert [said(gateway.chat("Tell me a joke", temperature=0)) for _ in range(3)] == [
        ("miss", "joke 3"), ("exact", "joke 3"), ("exact", "joke 3")]  # fmt: skip
    gateway.stop()


def test_volatile_answers_are_short_lived_or_not_kept(gateway: Gateway) -> None:
    assert [gateway.chat("What time is it in Oslo?").headers["x-hitherto-cache"] for _ in range(2)] == ["miss", "miss"]
    gateway.chat("What is the weather in Oslo?")
    reply = gateway.chat("What is the weather in Oslo?")
    assert reply.headers["x-hitherto-cache"] == "exact"
    assert re.search("ttl=[0-4];", reply.headers["cache-status"])


def test_a_neighbour_with_the_same_answer_makes_an_alias(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script = Script(text="A fjord is a long, narrow inlet of the sea between cliffs.")
    first = gateway.chat("What is a fjord, and how does one come about?", {"x-hitherto-threshold": "0.99"})
    assert first.headers["x-hitherto-cache"] == "miss"
    strict = {"x-hitherto-threshold": "0.96"}
    question = "Fjord: what is that and how does it come about?"
    assert gateway.chat(question, strict).headers["x-hitherto-cache"] == "miss"
    assert eventually(lambda: gateway.chat(question, strict).headers["x-hitherto-cache"] == "alias", 5)
    reply = gateway.chat(question, strict)
    assert reply.headers["x-hitherto-entry"] == gateway.chat(
        "What is a fjord, and how does one come about?").headers["x-hitherto-entry"]  # fmt: skip


def test_litellms_control_is_obeyed_and_not_passed_on(gateway: Gateway, upstream: FakeServer) -> None:
    gateway.chat("litellm", cache={"ttl": 60})
    assert "cache" not in upstream.app.seen[-1].json()
    assert gateway.chat("litellm", cache={"no-cache": True}).headers["x-hitherto-cache"] == "bypass"
    assert gateway.chat("litellm").headers["x-hitherto-cache"] == "exact"
    assert gateway.chat("litellm", cache={"namespace": "n"}).headers["x-hitherto-cache"] == "miss"
    refused = gateway.chat("litellm", cache={"ttl": "soon"})
    assert refused.status_code == 400 and "cache.ttl" in refused.json()["error"]["message"]
    gateway.chat("litellm", cache={"mine": 1})
    assert upstream.app.seen[-1].json()["cache"] == {"mine": 1}, "a field of another meaning stays"


def test_nearly_identical_questions_share_what_is_under_way(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script, go = held(text="Lisbon")
    asked = ["What is the capital of Portugal?", "what's the capital of portugal", "What is the capital of Peru?",
             "Please tell me the capital of Portugal"]  # fmt: skip

    def ask(text: str) -> httpx.Response:
        with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as client:
            return client.post(
                "/v1/chat/completions", json={"model": "m", "messages": [{"role": "user", "content": text}]}
            )

    with ThreadPoolExecutor(4) as pool:
        asking = []
        for text, seen in zip(asked, (1, 1, 2, 2), strict=True):
            before = gateway.looked_up()
            asking.append(pool.submit(ask, text))
            assert eventually(lambda: gateway.looked_up() > before and len(upstream.app.seen) >= seen)  # noqa: B023
            time.sleep(0.3)  # to find what is near by
        go.set()
        replies = [each.result() for each in asking]
    assert [reply.headers["x-hitherto-reason"] for reply in replies[1:]] == [
        "collapsed-near", replies[2].headers["x-hitherto-reason"], "collapsed-near"]  # fmt: skip
    assert not replies[2].headers["x-hitherto-reason"].startswith("collapsed")
    assert [seen.json()["messages"][0]["content"] for seen in upstream.app.seen] == [asked[0], asked[2]]


def test_who_wants_its_own_words_answered_shares_nothing_near(gateway: Gateway, upstream: FakeServer) -> None:
    upstream.app.script = Script(text="Quito", until=lambda: len(upstream.app.seen) >= 2)
    simple = {"x-portkey-config": '{"cache": {"mode": "simple"}}'}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(gateway.chat, "What is the capital of Ecuador?", simple)
        assert eventually(lambda: upstream.app.seen)
        with httpx.Client(base_url=gateway.url, timeout=30, trust_env=False) as client:
            body = {"model": "m", "messages": [{"role": "user", "content": "Tell me the capital of Ecuador"}]}
            second = client.post("/v1/chat/completions", json=body, headers=simple)
        assert first.result().status_code == 200 and not second.headers["x-hitherto-reason"].startswith("collapsed")
    assert len(upstream.app.seen) == 2
    again = gateway.chat("Ecuador has which capital?", simple)
    assert again.headers["x-hitherto-cache"] == "miss" and again.headers["x-hitherto-reason"] == "exact-only"


def run(gateway: Gateway, *arguments: str) -> str:
    command = [sys.executable, "-m", "gateway.cli", "cache", *arguments, "--url", gateway.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


def test_answers_are_purged_by_tag_model_age_and_entry_and_counted_first(gateway: Gateway) -> None:
    entries = {}
    for text, model, tag in (("p1", "m", "red"), ("p2", "m", "red,blue"), ("p3", "n", "blue")):
        gateway.chat(text, {"x-hitherto-tags": tag}, model=model)
        entries[text] = gateway.chat(text, model=model).headers["x-hitherto-entry"]

    def left() -> str:
        where = {"p1": "m", "p2": "m", "p3": "n"}
        only = {"cache-control": "only-if-cached"}
        return "".join(
            text for text, model in where.items() if gateway.chat(text, only, model=model).status_code == 200
        )

    assert "2 answers" in run(gateway, "purge", "--tag", "red", "--dry-run") and left() == "p1p2p3"
    assert "1 answers" in run(gateway, "purge", "--tag", "blue", "--model", "n") and left() == "p1p2"
    assert "0 answers" in run(gateway, "purge", "--older-than", "1h") and left() == "p1p2"
    assert "1 answers" in run(gateway, "purge", "--entry", entries["p1"]) and left() == "p2"
    assert "say what to purge" in run(gateway, "purge") and left() == "p2"
    assert "are gone" in run(gateway, "purge", "--all") and left() == ""
    assert gateway.client.post("/admin/cache/purge", json={"tags": "x"}).status_code == 422
    assert gateway.metric("hitherto_answer_entries") == 0


def test_a_wrong_answer_is_not_given_to_that_question_again(gateway: Gateway) -> None:
    first, second = "What is the capital of Norway?", "Tell me the capital of Norway"
    gateway.chat(first)
    hit = gateway.chat(second)
    assert hit.headers["x-hitherto-cache"] == "semantic"
    entry = hit.headers["x-hitherto-entry"]
    assert "never given to that question" in run(gateway, "feedback", entry, "--question", second)
    missed = gateway.chat(second)
    assert missed.headers["x-hitherto-cache"] == "miss" and missed.headers["x-hitherto-reason"] == "veto-reported"
    assert gateway.chat(first).headers["x-hitherto-cache"] == "exact", "others still get it"
    assert "is gone" in run(gateway, "feedback", entry)
    assert gateway.chat(first).headers["x-hitherto-entry"] != entry, "now the answer to the other wording serves"
    assert "0 entries begin with" in run(gateway, "feedback", "0123456789abcdef")


def test_a_report_outlives_a_restart(tmp_path: Path, upstream: FakeServer) -> None:
    gateway = started(tmp_path, upstream)
    gateway.chat("What is the capital of Chile?")
    reported = "Tell me the capital of Chile"
    entry = gateway.chat(reported).headers["x-hitherto-entry"]
    gateway.client.post("/admin/cache/feedback", json={"entry": entry, "question": reported})
    gateway.stop()
    gateway = started(tmp_path, upstream)
    assert gateway.chat(reported).headers["x-hitherto-reason"] == "veto-reported"
    gateway.stop()


def test_an_explanation_names_the_nearest_the_veto_and_the_field_that_differs(gateway: Gateway, tmp_path: Path) -> None:
    gateway.chat("Who won the cup in 2020?", temperature=0)
    gateway.chat("Who was world champion?", temperature=0)
    told = run(gateway, "explain", "Who won the cup in 2021?", "--model", "m")
    assert told.startswith("miss: veto-numbers") and "veto-numbers          'Who won the cup in 2020?'" in told
    assert "below-threshold       'Who was world champion?'" in told
    assert run(gateway, "explain", "Who won the cup in 2020?", "--model", "m").startswith("exact")
    request = {"model": "m", "temperature": 0.5, "messages": [{"role": "system", "content": "Be brief"},
               {"role": "user", "content": "Who won the cup in 2020?"}]}  # fmt: skip
    file = tmp_path / "request.json"
    file.write_text(json.dumps(request))
    told = run(gateway, "explain", str(file), "--header", "x-team: red")
    assert "differs in: header x-team, messages[0], messages[1], temperature" in told
    bad = gateway.client.post("/admin/explain", json={"request": {"model": "m"}})
    assert bad.status_code == 400 and "messages" in bad.json()["error"]["message"]
    assert "miss" in run(gateway, "explain", "What time is it?", "--model", "m")


def test_statistics_say_what_is_stored(gateway: Gateway) -> None:
    run(gateway, "purge", "--all")
    for number in range(3):
        gateway.chat(f"statistics question number {number}")
    assert run(gateway, "stats").startswith("3 answers (0 of them aliases)")
    facts = gateway.client.get("/admin/cache/stats").json()
    assert facts["models"] == {"m": 3} and facts["indexed"] == 3
