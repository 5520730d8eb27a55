"""vLLM replicas: scriptable ones always, and real ones where HITHERTO_VLLM names their base URLs (docs/policies.md)."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest

from backends.fake import FakeServer, Script
from gateway.tenants import hash_key
from tests.conftest import Gateway, eventually

CONFIG = """
tenants: tenants/
backends: {{pool: {{kind: vllm, replicas: {replicas}}}}}
models: {{m: {{try: [{{backend: pool, model: {model}}}]}}}}
cache: {{exact: false}}
"""


def started(folder: Path, replicas: list[str], model: str = "m") -> Gateway:
    (folder / "tenants").mkdir(parents=True)
    for name in ("acme", "globex"):
        (folder / f"tenants/{name}.yaml").write_text(f"tenant: {name}\nkeys: ['{hash_key(name)}']\n")
    gateway = Gateway(folder, CONFIG.format(replicas=replicas, model=model))
    gateway.client.headers["authorization"] = "Bearer acme"
    return gateway


@pytest.fixture(scope="module")
def replicas() -> Iterator[list[FakeServer]]:
    with ExitStack() as stack:
        yield [stack.enter_context(FakeServer()) for _ in range(3)]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory, replicas: list[FakeServer]) -> Iterator[Gateway]:
    running = started(tmp_path_factory.mktemp("vllm") / "g", [one.url for one in replicas])
    yield running
    assert running.stop() == 0


@pytest.fixture(autouse=True)
def fresh(replicas: list[FakeServer]) -> None:
    for one in replicas:
        one.app.seen.clear()
        one.app.script, one.app.scripts = Script(), []


def posts(server: FakeServer) -> list[bytes]:
    return [seen.body for seen in server.app.seen if seen.method == "POST"]


def conversation(system: str, *turns: str) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": "system", "content": system}] + [
        {"role": roles[number % 2], "content": turn} for number, turn in enumerate(turns)
    ]


def test_a_conversation_stays_on_one_replica_and_many_are_spread(gateway: Gateway, replicas: list[FakeServer]) -> None:
    for number in range(30):
        turns = [f"question {number}"]
        for turn in range(3):
            gateway.chat(conversation("You help.", *turns)).raise_for_status()
            turns += [f"answer {turn}", f"and then {turn}?"]
    where = Counter()
    for index, server in enumerate(replicas):
        for body in posts(server):
            number = next(n for n in range(30) if f'"question {n}"'.encode() in body)
            where[number, index] += 1
    assert set(where.values()) == {3}, "each whole conversation in one place"
    spread = Counter(index for _, index in where)
    assert len(spread) == 3, "where each goes is chance, and one of 30 or more everywhere nearly certain"


def test_a_long_common_beginning_meets_in_one_place_until_that_carries_too_much(
    gateway: Gateway, replicas: list[FakeServer]
) -> None:
    system = "These are our terms. " * 200
    for number in range(9):
        gateway.chat(conversation(system, f"q{number}")).raise_for_status()
    assert sorted(len(posts(one)) for one in replicas) == [0, 0, 9]
    for one in replicas:
        one.app.seen.clear()
        one.app.script = Script(until=lambda: sum(len(posts(each)) for each in replicas) >= 24)
    with ThreadPoolExecutor(24) as pool:
        list(pool.map(lambda number: gateway.chat(conversation(system, f"p{number}")), range(24)))
    counts = sorted(len(posts(one)) for one in replicas)
    assert sum(counts) == 24 and counts[0] >= 4 and counts[2] <= 12, counts


def test_each_tenant_has_its_own_salt_and_a_clients_own_goes_into_it(
    gateway: Gateway, replicas: list[FakeServer]
) -> None:
    def salt(key: str, **fields: object) -> str:
        for one in replicas:
            one.app.seen.clear()
        gateway.chat("hi", {"authorization": f"Bearer {key}"}, **fields).raise_for_status()
        (seen,) = [seen for one in replicas for seen in one.app.seen if seen.method == "POST"]
        return str(seen.json()["cache_salt"])

    assert salt("acme") == salt("acme") != salt("globex")
    relayed = []
    for key in ("acme", "globex"):
        for one in replicas:
            one.app.seen.clear()
        body = {"model": "unrouted", "input": "hi"}
        gateway.client.post("/v1/responses", json=body, headers={"authorization": f"Bearer {key}"}).raise_for_status()
        relayed += [seen.json()["cache_salt"] for one in replicas for seen in one.app.seen if seen.method == "POST"]
    assert relayed == [salt("acme"), salt("globex")], "whatever is passed on"
    for one in replicas:
        one.app.seen.clear()
    hidden = b'{"model": "m", "messages": [{"role": "user", "content": "hi"}], "\\u0063ache_salt": "x"}'
    gateway.client.post("/v1/chat/completions", content=hidden).raise_for_status()
    (seen,) = [seen for one in replicas for seen in one.app.seen if seen.method == "POST"]
    assert seen.json()["cache_salt"] == f"{salt('acme')}-x", "an escape hides nothing"
    own = salt("acme", cache_salt="mine")
    assert own == f"{salt('acme')}-mine" != salt("globex", cache_salt="mine")


def test_a_replica_that_fails_is_not_missed(gateway: Gateway, replicas: list[FakeServer]) -> None:
    replicas[0].app.scripts = [Script(status=503)] * 1000  # of questions: its health says nothing
    sick = "pool/" + replicas[0].url.removeprefix("http://").removesuffix("/v1")

    def state() -> str:
        states = {one["place"]: one["state"] for one in gateway.client.get("/admin/breakers").json()}
        assert len(states) == 3
        return str(states[sick])

    for number in range(200):  # where each goes is a hash of a port, so how many it takes is chance
        gateway.chat(f"while one fails {number}").raise_for_status()
        if state() != "closed":
            break
    assert state() in ("open", "half-open") and 10 <= len(posts(replicas[0])) <= 25
    replicas[0].app.scripts = []
    for number in range(20):
        gateway.chat(f"while its breaker is open {number}").raise_for_status()
    assert "does not answer" not in gateway.log


def test_a_replica_whose_health_is_bad_is_asked_last(gateway: Gateway, replicas: list[FakeServer]) -> None:
    replicas[0].app.script = Script(status=503)
    assert eventually(lambda: "does not answer" in gateway.log, 15)
    before = len(posts(replicas[0]))
    for number in range(40):
        gateway.chat(f"while one is sick {number}").raise_for_status()
    assert len(posts(replicas[0])) == before
    replicas[0].app.script = Script()
    assert eventually(lambda: "answers again" in gateway.log, 15)


def test_when_all_are_away_the_client_is_told_when_to_come_back(tmp_path: Path) -> None:
    with FakeServer() as only:
        gateway = started(tmp_path / "g", [only.url])
        only.app.script = Script(status=500)
        statuses = [gateway.chat(f"x {number}").status_code for number in range(12)]
        assert statuses[0] == 500 and statuses[-1] == 503
        reply = gateway.chat("y")
        assert 1 <= int(reply.headers["retry-after"]) <= 6 and reply.json()["error"]["code"] == "backends_unavailable"
        gateway.stop()


real = pytest.mark.skipif("HITHERTO_VLLM" not in os.environ, reason="needs running vLLM servers in HITHERTO_VLLM")


@real
def test_real_vllm_reuses_what_the_same_tenant_computed_and_not_what_another_did(tmp_path: Path) -> None:
    urls = os.environ["HITHERTO_VLLM"].split(",")
    gateway = started(tmp_path / "g", urls, os.environ.get("HITHERTO_VLLM_MODEL", "smollm2"))
    gateway.client.timeout = 120
    system = f"{time.time()} " + "Our shop sells bicycles, and delivers within two days. " * 40
    cached = []
    for key, turns in (("acme", ["Hi"]), ("acme", ["Hello there"]), ("globex", ["Hi"]), ("globex", ["Hello there"])):
        reply = gateway.chat(
            conversation(system, *turns), {"authorization": f"Bearer {key}"}, model="m", max_tokens=4, temperature=0
        )
        assert reply.status_code == 200, reply.text
        cached.append((reply.json()["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
    assert cached[0] == 0 and cached[1] > 300, cached
    assert cached[2] == 0 and cached[3] > 300, cached
    streamed = gateway.chat(conversation(system, "Hi"), stream=True, max_tokens=4)
    assert streamed.text.rstrip().endswith("data: [DONE]")
    assert gateway.metric("hitherto_prefix_tokens_total", source="upstream") >= sum(cached)
    gateway.stop()
