"""What was delivered survives: kill -9, full disks, locked databases, broken rows."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import threading
import time
from pathlib import Path

import httpx
import pytest

from backends.fake import FakeServer, Script
from tests.conftest import Gateway, eventually

KEY = {"authorization": "Bearer k"}


def transparent(folder: Path, upstream: FakeServer) -> Gateway:
    return Gateway(folder, None, "--upstream", upstream.url)


@pytest.mark.parametrize("most", [60, 240])
def test_a_killed_gateway_has_lost_nothing_of_what_was_stored(tmp_path: Path, fake: FakeServer, most: int) -> None:
    """It is killed while six clients ask; what is owed is what another reader of the file saw before."""
    gateway = transparent(tmp_path, fake)
    delivered: list[str] = []
    stop = threading.Event()

    def ask(client_number: int) -> None:
        with httpx.Client(base_url=gateway.url, timeout=10, trust_env=False) as client:
            number = 0
            while not stop.is_set():
                question = f"durable question {client_number} {number}"
                body = {"model": "m", "messages": [{"role": "user", "content": question}]}
                try:
                    if client.post("/v1/chat/completions", json=body, headers=KEY).status_code == 200:
                        delivered.append(question)
                except httpx.HTTPError:
                    return
                number += 1

    def stored() -> list[str]:
        with contextlib.closing(sqlite3.connect(tmp_path / "data" / "answers.sqlite")) as database:
            return [row[0] for row in database.execute("SELECT question FROM answers")]

    threads = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(6)]
    for thread in threads:
        thread.start()
    waited = []
    try:
        for goal in range(most // 10, most + 1, most // 10):
            assert eventually(lambda: len(delivered) >= goal, 60)  # noqa: B023
            answered, began = {*delivered}, time.monotonic()
            assert eventually(lambda: answered <= {*stored()}), "while more are coming"  # noqa: B023
            waited.append(time.monotonic() - began)
        owed = stored()
    finally:
        gateway.process.kill()
        stop.set()
    assert min(waited) < 0.2, "a tenth of a second, in at least one of ten where the machine does not stall"
    for thread in threads:
        thread.join()
    gateway.process.wait()

    again = transparent(tmp_path, fake)
    only = {**KEY, "cache-control": "only-if-cached"}
    for question in owed:
        assert eventually(lambda: again.chat(question, only).headers.get("x-hitherto-cache") == "exact", 5), question  # noqa: B023
    with contextlib.closing(sqlite3.connect(again.folder / "data" / "answers.sqlite")) as database:
        assert database.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        # The index is rebuilt from the store, with what the crash left without a vector.
        vectors = "SELECT count(*) FROM vectors"
        entries = "hitherto_answer_entries"
        assert eventually(lambda: again.metric(entries) == database.execute(vectors).fetchone()[0], 120)
    assert again.stop() == 0


def test_a_full_disk_costs_nothing_but_the_copy_and_heals(tmp_path: Path, fake: FakeServer) -> None:
    gateway = transparent(tmp_path, fake)
    path = gateway.folder / "data" / "answers.sqlite"
    full = max(file.stat().st_size for file in (*path.parent.glob("answers.sqlite*"), gateway.log_path))
    # No file of this process may grow beyond what the largest one is now: writing fails as on a full disk.
    resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (full, resource.RLIM_INFINITY))
    for number in range(3):
        fake.app.script = Script(text="y" * 20_000)
        assert gateway.chat(f"while full {number}", KEY).headers["x-hitherto-cache"] == "miss"
        assert gateway.chat(f"while full {number}", KEY).headers["x-hitherto-cache"] == "exact", "memory has it"
    assert eventually(lambda: gateway.metric("hitherto_faults_total", part="store") > 0)
    resource.prlimit(gateway.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    count = "SELECT count(*) FROM answers"
    with sqlite3.connect(path, timeout=10) as database:
        assert eventually(lambda: database.execute(count).fetchone()[0] == 3, 10), "written when there is room again"
    assert gateway.stop() == 0


def test_a_locked_database_is_waited_for_behind_the_clients_back(tmp_path: Path, fake: FakeServer) -> None:
    gateway = transparent(tmp_path, fake)
    database = sqlite3.connect(gateway.folder / "data" / "answers.sqlite", isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    for _ in range(2):
        assert gateway.chat("while locked", KEY).status_code == 200, "the lock is still held"
    assert gateway.chat("while locked", KEY).headers["x-hitherto-cache"] == "exact"
    assert gateway.metric("hitherto_faults_total", part="store") == 0, "who had waited for the file would have given up"
    database.execute("ROLLBACK")
    count = "SELECT count(*) FROM answers"
    assert eventually(lambda: database.execute(count).fetchone()[0] == 1, 15)
    database.close()
    assert gateway.stop() == 0


def test_a_broken_row_is_a_miss_and_is_replaced(tmp_path: Path, fake: FakeServer) -> None:
    gateway = transparent(tmp_path, fake)
    gateway.chat("breaks", KEY)
    gateway.chat("What is the capital of France?", KEY)
    gateway.stop()
    with sqlite3.connect(tmp_path / "data" / "answers.sqlite") as database:
        database.execute("UPDATE answers SET body = x'00ff7b'")
        database.execute("UPDATE vectors SET packed = x'00'")
    gateway = transparent(tmp_path, fake)
    fake.app.script = Script(text="fresh")
    assert gateway.chat("breaks", KEY).json()["choices"][0]["message"]["content"] == "fresh"
    assert gateway.chat("breaks", KEY).headers["x-hitherto-cache"] == "exact"
    assert gateway.chat("Tell me the capital of France", KEY).status_code == 200
    assert gateway.metric("hitherto_faults_total", part="store") >= 1
    assert gateway.stop() == 0
