"""Semantic hits that are watched: audits, shadow mode, reports from users, judges, conversations, other languages."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually, tenant_file

CONFIG = """
backends: {{up: {{kind: openai, url: {url}}}}}
models: {{m: {{try: [up]}}, judge: {{try: [up]}}}}
tenants: tenants
"""
TENANTS = {
    "audited": "cache: {semantic: {audit: 100%}}",
    "shadow": "cache: {semantic: shadow}",
    "reporting": "cache: {semantic: {audit: 0}}",
    "other": "cache: {semantic: {audit: 0}}",
    "talking": "cache: {semantic: {audit: 0, history: standalone}}",
    "judged": "cache: {semantic: {audit: 100%, judge: {model: judge, per_day: 2}}}",
    "doubtful": "cache: {semantic: {audit: 0, judge: {model: judge, decides: hits}, deadline: 5s}}",
}
ASKED, AGAIN = "What is the capital of France?", "Could you tell me the capital of France, please?"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, upstream: FakeServer) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("quality")
    for name, more in TENANTS.items():
        tenant_file(folder, name, f"hk-{name}", more.replace(", deadline: 5s", ""))
    config = CONFIG.format(url=upstream.url) + "cache: {semantic: {deadline: 5s, max_wrong_rate: 10%}}\n"
    gateway = Gateway(folder, config)
    yield gateway
    assert gateway.stop() == 0
    assert "Traceback" not in gateway.log


@pytest.fixture
def gateway(running: Gateway, fresh: None) -> Gateway:
    return running


def ask(gateway: Gateway, tenant: str, content: object, **headers: str) -> httpx.Response:
    reply = gateway.chat(content, {"authorization": f"Bearer hk-{tenant}", **headers}, temperature=0)
    assert reply.status_code == 200, reply.text
    return reply


def answers(upstream: FakeServer, *texts: str) -> None:
    upstream.app.seen.clear()
    upstream.app.scripts = [Script(text=text) for text in texts]


def known(gateway: Gateway, tenant: str) -> dict[str, Any]:
    told: list[dict[str, Any]] = gateway.client.get("/admin/cache/risk", params={"tenant": tenant}).json()
    counts = {(one["source"], one["right"]): one["count"] for one in told[0].get("observations", [])}
    return {**told[0], "counts": counts}


def report(gateway: Gateway, tenant: str, **fields: Any) -> httpx.Response:
    return gateway.client.post("/v1/feedback", json=fields, headers={"authorization": f"Bearer hk-{tenant}"})


def test_an_audit_that_finds_the_same_answer_makes_an_alias(gateway: Gateway, upstream: FakeServer) -> None:
    answers(upstream, "The capital of France is Paris.", "Paris is the capital of France.")
    ask(gateway, "audited", ASKED)
    hit = ask(gateway, "audited", AGAIN)
    assert hit.headers["x-hitherto-cache"] == "semantic" and 0.5 < float(hit.headers["x-hitherto-score"]) <= 1
    assert eventually(lambda: known(gateway, "audited")["counts"].get(("audit", True)) == 1)
    assert len(upstream.app.seen) == 2, "the hit was computed as well"
    assert eventually(lambda: ask(gateway, "audited", AGAIN).headers["x-hitherto-cache"] == "alias")
    assert gateway.metric("hitherto_semantic_evidence_total", source="audit", verdict="right") >= 1
    rows = gateway.client.get("/dashboard/api/requests", params={"tenant": "audited"}).json()
    assert any(row["part"] == "late" and row["reason"] == "audit" for row in rows["rows"]), "and it is booked"


def test_an_audit_that_finds_another_answer_takes_the_hit_back(gateway: Gateway, upstream: FakeServer) -> None:
    question, again = "How tall is the Eiffel Tower?", "Please tell me how tall the Eiffel Tower is"
    answers(upstream, "It is 330 metres tall.", "It is 120 metres tall.")
    ask(gateway, "audited", question)
    bad = _entry_of(gateway, "audited", question)
    served = ask(gateway, "audited", again)
    assert (served.headers["x-hitherto-cache"], served.headers["x-hitherto-entry"]) == ("semantic", bad)
    assert eventually(lambda: known(gateway, "audited")["counts"].get(("audit", False)) == 1)
    repeated = ask(gateway, "audited", again)
    assert repeated.headers["x-hitherto-cache"] == "exact", "the fresh answer is this question's own now"
    assert "120" in repeated.json()["choices"][0]["message"]["content"]
    purged = gateway.client.post("/admin/cache/purge", json={"entry": repeated.headers["x-hitherto-entry"]})
    assert purged.json()["entries"] == 1
    answers(upstream, "It is 120 metres tall.")
    assert ask(gateway, "audited", again).headers["x-hitherto-reason"] == "veto-reported", (
        "nor does it get that one again"
    )


def _entry_of(gateway: Gateway, tenant: str, question: str) -> str:
    return str(ask(gateway, tenant, question).headers["x-hitherto-entry"])


def test_shadow_mode_serves_nothing_and_says_what_it_would_have_served(gateway: Gateway, upstream: FakeServer) -> None:
    answers(upstream, "Paris.", "Paris.", "Rome.", "Oslo.")
    ask(gateway, "shadow", ASKED)
    missed = ask(gateway, "shadow", AGAIN)
    assert missed.headers["x-hitherto-cache"] == "miss" and missed.headers["x-hitherto-reason"] == "shadow"
    assert missed.json()["choices"][0]["message"]["content"] == "Paris."
    assert eventually(lambda: known(gateway, "shadow")["counts"].get(("shadow", True)) == 1)
    ask(gateway, "shadow", "What is the capital of Italy?")
    ask(gateway, "shadow", "Please tell me what the capital of Italy is")
    assert eventually(lambda: known(gateway, "shadow")["counts"].get(("shadow", False)) == 1)
    told = known(gateway, "shadow")
    assert told["mode"] == "shadow" and told["lookups"] >= 2
    assert [row["max_wrong_rate"] for row in told["rates"]] == sorted(row["max_wrong_rate"] for row in told["rates"])
    printed = command(gateway, "cache", "risk", "--tenant", "shadow")
    assert "shadow: shadow" in printed and "1 right (shadow)" in printed and "1 wrong (shadow)" in printed


def command(gateway: Gateway, *arguments: str) -> str:
    line = [sys.executable, "-m", "gateway.cli", *arguments, "--url", gateway.url]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=True)
    return done.stdout


def test_a_user_reports_a_wrong_hit_by_its_request_and_never_gets_it_again(
    gateway: Gateway, upstream: FakeServer
) -> None:
    answers(upstream, "Paris.", "Lyon, I think.")
    ask(gateway, "reporting", ASKED)
    hit = ask(gateway, "reporting", AGAIN, **{"x-request-id": "a-request"})
    assert hit.headers["x-hitherto-cache"] == "semantic"
    assert report(gateway, "other", request_id="a-request", correct=False).status_code == 404
    done = report(gateway, "reporting", request_id="a-request", correct=False)
    assert done.json() == {"entry": hit.headers["x-hitherto-entry"], "removed": False, "denied": True}
    missed = ask(gateway, "reporting", AGAIN)
    assert missed.headers["x-hitherto-reason"] == "veto-reported"
    assert known(gateway, "reporting")["counts"] == {("feedback", False): 1}
    assert ask(gateway, "reporting", ASKED).headers["x-hitherto-cache"] == "exact", "for others it may be right"


def test_reports_name_an_entry_of_ones_own_and_what_is_wrong_is_told(gateway: Gateway, upstream: FakeServer) -> None:
    question = "Who wrote Faust?"
    answers(upstream, "Schiller.", "Goethe.")
    entry = ask(gateway, "reporting", question) and _entry_of(gateway, "reporting", question)
    assert report(gateway, "other", entry=entry, question=question, correct=False).status_code == 404
    praised = report(gateway, "reporting", entry=entry, question="Who is the author of Faust?", correct=True)
    assert praised.json() == {"entry": entry, "removed": False, "denied": False}
    gone = report(gateway, "reporting", entry=entry, question=question, correct=False)
    assert gone.json() == {"entry": entry, "removed": True, "denied": False}
    assert ask(gateway, "reporting", question).json()["choices"][0]["message"]["content"] == "Goethe."
    for bad, param in (
        ({"correct": False}, None),
        ({"entry": "xyz", "question": "q", "correct": False}, "entry"),
        ({"request_id": "r"}, "correct"),
        ({"request_id": "r", "correct": "perhaps"}, "correct"),
        ({"request_id": "r", "correct": True, "stars": 5}, "stars"),
    ):
        refused = report(gateway, "reporting", **bad)
        assert refused.status_code == 400 and refused.json()["error"]["param"] == param, refused.text
    assert gateway.client.post("/v1/feedback", json={}).status_code == 401


def test_a_judge_is_asked_only_where_rules_cannot_tell_and_so_often_a_day(
    gateway: Gateway, upstream: FakeServer
) -> None:
    long = "Photosynthesis turns light, water and carbon dioxide into sugar and oxygen in chloroplasts of green leaves"
    other = "Plants use sunlight to make glucose from carbon dioxide taken from air and water taken up by their roots"
    answers(upstream, long, other, "YES")
    ask(gateway, "judged", "How does photosynthesis work?")
    assert ask(gateway, "judged", "Please explain how photosynthesis works").headers["x-hitherto-cache"] == "semantic"
    assert eventually(lambda: known(gateway, "judged")["counts"].get(("audit", True)) == 1)
    prompts = [seen.json() for seen in upstream.app.seen if seen.json()["model"] == "judge"]
    assert len(prompts) == 1 and long in prompts[0]["messages"][0]["content"]
    rows = gateway.client.get("/dashboard/api/requests", params={"tenant": "judged"}).json()["rows"]
    assert any(row["reason"] == "judgement" for row in rows), "the tenant pays for its judge"


@pytest.mark.parametrize(("word", "tier"), [("YES", "semantic"), ("No.", "miss"), ("I would say YES and NO", "miss")])
def test_a_judge_may_have_the_last_word_on_hits(gateway: Gateway, upstream: FakeServer, word: str, tier: str) -> None:
    spaced = {"x-hitherto-namespace": f"ns-{len(word)}"}
    answers(upstream, "Paris.", word, "Paris!")
    ask(gateway, "doubtful", ASKED, **spaced)
    reply = ask(gateway, "doubtful", AGAIN, **spaced)
    assert reply.headers["x-hitherto-cache"] == tier
    if tier == "miss":
        assert reply.headers["x-hitherto-reason"] == "judge"


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if number % 2 else "user", "content": text} for number, text in enumerate(texts)]


def test_a_last_turn_that_stands_alone_is_matched_without_its_history(gateway: Gateway, upstream: FakeServer) -> None:
    answers(upstream, "78.4 °C", "330 metres", "It is 96 metres high.", "1,000 °C")
    alone = "What is the boiling point of ethanol at sea level?"
    ask(gateway, "talking", turns("what's 15% of 240", "36.", alone))
    reply = ask(gateway, "talking", turns("who painted the starry night", "Vincent van Gogh.", alone))
    assert reply.headers["x-hitherto-cache"] == "exact"
    ask(gateway, "talking", turns("Tell me about the Eiffel Tower", "It is in Paris.", "How tall is it?"))
    reply = ask(gateway, "talking", turns("Tell me about Big Ben", "It is in London.", "How tall is it?"))
    assert reply.headers["x-hitherto-cache"] == "miss" and "96" in reply.text
    reply = ask(gateway, "talking", turns("From now on answer in French.", "Bien sûr.", alone))
    assert reply.headers["x-hitherto-cache"] == "miss", "what was asked for before still holds"


def test_other_tenants_keep_their_history(gateway: Gateway, upstream: FakeServer) -> None:
    answers(upstream, "1", "2")
    alone = "What is the boiling point of methanol at sea level?"
    ask(gateway, "other", turns("hello there", "Hi!", alone))
    assert ask(gateway, "other", turns("good morning", "Hi!", alone)).headers["x-hitherto-cache"] == "miss"


def test_what_the_guards_cannot_read_is_an_exact_hit_only(gateway: Gateway, upstream: FakeServer) -> None:
    for first, second in (
        ("¿Cómo puedo cancelar mi pedido?", "Quiero cancelar mi pedido, ¿cómo lo hago?"),
        ("Wie kann ich meine Bestellung stornieren?", "Ich möchte meine Bestellung stornieren"),
        ("如何取消我的订单", "我想取消我的订单，怎么做"),
    ):
        answers(upstream, "1", "2")
        ask(gateway, "other", first)
        reply = ask(gateway, "other", second)
        assert (reply.headers["x-hitherto-cache"], reply.headers["x-hitherto-reason"]) == ("miss", "language")
        assert ask(gateway, "other", first).headers["x-hitherto-cache"] == "exact"
