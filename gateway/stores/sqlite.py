"""Answers in one SQLite file (WAL): the truth on one machine; everything in memory is rebuilt from it."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gateway.stores.contract import Entry, Known

SCHEMA_VERSION = 2
_SCHEMA = """
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, key BLOB NOT NULL UNIQUE,
    scope BLOB NOT NULL, tenant TEXT NOT NULL, surface TEXT NOT NULL, model TEXT NOT NULL,
    backend TEXT NOT NULL, question TEXT, body BLOB NOT NULL, has_usage INTEGER NOT NULL,
    created REAL NOT NULL, expires REAL NOT NULL, vector BLOB, embedder TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_created ON answers (created);
"""
_COLUMNS = "key, scope, tenant, surface, model, backend, question, body, has_usage, created, expires, vector, embedder"

_DELETE = "DELETE FROM answers WHERE key = ? AND created <= ?"  # a newer one is another worker's, and stays
_FACTS = "created, expires, length(body) + coalesce(length(question), 0), scope, has_usage"


def _known(created: float, expires: float, size: int, scope: bytes, has_usage: int) -> Known:
    return Known(created, expires, size, scope, bool(has_usage))


class SQLiteAnswers:
    """An `AnswerStore` in a file. Thread-safe: one connection for reading, one for writing, each behind a lock."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer, self._write_lock = _connect(path), threading.Lock()
        version = self._writer.execute("PRAGMA user_version").fetchone()[0]
        if version not in (0, SCHEMA_VERSION):
            # Answers can always be computed again, so an unknown layout is set aside, not guessed at.
            self._writer.executescript("DROP TABLE IF EXISTS answers")
        self._writer.executescript(_SCHEMA + f"PRAGMA user_version = {SCHEMA_VERSION};")
        self._reader, self._read_lock = _connect(path), threading.Lock()

    def known(self) -> Iterator[tuple[bytes, Known]]:
        for key, *facts in self._rows(f"SELECT key, {_FACTS} FROM answers ORDER BY created"):
            yield key, _known(*facts)

    def last(self) -> int:
        return int(next(iter(self._rows("SELECT coalesce(max(number), 0) FROM answers")))[0])

    def since(self, number: int, embedder: str) -> Iterator[tuple[int, bytes, Known, bytes | None]]:
        vector = "CASE WHEN embedder = ? THEN vector END"
        query = f"SELECT number, key, {vector}, {_FACTS} FROM answers WHERE number > ? ORDER BY number"
        for written, key, found, *facts in self._rows(query, embedder, number):
            yield written, key, _known(*facts), found

    def vectors(self, embedder: str) -> Iterator[tuple[bytes, bytes, bytes]]:
        query = "SELECT key, scope, vector FROM answers WHERE vector IS NOT NULL AND embedder = ?"
        yield from ((key, scope, vector) for key, scope, vector in self._rows(query, embedder))

    def get(self, key: bytes) -> Entry | None:
        with self._read_lock:
            row = self._reader.execute(f"SELECT {_COLUMNS} FROM answers WHERE key = ?", (key,)).fetchone()
        if row is None:
            return None
        fields = dict(zip(_COLUMNS.split(", "), row, strict=True))
        return Entry(**{**fields, "has_usage": bool(fields["has_usage"])})

    def put(self, entries: Sequence[Entry]) -> None:
        rows = [
            (e.key, e.scope, e.tenant, e.surface, e.model, e.backend, e.question, e.body, e.has_usage, e.created,
             e.expires, e.vector, e.embedder)
            for e in entries
        ]  # fmt: skip
        replaced = [(e.key, e.created) for e in entries]
        with self._write_lock, self._writer:
            self._writer.executemany(_DELETE, replaced)
            self._writer.executemany(f"INSERT OR IGNORE INTO answers ({_COLUMNS}) VALUES ({'?, ' * 12}?)", rows)

    def delete(self, keys: Sequence[tuple[bytes, float]]) -> None:
        with self._write_lock, self._writer:
            self._writer.executemany(_DELETE, keys)

    def close(self) -> None:
        with self._read_lock, self._write_lock:
            self._reader.close()
            self._writer.close()

    def _rows(self, query: str, *parameters: object) -> Iterator[tuple[Any, ...]]:
        """All rows of a query, fetched in pieces so that a large table neither fills memory nor holds the lock."""
        with self._read_lock:
            cursor = self._reader.execute(query, parameters)
            rows = cursor.fetchmany(1000)
        while rows:
            yield from rows
            with self._read_lock:
                rows = cursor.fetchmany(1000)


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=5.0, check_same_thread=False)
    connection.execute("PRAGMA journal_mode = WAL")
    # In WAL mode NORMAL loses nothing when the process dies, only (never corrupting) when the machine does.
    connection.execute("PRAGMA synchronous = NORMAL")
    connection.execute("PRAGMA busy_timeout = 5000")
    return connection
