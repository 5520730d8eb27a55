"""The ledger in one SQLite file (WAL): rows for a while, and what they add up to by minute, hour and day."""

from __future__ import annotations

import math
import sqlite3
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import orjson

from gateway.stores.contract import Audit, Booking, Query
from gateway.stores.sqlite_file import nothing, opened

SPANS = (60, 3600, 86400)
"""Seconds of a minute, an hour and a day, by which rows are added up."""
SCHEMA_VERSION = 1
KEYS = ("tenant", "key", "model", "backend", "surface", "cache", "outcome")
"""What roll-ups are kept by."""
SUMS = (
    "requests", "parts", "prompt", "completion", "cached", "written", "device", "ram", "disk", "redis", "upstream",
    "avoided_prompt", "avoided_completion", "cost", "lookup", "saved_exact", "saved_semantic", "saved_prefix",
    "unpriced", "estimated", "seconds",
)  # fmt: skip
"""What is added up."""
SOURCES = ("device", "ram", "disk", "redis", "upstream")
_ROW = tuple(one.name for one in fields(Booking))
_SCHEMA = f"""
CREATE TABLE IF NOT EXISTS rows (number INTEGER PRIMARY KEY AUTOINCREMENT, {", ".join(_ROW)});
CREATE INDEX IF NOT EXISTS rows_at ON rows (at);
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
_INSERT = f"INSERT INTO rows ({', '.join(_ROW)}) VALUES ({', '.join('?' * len(_ROW))})"
_ADD = (
    f"INSERT INTO totals VALUES ({', '.join('?' * (2 + len(KEYS) + len(SUMS)))}) "
    f"ON CONFLICT DO UPDATE SET {', '.join(f'{name} = {name} + excluded.{name}' for name in SUMS)}"
)
_ADD_LATENCY = (
    "INSERT INTO latencies VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET count = count + excluded.count"
)
_ADD_ENTRY = (
    "INSERT INTO entries VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET "
    "hits = hits + excluded.hits, saved = saved + excluded.saved, last = max(last, excluded.last)"
)
BUCKETS_PER_OCTAVE = 8
_TIDY_ROWS = 20_000


class SQLiteLedger:
    """A `LedgerStore` in a file. Thread-safe; several processes may write to the same file."""

    def __init__(self, path: Path, keep: Mapping[str, float]) -> None:
        """`keep`: seconds that `rows`, `minutes`, `hours` and `days` are kept. Raises `sqlite3.Error`."""
        self._keep = keep
        self._writer, self._write_lock = opened(path, _prepare, autocommit=True), threading.Lock()
        self._path, self._local = path, threading.local()

    def add(self, rows: Sequence[Booking]) -> None:
        totals, latencies, entries = _added_up(rows)
        with self._write_lock, self._writer:
            self._writer.execute("BEGIN IMMEDIATE")
            self._writer.executemany(_INSERT, map(_values, rows))
            self._writer.executemany(_ADD, totals)
            self._writer.executemany(_ADD_LATENCY, latencies)
            self._writer.executemany(_ADD_ENTRY, entries)

    def tidy(self, now: float) -> None:
        ages = dict(zip(SPANS, (self._keep["minutes"], self._keep["hours"], self._keep["days"]), strict=True))
        for span, age in ages.items():
            for table in ("totals", "latencies"):
                self._delete(f"DELETE FROM {table} WHERE span = ? AND start < ?", span, now - age)
        self._delete("DELETE FROM entries WHERE start < ?", now - self._keep["hours"])
        gone = _TIDY_ROWS
        while gone == _TIDY_ROWS:  # in pieces: whoever writes must not wait for long
            chosen = f"SELECT number FROM rows WHERE at < ? ORDER BY at LIMIT {_TIDY_ROWS}"
            gone = self._delete(f"DELETE FROM rows WHERE number IN ({chosen})", now - self._keep["rows"])

    def totals(self, query: Query) -> list[dict[str, Any]]:
        names = ["start" if name == "time" else name for name in query.by]
        sums = ", ".join(f"sum({name}) AS {name}" for name in SUMS)
        where, values = _where(query)
        head = "".join(f"{name}, " for name in names)
        group = f" GROUP BY {', '.join(names)} ORDER BY {', '.join(names)}" if names else ""
        return self._read(f"SELECT {head}{sums} FROM totals WHERE {where}{group}", values)

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
            values = audit.at, audit.actor, audit.action, audit.detail, audit.outcome
            self._writer.execute(
                "INSERT INTO audits (at, actor, action, detail, outcome) VALUES (?, ?, ?, ?, ?)", values
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


def _values(row: Booking) -> tuple[Any, ...]:
    values = [getattr(row, name) for name in _ROW]
    values[_SOURCES_AT] = orjson.dumps(row.sources).decode() if row.sources else ""
    values[_TAGS_AT] = orjson.dumps(row.tags).decode() if row.tags else ""
    return tuple(values)


_SOURCES_AT, _TAGS_AT = _ROW.index("sources"), _ROW.index("tags")


def _readable(row: dict[str, Any]) -> dict[str, Any]:
    sources = orjson.loads(row["sources"]) if row["sources"] else {}
    tags = orjson.loads(row["tags"]) if row["tags"] else []
    return {**row, "sources": sources, "tags": tags, "stream": bool(row["stream"]), "estimated": bool(row["estimated"])}


def outcome(row: Booking) -> str:
    """What became of a request, in one word."""
    if row.part != "answer":
        return row.part
    if row.status < 400:
        return "ok"
    return "gone" if row.status == 499 else "refused" if row.status < 500 else "failed"


def kind(row: Booking) -> str:
    """What a time to the first byte is counted as; empty: not at all."""
    if row.ttft is None or row.part != "answer" or row.status != 200:
        return ""
    if row.cache in ("exact", "semantic", "alias", "stale"):
        return "hit"
    return "prefix" if row.cached else "miss"


def _added_up(rows: Iterable[Booking]) -> tuple[list[Any], list[Any], list[Any]]:
    """What rows add up to, for each of the three tables of sums."""
    totals: dict[tuple[Any, ...], list[Any]] = {}
    latencies: dict[tuple[Any, ...], int] = {}
    entries: dict[tuple[Any, ...], list[Any]] = {}
    for row in rows:
        minute = int(row.at) // 60 * 60
        group = (minute, row.tenant, row.key, row.model, row.backend, row.surface, row.cache, outcome(row))
        sums = totals.get(group)
        amounts = _amounts(row)
        totals[group] = amounts if sums is None else [a + b for a, b in zip(sums, amounts, strict=True)]
        if (found := kind(row)) and row.ttft is not None:
            spot = minute, row.tenant, found, bucket(row.ttft)
            latencies[spot] = latencies.get(spot, 0) + 1
        if found == "hit" and row.entry:
            entry = entries.setdefault((int(row.at) // 86400 * 86400, row.tenant, row.entry, row.model), [0, 0, row.at])
            entry[0] += 1
            entry[1] += row.saved_answer
            entry[2] = max(entry[2], row.at)
    return (
        [(span, start // span * span, *rest, *sums) for (start, *rest), sums in totals.items() for span in SPANS],
        [(span, start // span * span, *rest, count) for (start, *rest), count in latencies.items() for span in SPANS],
        [(*key, *values) for key, values in entries.items()],
    )


def _amounts(row: Booking) -> list[Any]:
    """In the order of `SUMS`."""
    semantic = row.cache in ("semantic", "alias")
    return [
        int(row.part == "answer"), 1, row.prompt, row.completion, row.cached, row.written,
        *(row.sources.get(name, 0) for name in SOURCES),
        row.avoided_prompt, row.avoided_completion, row.cost or 0, row.lookup,
        # What looking for similar questions takes is the semantic tier's, whether it found something or not.
        0 if semantic else row.saved_answer + row.lookup, row.saved_answer if semantic else -row.lookup,
        row.saved_prefix,
        int(row.cost is None), int(row.estimated), row.seconds if row.part == "answer" else 0.0,
    ]  # fmt: skip


def bucket(seconds: float) -> int:
    """The number of the interval, of eight to the doubling, that a time is counted in."""
    return math.floor(math.log2(max(seconds, 1e-6)) * BUCKETS_PER_OCTAVE)


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
    start = int(query.start) // query.span * query.span
    return where, {"span": query.span, "start": start, "end": query.end, "tenant": query.tenant}
