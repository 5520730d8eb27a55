"""The ledger's file: rows, roll-ups, quantiles, retention; and the writing behind."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ledger import DAY, Ledger, LedgerConfig, span_of
from gateway.metrics import Metrics
from gateway.stores.contract import WEEK, Audit, Booking, Query, floored
from gateway.stores.sqlite_ledger import SPANS, SUMS, SQLiteLedger
from tests.conftest import comes

NOW = 1_796_000_000.0
KEEP = LedgerConfig().keep()


def booking(at: float = NOW, tenant: str = "acme", **more: object) -> Booking:
    values: dict[str, object] = {"model": "m", "backend": "b", "surface": "openai-chat", "cache": "miss", "status": 200}
    return Booking(at, tenant, **(values | more))  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SQLiteLedger]:
    ledger = SQLiteLedger(tmp_path / "ledger.sqlite", KEEP)
    yield ledger
    ledger.close()


def whole(span: int, tenant: str = "", by: tuple[str, ...] = ()) -> Query:
    return Query(NOW - 400 * DAY, NOW + DAY, span, tenant, by)


ROWS = st.lists(
    st.builds(
        booking,
        at=st.floats(NOW - 300 * DAY, NOW),
        tenant=st.sampled_from(["acme", "globex", "a|b"]),
        part=st.sampled_from(["answer", "answer", "attempt", "late"]),
        cache=st.sampled_from(["exact", "semantic", "miss", "bypass"]),
        status=st.sampled_from([200, 429, 499, 502]),
        prompt=st.integers(0, 10**6),
        cached=st.integers(0, 10**5),
        cost=st.one_of(st.none(), st.integers(0, 10**12)),
        saved_answer=st.integers(-(10**6), 10**12),
        saved_prefix=st.integers(-(10**6), 10**12),
        ttft=st.one_of(st.none(), st.floats(1e-5, 100)),
    ),
    max_size=60,
)


@given(ROWS, st.integers(1, 4))
@settings(max_examples=25, deadline=None)
def test_every_roll_up_adds_up_to_the_rows(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Booking], parts: int
) -> None:
    store = SQLiteLedger(tmp_path_factory.mktemp("ledger") / "l", KEEP)
    for number in range(parts):
        store.add(rows[number::parts])
    for span in SPANS:
        for tenant in ("acme", "globex", "a|b"):
            mine = [row for row in rows if row.tenant == tenant]
            found = store.totals(whole(span, tenant))[0]
            assert (found["parts"] or 0) == len(mine)
            if mine:
                assert found["requests"] == sum(row.part == "answer" for row in mine)
                assert found["cost"] == sum(row.cost or 0 for row in mine)
                assert found["unpriced"] == sum(row.cost is None for row in mine)
                saved = found["saved_exact"] + found["saved_semantic"] + found["saved_prefix"]
                assert saved == sum(row.saved_answer + row.saved_prefix for row in mine)
                assert found["prompt"] == sum(row.prompt for row in mine)
        groups = store.totals(whole(span, by=("time", "tenant", "cache", "outcome")))
        assert sum(group["parts"] for group in groups) == len(rows)
        assert all(group["start"] == floored(group["start"], span) for group in groups)
    store.close()


def test_what_looking_costs_is_the_semantic_tiers(store: SQLiteLedger) -> None:
    store.add([booking(cost=100, lookup=30, saved_answer=-30)])
    store.add([booking(cache="semantic", cost=30, lookup=30, saved_answer=970)])
    store.add([booking(cache="exact", cost=0, saved_answer=500)])
    total = store.totals(whole(60))[0]
    assert (total["saved_exact"], total["saved_semantic"], total["lookup"]) == (500, 940, 60)


def test_rows_come_back_as_they_were_and_only_to_their_tenant(store: SQLiteLedger) -> None:
    store.add([booking(request="r1", tags=("a", "b"), sources={"ram": 5}, similarity=0.9, stream=True, reason="x")])
    store.add([booking(request="r1", part="attempt", cost=7), booking(tenant="globex", request="r1")])
    first = store.rows("", 0, 0, 10, {})[-1]
    assert first["tags"] == ["a", "b"] and first["sources"] == {"ram": 5} and first["stream"] is True
    assert [row["number"] for row in store.rows("acme", 0, 0, 10, {})] == [2, 1]
    assert [row["number"] for row in store.rows("acme", 2, 0, 10, {})] == [1]
    assert [row["number"] for row in store.rows("", 0, 2, 10, {})] == [3]
    assert [row["number"] for row in store.rows("", 0, 0, 10, {"part": "attempt"})] == [2]
    assert store.rows("acme", 0, 0, 10, {"tenant": "globex"})[0]["tenant"] == "acme", "no condition widens it"
    with pytest.raises(ValueError, match="no 'number; --'"):
        store.rows("", 0, 0, 10, {"number; --": "1"})
    assert [row["number"] for row in store.row(1, "acme")] == [1, 2], "other parts of the request, but no one else's"
    assert store.row(3, "acme") == [] and store.row(99, "") == []


def test_quantiles_are_right_within_a_twentieth(store: SQLiteLedger) -> None:
    store.add([booking(ttft=n / 1000, cache="exact") for n in range(1, 1001)])
    store.add([booking(ttft=2.0), booking(ttft=1.0, cached=5), booking(ttft=9.0, status=500), booking(status=200)])
    found = {row["kind"]: row for row in store.quantiles(whole(60))}
    assert found["hit"]["count"] == 1000
    assert found["hit"]["p50"] == pytest.approx(0.5, rel=0.06) and found["hit"]["p95"] == pytest.approx(0.95, rel=0.06)
    assert (found["miss"]["count"], found["prefix"]["count"]) == (1, 1)
    assert found["miss"]["p95"] == pytest.approx(2.0, rel=0.06)
    store.add([booking(ttft=0.0, cached=5)])
    assert {row["kind"]: row["count"] for row in store.quantiles(whole(60))}["prefix"] == 2


def test_the_most_valuable_entries(store: SQLiteLedger) -> None:
    store.add([booking(cache="exact", ttft=0.1, entry="aa", saved_answer=5) for _ in range(3)])
    store.add([booking(cache="semantic", ttft=0.1, entry="bb", saved_answer=100), booking(entry="cc", ttft=0.1)])
    store.add([booking(tenant="globex", cache="exact", ttft=0.1, entry="dd", saved_answer=50)])
    assert [(one["entry"], one["hits"], one["saved"]) for one in store.entries(whole(60), 2)] == [
        ("bb", 1, 100), ("dd", 1, 50),
    ]  # fmt: skip
    assert [one["entry"] for one in store.entries(whole(60, "acme"), 9)] == ["bb", "aa"]


def test_what_is_old_goes_and_sums_stay(tmp_path: Path) -> None:
    keep = {"rows": DAY, "minutes": DAY, "hours": 10 * DAY, "days": 100 * DAY}
    store = SQLiteLedger(tmp_path / "l", keep)
    store.add([booking(NOW - age * DAY, cost=1, cache="exact", ttft=0.1, entry="e") for age in (0, 5, 50, 500)])
    store.tidy(NOW)
    assert len(store.rows("", 0, 0, 10, {})) == 1
    everything = Query(0, NOW + DAY, 60)
    counts = [store.totals(Query(everything.start, everything.end, span))[0]["cost"] for span in SPANS]
    assert counts == [1, 2, 3, 3]
    assert store.entries(Query(0, NOW + DAY, 60), 5)[0]["hits"] == 2
    store.add([booking(NOW + 900 * DAY), *(booking() for _ in range(45_000))])  # one of a clock that was ahead
    store.tidy(NOW + 2 * DAY)
    assert store.rows("", 0, 0, 10, {}) == []
    store.close()


def test_a_year_is_told_by_day_and_an_hour_by_minute() -> None:
    keep = LedgerConfig()
    assert span_of(NOW - 3600, NOW, NOW, keep) == 60
    assert span_of(NOW - DAY, NOW, NOW, keep) == 3600
    assert span_of(NOW - 30 * DAY, NOW, NOW, keep) == 86400
    assert span_of(NOW - 10 * DAY, NOW - 10 * DAY + 3600, NOW, keep) == 3600, "minutes of then are gone"
    assert span_of(NOW - 200 * DAY, NOW - 200 * DAY + 3600, NOW, keep) == 86400
    assert span_of(NOW - 365 * DAY, NOW, NOW, keep) == WEEK
    monday = datetime.fromtimestamp(floored(NOW, WEEK), UTC)
    assert (monday.weekday(), monday.hour) == (0, 0) and 0 <= NOW - monday.timestamp() < WEEK


def test_several_processes_write_to_one_file(tmp_path: Path) -> None:
    stores = [SQLiteLedger(tmp_path / "l", KEEP) for _ in range(4)]

    def write(store: SQLiteLedger) -> None:
        for _ in range(50):
            store.add([booking(cost=1), booking(cost=2)])

    threads = [threading.Thread(target=write, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = stores[0].totals(whole(86400))[0]
    assert (total["parts"], total["cost"]) == (400, 600)


def test_a_file_of_a_later_release_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "l"
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 99")
    with pytest.raises(sqlite3.DatabaseError, match="version 99"):
        SQLiteLedger(path, KEEP)


def test_of_days_that_are_over_the_best_entries_stay(store: SQLiteLedger) -> None:
    hits = [booking(NOW - 5 * DAY, cache="exact", ttft=0.1, entry=f"e{n}", saved_answer=n) for n in range(1200)]
    store.add([*hits, *(booking(cache="exact", ttft=0.1, entry=f"new{n}", saved_answer=1) for n in range(1100))])
    store.tidy(NOW)
    found = store.entries(whole(60), 10_000)
    assert len(found) == 2100 and found[0]["entry"] == "e1199" and min(one["saved"] for one in found) == 1


def test_what_is_tried_again_or_refreshed_is_no_part_of_the_bill_without_us(store: SQLiteLedger) -> None:
    store.add([booking(cost=100), booking(part="attempt", cost=40), booking(part="late", reason="refresh", cost=7)])
    store.add([booking(part="late", reason="background", cost=5)])
    total = store.totals(whole(60))[0]
    assert (total["cost"], total["extra"]) == (152, 47)


async def test_rows_wait_while_the_file_takes_none(tmp_path: Path) -> None:
    store, metrics = SQLiteLedger(tmp_path / "l", KEEP), Metrics()
    ledger = Ledger(store, metrics)
    await ledger.open()
    blocker = sqlite3.connect(tmp_path / "l", isolation_level=None)
    blocker.execute("BEGIN EXCLUSIVE")
    store._writer.execute("PRAGMA busy_timeout = 50")
    ledger.add(booking(cost=5))
    assert await comes(lambda: metrics.faults.labels("ledger")._value.get() >= 1)
    blocker.execute("COMMIT")
    ledger.add(booking(cost=6))
    assert await ledger.settled()
    assert store.totals(whole(60))[0]["cost"] == 11, "nothing is lost, nothing is booked twice"
    await ledger.note("me", "test", "x")
    assert store.audits(5)[0]["actor"] == "me"
    await ledger.close()


async def test_a_row_that_no_file_takes_holds_up_no_other(tmp_path: Path) -> None:
    store, metrics = SQLiteLedger(tmp_path / "l", KEEP), Metrics()
    ledger = Ledger(store, metrics)
    for cost in (1, 1 << 70, 2, "\ud800"):
        ledger.add(booking(cost=cost if isinstance(cost, int) else 4, user=cost if isinstance(cost, str) else ""))
    assert await ledger.settled()
    assert store.totals(whole(60))[0]["cost"] == 3
    assert metrics.faults.labels("ledger")._value.get() == 2
    await ledger.close()


async def test_a_stall_in_the_middle_books_nothing_twice(tmp_path: Path) -> None:
    store, metrics = SQLiteLedger(tmp_path / "l", KEEP), Metrics()
    ledger = Ledger(store, metrics)
    await ledger.open()
    store._writer.execute("PRAGMA busy_timeout = 20")
    blocker = sqlite3.connect(tmp_path / "l", isolation_level=None)
    for cost in (1, 1 << 70, 2):
        ledger.add(booking(cost=cost))
    blocker.execute("BEGIN EXCLUSIVE")
    assert not await ledger.settled()
    blocker.execute("COMMIT")
    assert await ledger.settled() and store.totals(whole(60))[0]["cost"] == 3
    ledger.add(booking(cost=4))
    assert await comes(lambda: store.totals(whole(60))[0]["cost"] == 7), "the writing goes on"
    await ledger.close()


async def test_rows_are_written_by_themselves(tmp_path: Path) -> None:
    store = SQLiteLedger(tmp_path / "l", KEEP)
    ledger = Ledger(store, Metrics())
    await ledger.open()
    with sqlite3.connect(tmp_path / "l") as other:
        for number in range(5):
            ledger.add(booking())
            for _ in range(1000):
                await asyncio.sleep(0.01)
                if other.execute("SELECT count(*) FROM rows").fetchone()[0] == number + 1:
                    break
            else:
                pytest.fail("not written in ten seconds")
    await ledger.close()


def test_the_audit_is_kept_in_order(store: SQLiteLedger) -> None:
    for number in range(3):
        store.note(Audit(NOW, "admin", f"do {number}"))
    assert [one["action"] for one in store.audits(2)] == ["do 2", "do 1"]


def test_sums_have_no_gaps() -> None:
    assert len(set(SUMS)) == len(SUMS)
