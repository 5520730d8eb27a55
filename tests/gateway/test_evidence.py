"""What is known of hits, and how it moves the limit: by tenant, scope and entry, and over a restart."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from backends.dialects.openai_chat import view
from gateway.cache.evidence import Evidence, Hit, Hits
from gateway.cache.key import group_digest
from gateway.cache.question import Question
from gateway.stores.contract import Observation
from policies.cacheability import CacheRules
from policies.controls import Controls
from policies.risk import NEVER

CALIBRATION = [(number / 100, number > 100 or number % 2 == 0) for number in range(1000)]
SEEN = Observation(1.0, "t", b"g", b"e", 0.5, b"asked", 4.0, True, "audit", "j")


def question(tenant: str = "t", rate: float = 0.05, **fields: Any) -> Question:
    seen = view({"model": "m", "messages": [{"role": "user", "content": "q"}], **fields})
    return Question(b"k", b"s", tenant, seen, Controls(), CacheRules(max_wrong_rate=rate))


def limit(
    evidence: Evidence, tenant: str = "t", group: bytes = b"g", entry: bytes = b"other", rate: float = 0.05
) -> float:
    return evidence.limit(question(tenant, rate), group, entry, 9.0)


def test_before_any_evidence_the_calibration_decides_or_what_the_config_says() -> None:
    assert 0.0 < limit(Evidence(CALIBRATION, "j")) < 1.1
    assert limit(Evidence([], "j")) == 9.0
    assert limit(Evidence(CALIBRATION[:20], "j")) == NEVER, "too few to prove anything"


def test_wrong_hits_raise_the_limit_of_their_tenant_only() -> None:
    evidence = Evidence(CALIBRATION, "j")
    before = limit(evidence)
    for number in range(6):
        evidence.add(replace(SEEN, right=False, entry=bytes([number]), asked=bytes([number])))
    assert limit(evidence) > 4.0 > before
    assert limit(evidence, "another") == before


def test_an_entry_is_locked_out_by_its_failures_and_free_again_when_it_is_replaced() -> None:
    evidence = Evidence(CALIBRATION, "j")
    for number in range(60):
        evidence.add(replace(SEEN, asked=b"%d" % number))
    for number in range(2):
        evidence.add(replace(SEEN, right=False, entry=b"bad", asked=bytes([number])))
    assert limit(evidence, entry=b"bad") == NEVER and limit(evidence) < NEVER
    evidence.forget(b"bad")
    assert limit(evidence, entry=b"bad") < NEVER


def test_a_scope_is_stricter_than_the_whole_but_never_laxer() -> None:
    evidence = Evidence(CALIBRATION, "j")
    for number in range(80):
        evidence.add(replace(SEEN, asked=number.to_bytes(2, "big")))
    for number in range(2):
        evidence.add(replace(SEEN, right=False, group=b"bad", entry=bytes([number]), asked=bytes([200 + number])))
    assert limit(evidence, group=b"bad") > 4.0 >= limit(evidence, group=b"g")


def test_what_counts_and_what_does_not() -> None:
    evidence = Evidence(CALIBRATION, "j")
    before = limit(evidence)
    for number in range(50):
        evidence.add(replace(SEEN, right=False, judge="an older verifier", at=1.0, asked=bytes([number])))
        evidence.add(replace(SEEN, right=None, at=2.0, asked=bytes([number])))
        evidence.add(replace(SEEN, right=True, score=0.0, source="feedback", at=3.0, asked=bytes([number])))
    assert limit(evidence) == before
    counts = {(one["source"], one["right"]): one["count"] for one in evidence.report("t", 0.05, 9.0)["observations"]}
    assert counts == {("audit", False): 50, ("audit", None): 50, ("feedback", True): 50}, "but all of it is told"


def test_what_the_store_tells_again_is_counted_once() -> None:
    evidence = Evidence(CALIBRATION, "j")
    evidence.add(replace(SEEN, right=False))
    evidence.add(replace(SEEN, right=False))
    evidence.add(replace(SEEN, right=False, at=2.0))
    assert evidence.report("t", 0.05, 9.0)["observations"] == [{"source": "audit", "right": False, "count": 2}]


def test_the_report_says_what_each_rate_would_serve() -> None:
    evidence = Evidence(CALIBRATION, "j")
    for score in range(10):
        evidence.looked("t", float(score))
        evidence.looked("t", None)
    told = evidence.report("t", 0.03, 9.0)
    assert told["lookups"] == 20
    assert [row["max_wrong_rate"] for row in told["rates"]] == [0.005, 0.01, 0.02, 0.03, 0.05, 0.1]
    assert [row["in_force"] for row in told["rates"]] == [False, False, False, True, False, False]
    served = [row["served"] for row in told["rates"]]
    assert served == sorted(served) and 0 < served[-1] <= 0.5, "half of the lookups had no candidate"
    assert told["rates"][0]["wrong_rate"] == [0.0, 1.0], "nothing is known yet"


def test_hits_are_remembered_once_for_whoever_reports_on_them() -> None:
    hits = Hits()
    hits.served("request", Hit("t", b"a", b"e", b"g", 1.0, 4.0))
    hits.served("request", Hit("u", b"b", b"f", b"g", 1.0, 4.0))
    hits.served("x" * 300, Hit("t", b"a", b"e", b"g", 1.0, 4.0))
    found = hits.reported("t", "request")
    assert found is not None and found.entry == b"e", "though another tenant has used that id"
    assert hits.reported("t", "request") is None, "a report that is sent twice counts once"
    assert hits.reported("t", "x" * 300) is None


def test_reports_warn_of_an_entry_and_a_scope_but_are_no_sample_of_the_whole() -> None:
    evidence = Evidence(CALIBRATION, "j")
    before = limit(evidence)
    for number in range(5):
        evidence.add(replace(SEEN, right=False, source="feedback", asked=bytes([number])))
    assert limit(evidence, group=b"another") == before < limit(evidence, group=b"g")
    assert limit(evidence, entry=b"e") == NEVER


def test_what_nobody_could_tell_is_no_proof() -> None:
    evidence = Evidence([], "j")
    for number in range(400):
        evidence.add(replace(SEEN, right=None if number % 20 == 0 else True, asked=number.to_bytes(2, "big")))
    assert limit(evidence) == 9.0
    evidence = Evidence([], "j")
    for number in range(400):
        evidence.add(replace(SEEN, asked=number.to_bytes(2, "big")))
    assert limit(evidence) == 4.0


def test_scope_classes_are_model_and_system_prompt() -> None:
    def grouped(*messages: dict[str, str], model: str = "m", **fields: Any) -> bytes:
        return group_digest(question(messages=[*messages, {"role": "user", "content": "q"}], model=model, **fields))

    system = {"role": "system", "content": "Be brief."}
    assert grouped() == grouped(temperature=0.5) == grouped({"role": "user", "content": "hello"})
    assert len({grouped(), grouped(system), grouped({**system, "content": "Be long."}), grouped(model="n")}) == 4
