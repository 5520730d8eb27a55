"""One suite over every answer store."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.stores.contract import AnswerStore, Entry
from gateway.stores.sqlite import SQLiteAnswers

ENTRY = Entry(b"k1", b"s1", "t", "openai-chat", "m", "b", "q?", b'{"a":1}', True, 100.0, 200.0, b"\0\1\2\3", "e1")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[AnswerStore]:
    store = SQLiteAnswers(tmp_path / "deep" / "answers.sqlite")
    yield store
    store.close()


def test_what_is_put_is_got(store: AnswerStore) -> None:
    bare = replace(ENTRY, key=b"k2", question=None, vector=None, embedder="", has_usage=False)
    store.put([ENTRY, bare])
    assert store.get(b"k1") == ENTRY and store.get(b"k2") == bare and store.get(b"k3") is None


def test_a_second_put_replaces(store: AnswerStore) -> None:
    store.put([ENTRY])
    store.put([replace(ENTRY, body=b"{}")])
    assert [key for key, _ in store.known()] == [b"k1"]
    entry = store.get(b"k1")
    assert entry is not None and entry.body == b"{}"


def test_known_is_oldest_first_and_vectors_belong_to_one_embedder(store: AnswerStore) -> None:
    store.put([ENTRY, replace(ENTRY, key=b"k0", created=50.0), replace(ENTRY, key=b"k2", embedder="e2")])
    store.put([replace(ENTRY, key=b"k3", vector=None)])
    facts = dict(store.known())
    assert next(iter(facts)) == b"k0"
    assert facts[b"k1"].expires == 200.0 and facts[b"k1"].size == 9 and facts[b"k1"].has_usage
    assert sorted(store.vectors("e1")) == [(b"k0", b"s1", b"\0\1\2\3"), (b"k1", b"s1", b"\0\1\2\3")]


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
    assert store.last() == 0 and list(store.since(0, "e1")) == []
    store.put([replace(ENTRY, created=500.0)])
    first = store.last()
    store.put([replace(ENTRY, key=b"k2", created=1.0), replace(ENTRY, key=b"k3", embedder="e2")])
    news = list(store.since(first, "e1"))
    assert [(key, vector) for _, key, _, vector in news] == [(b"k2", ENTRY.vector), (b"k3", None)]
    store.put([replace(ENTRY, created=501.0)])
    assert [key for _, key, _, _ in store.since(news[-1][0], "e1")] == [b"k1"], "a replacement is news"


def test_many_rows_are_read_in_pieces_while_others_are_written(store: AnswerStore) -> None:
    store.put([replace(ENTRY, key=b"%05d" % number, created=float(number)) for number in range(2500)])
    seen = []
    for key, _ in store.known():
        if len(seen) == 100:
            store.put([replace(ENTRY, key=b"late", created=9e9)])
        seen.append(key)
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
