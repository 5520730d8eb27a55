"""Opening SQLite files that several processes open at once."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE = 5.0


def opened(path: Path, prepare: Callable[[sqlite3.Connection], None], autocommit: bool = False) -> sqlite3.Connection:
    """A connection in WAL mode whose layout `prepare` has made, usable from any thread. Raises `sqlite3.Error`.

    In WAL mode synchronous NORMAL loses nothing when the process dies, only (never corrupting) when the machine does.
    SQLite's own patience does not cover the change to WAL, so whoever comes at the same moment tries again.
    """
    deadline = time.monotonic() + PATIENCE
    while True:
        connection = sqlite3.connect(
            path, timeout=PATIENCE, check_same_thread=False, isolation_level=None if autocommit else "DEFERRED"
        )
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
            prepare(connection)
            return connection
        except sqlite3.OperationalError:
            connection.close()
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        except BaseException:
            connection.close()
            raise


def nothing(connection: sqlite3.Connection) -> None:
    """For files whose layout somebody else has made."""
