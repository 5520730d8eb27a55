"""One suite over every answer store."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.stores.contract import AnswerStore, BrokenRow, Entry, Observation, Selector, Shape, Vector
from gateway.stores.redis import RedisAnswers
from gateway.stores.sqlite import SQLiteAnswers
from tests.servers import RedisServer

ENTRY = Entry(b"k1", b"s1", "t", "openai-chat", "m", "b", "q?", b'{"a":1}', True, 100.0, 9e9, 7.5, 9.1e9, ("x", "y"))
VECTOR = Vector(b"k1", b"s1", 100.0, "e1", b"\0\1\2\3")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture(params=["sqlite", "redis"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnswerStore]:
    store: AnswerStore
    if request.param == "sqlite":
        store = SQLiteAnswers(tmp_path / "deep" / "answers.sqlite")
    else:
        server: RedisServer = request.getfixturevalue("server")
        store = RedisAnswers(server.url, prefix=f"{tmp_path.name}:")
    yield store
    store.close()


def test_what_is_put_is_got(store: AnswerStore) -> None:
    bare = replace(ENTRY, key=b"k2", question=None, has_usage=False, target=b"k1", embeds=True, tags=())
    store.put([ENTRY, bare])
    assert store.get(b"k1") == ENTRY and store.get(b"k2") == bare and store.get(b"k3") is None


def test_a_second_put_replaces(store: AnswerStore) -> None:
    store.put([ENTRY])
    store.put([replace(ENTRY, body=b"{}")])
    assert [row.key for row in store.rows()] == [b"k1"]
    entry = store.get(b"k1")
    assert entry is not None and entry.body == b"{}"


def test_rows_tell_what_memory_needs(store: AnswerStore) -> None:
    store.put([ENTRY, replace(ENTRY, key=b"k0", created=50.0)])
    (row, other) = store.rows()
    assert (row.key, row.scope, other.key) == (b"k1", b"s1", b"k0")
    known = row.known
    assert (known.created, known.expires, known.kept_until, known.size) == (100.0, 9e9, 9.1e9, 9)
    assert known.has_usage and known.cost == 7.5


def test_vectors_belong_to_one_embedder_and_to_one_entry(store: AnswerStore) -> None:
    wanting = replace(ENTRY, embeds=True)
    store.put([wanting, replace(wanting, key=b"k2"), replace(ENTRY, key=b"k3")])
    assert sorted(row[0] for row in store.unembedded("e1", 9)) == [b"k1", b"k2"]
    store.put_vectors([VECTOR, replace(VECTOR, key=b"k2", embedder="e2"), replace(VECTOR, key=b"k2", created=99.0),
                       replace(VECTOR, key=b"never")])  # fmt: skip
    assert [vector for _, vector in store.vectors("e1")] == [VECTOR]
    assert store.unembedded("e1", 9) == [(b"k2", b"s1", 100.0, "q?")]
    store.put([wanting])
    assert len(list(store.vectors("e1"))) == 1, "the same entry put again keeps its vector"
    store.put([replace(wanting, created=101.0)])
    assert list(store.vectors("e1")) == [], "a newer one must be embedded anew"


def test_deleted_is_gone(store: AnswerStore) -> None:
    store.put([ENTRY, replace(ENTRY, key=b"k2")])
    store.delete([(b"k1", 100.0), (b"never", 100.0), (b"k2", 99.0)])
    assert store.get(b"k1") is None and store.get(b"k2") is not None, "one that is newer stays"


def test_an_older_answer_does_not_replace_a_newer_one(store: AnswerStore) -> None:
    store.put([replace(ENTRY, created=120.0, body=b"new")])
    store.put([ENTRY])
    entry = store.get(b"k1")
    assert entry is not None and entry.body == b"new"


def test_writes_are_numbered_in_order_of_writing_not_of_creation(store: AnswerStore) -> None:
    assert store.last() == (0, 0, 0) and list(store.rows(0)) == []
    store.put([replace(ENTRY, created=500.0)])
    first = store.last()[0]
    store.put([replace(ENTRY, key=b"k2", created=1.0), replace(ENTRY, key=b"k3")])
    news = list(store.rows(first))
    assert [row.key for row in news] == [b"k2", b"k3"]
    store.put([replace(ENTRY, created=501.0)])
    assert [row.key for row in store.rows(news[-1].number)] == [b"k1"], "a replacement is news"
    store.delete([(b"k1", 501.0)], announce=True)
    store.delete([(b"k2", 501.0)])
    assert [(key, created) for _, key, created in store.removed(0)] == [(b"k1", 501.0)]
    assert store.last()[2] == 1 and store.removed(1) == []


def test_entries_are_found_by_what_they_are_with_their_aliases(store: AnswerStore) -> None:
    store.put([
        ENTRY,
        replace(ENTRY, key=b"k2", model="other", tags=("y",), created=150.0),
        replace(ENTRY, key=b"k3", tenant="u", tags=("it's",)),
        replace(ENTRY, key=b"a1", target=b"k1", body=b"", tags=(), tenant="z"),
    ])  # fmt: skip

    def found(**by: object) -> list[bytes]:
        return sorted(key for key, _, _ in store.find(Selector(**by)))  # type: ignore[arg-type]

    assert found() == [b"a1", b"k1", b"k2", b"k3"]
    assert found(entry=b"k1".hex()) == [b"a1", b"k1"]
    assert found(tag="y") == [b"a1", b"k1", b"k2"] and found(tag="it's") == [b"k3"] and found(tag="none") == []
    assert found(model="other") == [b"k2"] and found(tenant="u") == [b"k3"]
    assert found(tenant="t", model="m") == [b"a1", b"k1"]
    assert found(older_than=0) == found() and found(older_than=1e12) == []
    assert found(tag="%' OR 1=1 --") == []


def test_a_question_is_found_in_other_scopes_and_scopes_are_described(store: AnswerStore) -> None:
    store.put([ENTRY, replace(ENTRY, key=b"k2", scope=b"s2", created=150.0), replace(ENTRY, key=b"k3", question="r")])
    assert store.elsewhere(b"s1", "q?", 5) == [(b"k2", b"s2", 150.0)]
    store.describe(Shape(b"s1", {"tenant": "0a"}))
    store.describe(Shape(b"s1", {"tenant": "ff"}))
    assert store.described(b"s1") == {"tenant": "0a"} and store.described(b"s9") == {}


def test_what_was_reported_bad_is_remembered(store: AnswerStore) -> None:
    store.deny(b"asked", b"k1")
    store.deny(b"asked", b"k1")
    assert store.denied() == [(b"asked", b"k1")]


def test_observations_come_back_in_order_and_after_a_number(store: AnswerStore) -> None:
    seen = [
        Observation(1.5 + number, "t", b"g", b"entry", 1.25, b"asked", -2.25, right, source, "judge")
        for number, (right, source) in enumerate(((True, "audit"), (False, "shadow"), (None, "feedback")))
    ]
    store.observe(seen[:2])
    store.observe(seen[2:])
    told = store.observed()
    assert [observation for _, observation in told] == seen
    assert [observation for _, observation in store.observed(told[1][0])] == seen[2:]
    assert store.observed(told[-1][0]) == []


def test_a_lease_has_one_holder_until_it_is_given_back_or_over(store: AnswerStore) -> None:
    assert store.lease(b"k", "a", 60) and store.lease(b"k", "a", 60) and not store.lease(b"k", "b", 60)
    store.release(b"k", "b")
    assert not store.lease(b"k", "b", 60), "only the holder gives it back"
    store.release(b"k", "a")
    assert store.lease(b"k", "b", 0.0)
    time.sleep(0.01)
    assert store.lease(b"k", "a", 60)


def test_a_row_that_was_changed_is_not_taken_for_an_answer(tmp_path: Path) -> None:
    store = SQLiteAnswers(tmp_path / "a.sqlite")
    store.put([ENTRY])
    with sqlite3.connect(tmp_path / "a.sqlite") as database:
        database.execute("UPDATE answers SET body = ?", (b'{"a":2}',))
    with pytest.raises(BrokenRow, match=ENTRY.key.hex()):
        store.get(b"k1")
    store.close()


def test_statistics_count_what_is_there(store: AnswerStore) -> None:
    store.put([ENTRY, replace(ENTRY, key=b"k2", target=b"k1")])
    store.put_vectors([VECTOR])
    facts = store.statistics()
    assert (facts["entries"], facts["aliases"], facts["vectors"], facts["models"]) == (2, 1, 1, {"m": 2})


def test_many_rows_are_read_in_pieces_while_others_are_written(store: AnswerStore) -> None:
    store.put([replace(ENTRY, key=b"%05d" % number, created=float(number)) for number in range(2500)])
    seen = []
    for row in store.rows():
        if len(seen) == 100:
            store.put([replace(ENTRY, key=b"late", created=9e9)])
        seen.append(row.key)
    assert len(seen) >= 2500 and len(set(seen)) == len(seen)


def test_what_was_put_survives_a_killed_process(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    code = (
        "import os, sys; from pathlib import Path; from gateway.stores.sqlite import SQLiteAnswers;"
        "from tests.gateway.test_stores import ENTRY;"
        f"SQLiteAnswers(Path({str(path)!r})).put([ENTRY]); os.kill(os.getpid(), 9)"
    )
    root = str(Path(__file__).parents[2])
    result = subprocess.run([sys.executable, "-c", code], cwd=root, env={**os.environ, "PYTHONPATH": root})
    assert result.returncode == -9
    store = SQLiteAnswers(path)
    assert store.get(b"k1") == ENTRY
    store.close()
