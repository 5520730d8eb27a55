"""Answers in one SQLite file (WAL): the truth on one machine; everything in memory is rebuilt from it."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson

from gateway.stores.contract import OBSERVATIONS, BrokenRow, Entry, Known, Observation, Row, Selector, Shape, Vector
from gateway.stores.sqlite_file import nothing, opened

SCHEMA_VERSION = 3
_TABLES = ("answers", "vectors", "removals", "scopes", "denials", "leases", "evidence")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE,
    scope BLOB NOT NULL, tenant TEXT NOT NULL, surface TEXT NOT NULL, model TEXT NOT NULL,
    backend TEXT NOT NULL, question TEXT, body BLOB NOT NULL, has_usage INTEGER NOT NULL,
    created REAL NOT NULL, expires REAL NOT NULL, stale_until REAL NOT NULL, cost REAL NOT NULL,
    tags TEXT NOT NULL, target BLOB, embeds INTEGER NOT NULL, seal BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_scope ON answers (scope);
CREATE TABLE IF NOT EXISTS vectors (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE, scope BLOB NOT NULL, created REAL NOT NULL,
    embedder TEXT NOT NULL, packed BLOB NOT NULL
);
CREATE TABLE IF NOT EXISTS removals (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL, created REAL NOT NULL, at REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS scopes (scope BLOB PRIMARY KEY, parts BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS denials (
    asked BLOB NOT NULL, entry BLOB NOT NULL, PRIMARY KEY (asked, entry)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS evidence (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, tenant TEXT NOT NULL, grouped BLOB NOT NULL,
    entry BLOB NOT NULL, created REAL NOT NULL, asked BLOB NOT NULL, score REAL NOT NULL, is_right INTEGER,
    source TEXT NOT NULL, judge TEXT NOT NULL, UNIQUE (at, asked, entry)
);
CREATE TABLE IF NOT EXISTS leases (key BLOB PRIMARY KEY, holder TEXT NOT NULL, until REAL NOT NULL) WITHOUT ROWID;
"""
_COLUMNS = (
    "key, scope, tenant, surface, model, backend, question, body, has_usage, created, expires, cost, "
    "stale_until, tags, target, embeds"
)
_DELETE = "DELETE FROM {} WHERE key = ? AND created <= ?"  # a newer one is another worker's, and stays
_SIZE = "length(body) + coalesce(length(question), 0)"
REMEMBER_REMOVALS = 3600.0
"""Seconds that removals are told to others; whoever was away longer reads everything anew."""


def _prepare(connection: sqlite3.Connection) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, SCHEMA_VERSION):
        # Answers can always be computed again, so an unknown layout is dropped, not guessed at.
        connection.executescript("".join(f"DROP TABLE IF EXISTS {table};" for table in _TABLES))
    connection.executescript(_SCHEMA + f"PRAGMA user_version = {SCHEMA_VERSION};")


class SQLiteAnswers:
    """An `AnswerStore` in a file. Thread-safe: connections for single rows, scans and writing, each behind a lock."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer, self._write_lock = opened(path, _prepare), threading.Lock()
        self._reader, self._read_lock = opened(path, nothing), threading.Lock()
        self._scanner, self._scan_lock = opened(path, nothing), threading.Lock()
        """For whatever reads many rows: a lookup does not wait for it."""

    def rows(self, after: int = 0) -> Iterator[Row]:
        query = (
            f"SELECT number, key, scope, created, expires, stale_until, {_SIZE}, cost, has_usage "
            "FROM answers WHERE number > ? ORDER BY number"
        )
        for number, key, scope, created, expires, stale, size, cost, usage in self._rows(query, after):
            known = Known(created, expires, max(expires, stale), size, cost, bool(usage), created)
            yield Row(number, key, scope, known)

    def vectors(self, embedder: str, after: int = 0) -> Iterator[tuple[int, Vector]]:
        columns = "number, key, scope, created, embedder, packed"
        query = f"SELECT {columns} FROM vectors WHERE embedder = ? AND number > ? ORDER BY number"
        for number, *fields in self._rows(query, embedder, after):
            yield number, Vector(*fields)

    def removed(self, after: int) -> list[tuple[int, bytes, float]]:
        return list(self._rows("SELECT number, key, created FROM removals WHERE number > ? ORDER BY number", after))

    def last(self) -> tuple[int, int, int]:
        newest = "SELECT coalesce((SELECT seq FROM sqlite_sequence WHERE name = ?), 0)"
        answers, vectors, removals = (
            int(next(self._rows(newest, table))[0]) for table in ("answers", "vectors", "removals")
        )
        return answers, vectors, removals

    def get(self, key: bytes) -> Entry | None:
        with self._read_lock:
            row = self._reader.execute(f"SELECT seal, {_COLUMNS} FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        fields = dict(zip(_COLUMNS.split(", "), row[1:], strict=True))
        if row[0] != _seal(key, fields["body"]):
            raise BrokenRow(f"the stored answer {key.hex()[:16]} is not what was written")
        fields |= {name: bool(fields[name]) for name in ("has_usage", "embeds")}
        return Entry(**{**fields, "tags": tuple(orjson.loads(fields["tags"]))})

    def put(self, entries: Sequence[Entry]) -> None:
        entries = list({entry.key: entry for entry in entries}.values())  # of several under one key the last
        rows = [
            (e.key, e.scope, e.tenant, e.surface, e.model, e.backend, e.question, e.body, e.has_usage, e.created,
             e.expires, e.cost, e.stale_until, orjson.dumps(e.tags).decode(), e.target, e.embeds, _seal(e.key, e.body))
            for e in entries
        ]  # fmt: skip
        replaced = [(e.key, e.created) for e in entries]
        with self._write_lock, self._writer:
            self._writer.executemany(_DELETE.format("answers"), replaced)
            # The same entry put again (as an alias, say) keeps its vector.
            self._writer.executemany("DELETE FROM vectors WHERE key = ? AND created < ?", replaced)
            self._writer.executemany(f"INSERT OR IGNORE INTO answers ({_COLUMNS}, seal) VALUES ({'?, ' * 16}?)", rows)

    def put_vectors(self, vectors: Sequence[Vector]) -> None:
        there = "SELECT ?, ?, ?, ?, ? WHERE EXISTS (SELECT 1 FROM answers WHERE key = ? AND created = ?)"
        rows = [(v.key, v.scope, v.created, v.embedder, v.packed, v.key, v.created) for v in vectors]
        with self._write_lock, self._writer:
            self._writer.executemany(
                f"INSERT OR REPLACE INTO vectors (key, scope, created, embedder, packed) {there}", rows
            )

    def delete(self, keys: Sequence[tuple[bytes, float]], announce: bool = False) -> None:
        now = time.time()
        with self._write_lock, self._writer:
            self._delete(keys)
            if announce:
                self._writer.execute("DELETE FROM removals WHERE at < ?", (now - REMEMBER_REMOVALS,))
                self._writer.executemany(
                    "INSERT INTO removals (key, created, at) VALUES (?, ?, ?)",
                    [(key, created, now) for key, created in keys],
                )

    def find(self, selector: Selector) -> list[tuple[bytes, float, int]]:
        conditions: list[str] = ["1"]
        values: list[object] = []
        for condition, value in (
            ("key BETWEEN ? AND ?", _between(selector.entry) if selector.entry else ""),
            ("EXISTS (SELECT 1 FROM json_each(tags) WHERE value = ?)", selector.tag),
            ("model = ?", selector.model),
            ("tenant = ?", selector.tenant),
            ("created < ?", "" if selector.older_than is None else time.time() - selector.older_than),
        ):
            if value != "":
                conditions.append(condition)
                values += value if isinstance(value, list) else [value]
        meant = f"SELECT key FROM answers WHERE {' AND '.join(conditions)}"
        query = f"SELECT key, created, {_SIZE} FROM answers WHERE key IN ({meant}) OR target IN ({meant})"
        return list(self._rows(query, *values, *values))

    def unembedded(self, embedder: str, limit: int) -> list[tuple[bytes, bytes, float, str]]:
        query = (
            "SELECT key, scope, created, question FROM answers WHERE embeds AND NOT EXISTS (SELECT 1 FROM vectors "
            "WHERE vectors.key = answers.key AND vectors.created = answers.created AND embedder = ?) LIMIT ?"
        )
        return list(self._rows(query, embedder, limit))

    def elsewhere(self, scope: bytes, question: str, limit: int) -> list[tuple[bytes, bytes, float]]:
        query = (
            "SELECT key, scope, created FROM answers WHERE question = ? AND scope <> ? ORDER BY created DESC LIMIT ?"
        )
        return list(self._rows(query, question, scope, limit))

    def describe(self, shape: Shape) -> None:
        with self._write_lock, self._writer:
            self._writer.execute("INSERT OR IGNORE INTO scopes VALUES (?, ?)", (shape.scope, orjson.dumps(shape.parts)))

    def tidy(self) -> None:
        alone = "SELECT scope FROM scopes WHERE NOT EXISTS (SELECT 1 FROM answers WHERE answers.scope = scopes.scope)"
        with self._write_lock, self._writer:
            ranked = "SELECT number, row_number() OVER (PARTITION BY tenant ORDER BY number DESC) AS rank FROM evidence"
            old = f"SELECT number FROM ({ranked}) WHERE rank > ?"
            self._writer.execute(f"DELETE FROM evidence WHERE number IN ({old})", (OBSERVATIONS,))
            self._writer.execute("DELETE FROM denials WHERE NOT EXISTS (SELECT 1 FROM answers WHERE key = entry)")
        while True:  # piece by piece, since others wait for the lock
            with self._write_lock, self._writer:
                done = self._writer.execute(f"DELETE FROM scopes WHERE scope IN ({alone} LIMIT 500)").rowcount
                self._writer.execute("DELETE FROM leases WHERE until < ?", (time.time(),))
            if done < 500:
                return

    def described(self, scope: bytes) -> dict[str, str]:
        row = next(self._rows("SELECT parts FROM scopes WHERE scope = ?", scope), None)
        parts: dict[str, str] = orjson.loads(row[0]) if row is not None else {}
        return parts

    def deny(self, asked: bytes, entry: bytes) -> None:
        with self._write_lock, self._writer:
            self._writer.execute("INSERT OR IGNORE INTO denials VALUES (?, ?)", (asked, entry))

    def denied(self) -> list[tuple[bytes, bytes]]:
        return list(self._rows("SELECT asked, entry FROM denials"))

    def observe(self, rows: Sequence[Observation]) -> None:
        values = [
            (o.at, o.tenant, o.group, o.entry, o.created, o.asked, o.score, o.right, o.source, o.judge) for o in rows
        ]
        with self._write_lock, self._writer:
            columns = "at, tenant, grouped, entry, created, asked, score, is_right, source, judge"
            self._writer.executemany(f"INSERT OR IGNORE INTO evidence ({columns}) VALUES ({'?, ' * 9}?)", values)

    def observed(self, after: int = 0) -> list[tuple[int, Observation]]:
        rows = self._rows("SELECT * FROM evidence WHERE number > ? ORDER BY number", after)
        observed = ((row[0], Observation(*row[1:])) for row in rows)
        return [
            (number, replace(one, right=None if one.right is None else bool(one.right))) for number, one in observed
        ]

    def lease(self, key: bytes, holder: str, seconds: float) -> bool:
        now = time.time()
        with self._write_lock, self._writer:
            self._writer.execute("DELETE FROM leases WHERE key = ? AND until < ?", (key, now))
            self._writer.execute("INSERT OR IGNORE INTO leases VALUES (?, ?, ?)", (key, holder, now + seconds))
            row = self._writer.execute("SELECT holder FROM leases WHERE key = ?", (key,)).fetchone()
        return bool(row[0] == holder)

    def release(self, key: bytes, holder: str) -> None:
        with self._write_lock, self._writer:
            self._writer.execute("DELETE FROM leases WHERE key = ? AND holder = ?", (key, holder))

    def statistics(self) -> dict[str, Any]:
        counts = "SELECT count(*), coalesce(sum(length(body)), 0), count(target), min(created) FROM answers"
        entries, size, aliases, oldest = next(self._rows(counts))
        vectors = next(self._rows("SELECT count(*) FROM vectors"))[0]
        by_model = dict(self._rows("SELECT model, count(*) FROM answers GROUP BY model ORDER BY 2 DESC LIMIT 20"))
        return {"entries": entries, "bytes": size, "aliases": aliases, "vectors": vectors, "oldest": oldest,
                "models": by_model, "denied": len(self.denied())}  # fmt: skip

    def _delete(self, keys: Sequence[tuple[bytes, float]]) -> None:
        for table in ("answers", "vectors"):
            self._writer.executemany(_DELETE.format(table), keys)

    def close(self) -> None:
        with self._read_lock, self._scan_lock, self._write_lock:
            self._reader.close()
            self._scanner.close()
            self._writer.close()

    def _rows(self, query: str, *parameters: object) -> Iterator[tuple[Any, ...]]:
        """All rows of a query, fetched in pieces so that a large table neither fills memory nor holds the lock."""
        with self._scan_lock:
            cursor = self._scanner.execute(query, parameters)
            rows = cursor.fetchmany(1000)
        while rows:
            yield from rows
            with self._scan_lock:
                rows = cursor.fetchmany(1000)


def _between(beginning: str) -> list[bytes]:
    """The first and the last key that begin with these hexadecimal digits."""
    even = len(beginning) + len(beginning) % 2
    return [bytes.fromhex(beginning.ljust(even, "0")), bytes.fromhex(beginning.ljust(64, "f"))]


def _seal(key: bytes, body: bytes) -> bytes:
    """A checksum, so that a body that a disk has changed is not taken for an answer."""
    return hashlib.blake2b(body, key=key[:64], digest_size=8).digest()
