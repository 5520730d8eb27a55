"""One structured line per request, on standard error. Never a body, never a credential."""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import orjson

access = logging.getLogger("hitherto.access")


class _Lines(logging.Formatter):
    """JSON lines; an access record brings its fields along."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        fields = getattr(record, "fields", None)
        line.update(fields if fields is not None else {"message": record.getMessage()})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(line, default=str).decode()


def setup(access_log: bool = True) -> None:
    """Log to standard error as JSON lines."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    logger = logging.getLogger("hitherto")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    access.disabled = not access_log


def request_line(fields: dict[str, Any]) -> None:
    """The line of one finished request."""
    if access.isEnabledFor(logging.INFO):
        access.info("", extra={"fields": fields})
