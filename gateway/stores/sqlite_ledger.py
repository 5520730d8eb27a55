"""The ledger in one SQLite file (WAL): rows for a while, and what they add up to by minute, hour and day."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain
from operator import attrgetter
from pathlib import Path
from typing import Any

import orjson

from gateway.stores.contract import MONDAY, WEEK, Audit, Booking, Query, StoreAway, floored
from gateway.stores.sqlite_file import nothing, opened

SPANS = (60, 3600, 86400, WEEK)
"""Seconds of a minute, an hour, a day and a week, by which rows are added up."""
SCHEMA_VERSION = 1
KEYS = ("tenant", "key", "model", "backend", "surface", "cache", "outcome")
"""What roll-ups are kept by."""
_FIELDS = tuple(one.name for one in fields(Booking))
_ROW = (*_FIELDS, "bucket")
_ROW_PLACES = f"({', '.join('?' * len(_ROW))})"
_AT_ONCE = (512, 64, 8, 1)
"""Rows of one statement. Each statement lets go of the interpreter and waits to get it back, which takes milliseconds
while the event loop is busy: a statement for each row would take seconds."""
_START = "CAST(at AS INTEGER) / {0} * {0}"
_OUTCOME = """CASE WHEN part <> 'answer' THEN part WHEN stored = 'interrupted' THEN 'failed' WHEN status < 400 THEN 'ok'
WHEN status = 499 THEN 'gone' WHEN status < 500 THEN 'refused' ELSE 'failed' END"""
"""What became of a request, in one word."""
_KIND = (
    "CASE WHEN cache IN ('exact', 'semantic', 'alias', 'stale') THEN 'hit' WHEN cached THEN 'prefix' ELSE 'miss' END"
)
"""What a time to the first byte is counted as."""
_FIRST = "bucket IS NOT NULL AND part = 'answer' AND status = 200"
_EXTRA = "part = 'attempt' OR (part = 'late' AND reason = 'refresh')"
_SEMANTIC = "cache IN ('semantic', 'alias')"
_SOURCES = ("device", "ram", "disk", "redis", "upstream")
_AMOUNTS: Mapping[str, str] = {
    "requests": "part = 'answer'", "parts": "1",
    **{name: name for name in ("prompt", "completion", "cached", "written")},
    **{name: f"coalesce(json_extract(sources, '$.{name}'), 0)" for name in _SOURCES},
    **{name: name for name in ("avoided_prompt", "avoided_completion")},
    "cost": "coalesce(cost, 0)", "lookup": "lookup",
    # What looking for similar questions takes is the semantic tier's, whether it found something or not.
    "saved_exact": f"iif({_SEMANTIC}, 0, saved_answer + lookup)",
    "saved_semantic": f"iif({_SEMANTIC}, saved_answer, -lookup)",
    "saved_prefix": "saved_prefix",
    # What nobody would have paid for without us, so that it is no part of what the same traffic would have cost.
    "extra": f"iif({_EXTRA}, coalesce(cost, 0) + saved_answer + saved_prefix, 0)",
    "unpriced": "cost IS NULL", "estimated": "estimated",
    "seconds": "iif(part = 'answer', seconds, 0.0)",
}  # fmt: skip
"""How a row counts in each sum."""
SUMS = tuple(_AMOUNTS)


def _roll_ups() -> Iterator[str]:
    """Statements that add up the rows after a number by minute, and add that to the sums of each span."""
    keys = ", ".join(_OUTCOME if name == "outcome" else name for name in KEYS)
    amounts = ", ".join(f"sum({amount})" for amount in _AMOUNTS.values())
    places = ", ".join(str(number) for number in range(1, 2 + len(KEYS)))
    adds = ", ".join(f"{name} = {name} + excluded.{name}" for name in SUMS)
    minute, number = _START.format(60), "number > :last"
    yield "DELETE FROM temp.new_totals WHERE :last >= 0"
    yield "DELETE FROM temp.new_latencies WHERE :last >= 0"
    yield f"INSERT INTO temp.new_totals SELECT {minute}, {keys}, {amounts} FROM rows WHERE {number} GROUP BY {places}"
    yield (
        f"INSERT INTO temp.new_latencies SELECT {minute}, tenant, {_KIND}, bucket, count(*) FROM rows "
        f"WHERE {number} AND {_FIRST} GROUP BY 1, 2, 3, 4"
    )
    rest = ", ".join((*KEYS, *SUMS))
    for span in SPANS:
        start = f"start / {span} * {span}" if span < WEEK else f"(start + {MONDAY}) / {WEEK} * {WEEK} - {MONDAY}"
        yield (
            f"INSERT INTO totals SELECT {span}, {start}, {rest} FROM temp.new_totals WHERE :last >= 0 "
            f"ON CONFLICT DO UPDATE SET {adds}"
        )
        yield (
            f"INSERT INTO latencies SELECT {span}, {start}, tenant, kind, bucket, count FROM temp.new_latencies "
            "WHERE :last >= 0 ON CONFLICT DO UPDATE SET count = count + excluded.count"
        )
    yield (
        f"INSERT INTO entries SELECT {_START.format(86400)}, tenant, entry, model, count(*), sum(saved_answer), "
        f"max(at) FROM rows WHERE {number} AND {_FIRST} AND entry <> '' AND {_KIND} = 'hit' GROUP BY 1, 2, 3, 4 "
        "ON CONFLICT DO UPDATE SET hits = hits + excluded.hits, saved = saved + excluded.saved, "
        "last = max(last, excluded.last)"
    )


_ROLL_UPS = tuple(_roll_ups())
_SCRATCH = f"""
CREATE TEMP TABLE IF NOT EXISTS new_totals (start, {", ".join((*KEYS, *SUMS))});
CREATE TEMP TABLE IF NOT EXISTS new_latencies (start, tenant, kind, bucket, count);
"""
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(_ROW)});
CREATE INDEX IF NOT EXISTS rows_tenant ON rows (tenant, number);
CREATE INDEX IF NOT EXISTS rows_request ON rows (request);
CREATE TABLE IF NOT EXISTS totals (
    span INTEGER, start INTEGER, {", ".join(f"{name} TEXT" for name in KEYS)},
    {", ".join(f"{name} NOT NULL" for name in SUMS)}, PRIMARY KEY (span, start, {", ".join(KEYS)})
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS latencies (
    span INTEGER, start INTEGER, tenant TEXT, kind TEXT, bucket INTEGER, count INTEGER NOT NULL,
    PRIMARY KEY (span, start, tenant, kind, bucket)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS entries (
    start INTEGER, tenant TEXT, entry TEXT, model TEXT, hits INTEGER NOT NULL, saved INTEGER NOT NULL,
    last REAL NOT NULL,
    PRIMARY KEY (start, tenant, entry, model)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS audits (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL, actor TEXT, action TEXT, detail TEXT, outcome TEXT
);
"""
BUCKETS_PER_OCTAVE = 8
"""Times are counted in intervals, eight to the doubling."""
_TIDY_ROWS = 20_000
_LOOKED_AT = 300_000
_TAIL = """DELETE FROM entries WHERE (start, tenant, entry, model) IN (
    SELECT start, tenant, entry, model FROM (
        SELECT *, row_number() OVER (PARTITION BY start ORDER BY saved DESC) AS place FROM entries WHERE start < ?
    ) WHERE place > 1000)"""
"""Of days that are over the thousand answers that saved most are enough."""
GROUPS_MOST = 10_000
"""Groups of one question; more are for nobody to look at."""


class SQLiteLedger:
    """A `LedgerStore` in a file. Thread-safe; several processes may write to the same file."""

    def __init__(self, path: Path, keep: Mapping[str, float]) -> None:
        """`keep`: seconds that `rows`, `minutes`, `hours` and `days` are kept. Raises `sqlite3.Error`."""
        self._keep = keep
        self._writer, self._write_lock = opened(path, _prepare, autocommit=True), threading.Lock()
        self._path, self._local = path, threading.local()

    def add(self, rows: Sequence[Booking]) -> None:
        values = list(map(_values, rows))
        try:
            with self._write_lock:
                self._writer.execute("BEGIN IMMEDIATE")
                try:
                    self._add(values)
                    self._writer.execute("COMMIT")
                except BaseException:
                    self._writer.execute("ROLLBACK")
                    raise
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError) or type(error) is sqlite3.DatabaseError:
                raise StoreAway(str(error)) from error  # locked, full, broken: it is not these rows' fault
            raise

    def _add(self, values: Sequence[Sequence[Any]]) -> None:
        last, done = self._writer.execute("SELECT coalesce(max(number), 0) FROM rows").fetchone()[0], 0
        while done < len(values):
            size = next(size for size in _AT_ONCE if size <= len(values) - done)
            statement = f"INSERT INTO rows ({', '.join(_ROW)}) VALUES {', '.join([_ROW_PLACES] * size)}"
            self._writer.execute(statement, tuple(chain.from_iterable(values[done : done + size])))
            done += size
        for statement in _ROLL_UPS:
            self._writer.execute(statement, {"last": last})

    def tidy(self, now: float) -> None:
        kept = (self._keep["minutes"], self._keep["hours"], self._keep["days"], self._keep["days"])
        ages = dict(zip(SPANS, kept, strict=True))
        for span, age in ages.items():
            for table in ("totals", "latencies"):
                self._delete(f"DELETE FROM {table} WHERE span = ? AND start < ?", span, now - age)
        self._delete("DELETE FROM entries WHERE start < ?", now - self._keep["hours"])
        self._delete(_TAIL, now - 2 * 86400)
        self._delete("DELETE FROM audits WHERE at < ?", now - self._keep["days"])
        gone = _TIDY_ROWS
        while gone == _TIDY_ROWS:  # in pieces: whoever writes must not wait for long
            # They are numbered about as they came, and an index of times would cost every row.
            oldest = f"(SELECT number, at FROM rows ORDER BY number LIMIT {_TIDY_ROWS})"
            chosen = f"SELECT number FROM {oldest} WHERE at < ? OR at > ?"  # booked while a clock was ahead
            gone = self._delete(f"DELETE FROM rows WHERE number IN ({chosen})", now - self._keep["rows"], now + 86400)

    def totals(self, query: Query) -> list[dict[str, Any]]:
        names = ["start" if name == "time" else name for name in query.by]
        sums = ", ".join(f"sum({name}) AS {name}" for name in SUMS)
        where, values = _where(query)
        head = "".join(f"{name}, " for name in names)
        group = f" GROUP BY {', '.join(names)} ORDER BY {', '.join(names)}" if names else ""
        return self._read(f"SELECT {head}{sums} FROM totals WHERE {where}{group} LIMIT {GROUPS_MOST + 1}", values)

    def quantiles(self, query: Query) -> list[dict[str, Any]]:
        names = ["start" if name == "time" else name for name in (*query.by, "kind")]
        where, values = _where(query)
        columns = ", ".join(names)
        rows = self._read(
            f"SELECT {columns}, bucket, sum(count) AS count FROM latencies WHERE {where} "
            f"GROUP BY {columns}, bucket ORDER BY {columns}, bucket",
            values,
        )
        groups: dict[tuple[Any, ...], list[tuple[int, int]]] = {}
        for row in rows:
            groups.setdefault(tuple(row[name] for name in names), []).append((row["bucket"], row["count"]))
        return [{**dict(zip(names, group, strict=True)), **_quantiles(found)} for group, found in groups.items()]

    def entries(self, query: Query, limit: int) -> list[dict[str, Any]]:
        whose = " AND tenant = :tenant" if query.tenant else ""
        day = query.start - query.start % 86400
        return self._read(
            "SELECT entry, tenant, model, sum(hits) AS hits, sum(saved) AS saved, max(last) AS last FROM entries "
            f"WHERE start >= :start AND start < :end{whose} GROUP BY entry, tenant, model "
            "ORDER BY saved DESC, hits DESC LIMIT :limit",
            {"start": day, "end": query.end, "tenant": query.tenant, "limit": limit},
        )

    def rows(
        self, tenant: str, before: int, after: int, limit: int, conditions: Mapping[str, str]
    ) -> list[dict[str, Any]]:
        where = "number > :after"
        values: dict[str, Any] = {"after": after, "limit": limit}
        if before:
            where, values = f"{where} AND number < :before", {**values, "before": before}
        chosen = dict(conditions) | ({"tenant": tenant} if tenant else {})
        for name, value in chosen.items():
            if name not in _ROW:
                raise ValueError(f"rows have no {name!r}")
            where, values = f"{where} AND {name} = :{name}", {**values, name: value}
        if chosen and not {"request", "tenant"} & chosen.keys():  # of what has no index only the latest is looked at
            where += f" AND number > (SELECT coalesce(max(number), 0) FROM rows) - {_LOOKED_AT}"
        found = self._read(f"SELECT * FROM rows WHERE {where} ORDER BY number DESC LIMIT :limit", values)
        return [_readable(row) for row in found]

    def row(self, number: int, tenant: str) -> list[dict[str, Any]]:
        found = self._read("SELECT * FROM rows WHERE number = ?", (number,))
        if not found or (tenant and found[0]["tenant"] != tenant):
            return []
        one = found[0]
        others = self._read(
            "SELECT * FROM rows WHERE request = ? AND tenant = ? AND number <> ? AND abs(at - ?) < 3600 "
            "ORDER BY number LIMIT 100",
            (one["request"], one["tenant"], number, one["at"]),
        )
        return [_readable(row) for row in (one, *(others if one["request"] else ()))]

    def note(self, audit: Audit) -> None:
        with self._write_lock, self._writer:
            # Several workers see the same file change.
            columns = "at, actor, action, detail, outcome"
            self._writer.execute(
                f"INSERT INTO audits ({columns}) SELECT :at, :actor, :action, :detail, :outcome "
                "WHERE NOT EXISTS (SELECT 1 FROM audits WHERE at > :at - 5 AND actor = :actor AND action = :action "
                "AND detail = :detail AND outcome = :outcome AND :actor = 'tenants'' files')",
                asdict(audit),
            )

    def audits(self, limit: int) -> list[dict[str, Any]]:
        return self._read("SELECT * FROM audits ORDER BY number DESC LIMIT ?", (limit,))

    def close(self) -> None:
        with self._write_lock:
            self._writer.close()

    def _read(self, query: str, values: Any) -> list[dict[str, Any]]:
        """By a connection of the thread's own: nobody who asks waits for another, or for who writes."""
        connection: sqlite3.Connection | None = getattr(self._local, "connection", None)
        if connection is None:
            connection = self._local.connection = opened(self._path, nothing, autocommit=True)
            connection.row_factory = sqlite3.Row
            connection.execute("PRAGMA query_only = ON")
            connection.execute("PRAGMA cache_size = -32768")
        return [dict(row) for row in connection.execute(query, values)]

    def _delete(self, statement: str, *values: float) -> int:
        with self._write_lock, self._writer:
            return self._writer.execute(statement, values).rowcount


def _prepare(connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, SCHEMA_VERSION):
        raise sqlite3.DatabaseError(f"its layout is version {version}, and this release knows {SCHEMA_VERSION}")
    if version == 0:
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;")
    connection.execute("PRAGMA temp_store = MEMORY")
    connection.execute("PRAGMA cache_size = -32768")
    connection.executescript(_SCRATCH)


_fields = attrgetter(*_FIELDS)
_SOURCES_AT, _TAGS_AT = _ROW.index("sources"), _ROW.index("tags")


def _values(row: Booking) -> list[Any]:
    values = list(_fields(row))
    values[_SOURCES_AT] = orjson.dumps(row.sources).decode() if row.sources else None
    values[_TAGS_AT] = orjson.dumps(row.tags).decode() if row.tags else None
    values.append(None if row.ttft is None else math.floor(math.log2(max(row.ttft, 1e-6)) * BUCKETS_PER_OCTAVE))
    return values


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    sources = orjson.loads(row["sources"]) if row["sources"] else {}
    tags = orjson.loads(row["tags"]) if row["tags"] else []
    return {**row, "sources": sources, "tags": tags, "stream": bool(row["stream"]), "estimated": bool(row["estimated"])}


def _quantiles(found: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Of times that are counted by bucket, each taken as its bucket's middle (wrong by 5 % at most)."""
    count = sum(number for _, number in found)
    result: dict[str, float] = {"count": count}
    for name, share in (("p50", 0.5), ("p95", 0.95)):
        left = max(1, math.ceil(share * count))
        for place, number in found:
            left -= number
            if left <= 0:
                result[name] = 2 ** ((place + 0.5) / BUCKETS_PER_OCTAVE)
                break
    return result


def _where(query: Query) -> tuple[str, dict[str, Any]]:
    where = "span = :span AND start >= :start AND start < :end" + (" AND tenant = :tenant" if query.tenant else "")
    start = floored(query.start, query.span)
    return where, {"span": query.span, "start": start, "end": query.end, "tenant": query.tenant}
