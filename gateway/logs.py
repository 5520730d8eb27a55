"""One structured line per request, on standard error. Never a body, never a credential."""

from __future__ import annotations

import logging
import os
import random
import sys
import time
from functools import lru_cache
from typing import Any

import orjson

_access_log = True
_ids = random.Random(os.urandom(32))


class _Lines(logging.Formatter):
    """JSON lines; an access record brings its fields along."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _timestamp(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        line["message"] = record.getMessage()
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def setup(access_log: bool = True) -> None:
    """Log to standard error as JSON lines."""
    global _access_log
    _access_log = access_log
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logger = logging.getLogger("hitherto")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False


def request_line(fields: dict[str, Any]) -> None:
    """The line of one finished request. Past the logging machinery, which would cost more than an exact hit."""
    if _access_log:
        now = time.time()
        line = {"time": _timestamp(now), "level": "info", "logger": "hitherto.access", **fields}
        sys.stderr.write(orjson.dumps(line, default=str).decode() + "\n")
        sys.stderr.flush()


def new_id() -> str:
    """32 hexadecimal digits that nobody had before. Not secret: no system call for each."""
    return f"{_ids.getrandbits(128):032x}"


def _timestamp(seconds: float) -> str:
    return f"{_second(int(seconds))}.{int(seconds % 1 * 1000):03d}Z"


@lru_cache(maxsize=2)
def _second(seconds: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
