"""Takes out of a stream what it tells of its usage only because we asked: its client gets what it would have got."""

from __future__ import annotations

import re

import orjson

_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
# Inside a JSON string each quote has a backslash before it, so this is never part of what a model says.
_PENDING = re.compile(rb',\s*"usage"\s*:\s*null(?=\s*[,}])')
_BARE = frozenset(
    {"id", "object", "created", "model", "system_fingerprint", "service_tier", "obfuscation", "choices", "usage"}
)
"""What an event that tells usage and nothing else consists of."""
_MOST = 1 << 20
"""Bytes of one event that are waited for; a longer one is passed on as it comes."""


class HiddenUsage:
    """One stream of chat or text completion chunks on its way to somebody who did not ask for usage."""

    def __init__(self) -> None:
        self._rest = b""

    def passed(self, chunk: bytes) -> bytes:
        """What of the stream so far may go on; an event is held back until it is whole."""
        if not self._rest and chunk.endswith(b"\n\n") and b'"usage"' not in chunk:
            return chunk
        text, out, start = self._rest + chunk, [], 0
        for end in _END.finditer(text):
            out.append(_without(text[start : end.end()]))
            start = end.end()
        self._rest = text[start:]
        if len(self._rest) > _MOST:
            out.append(self._rest)
            self._rest = b""
        return b"".join(out)

    def ended(self) -> bytes:
        """What is left when the stream is over: an event that was cut off."""
        rest, self._rest = self._rest, b""
        return rest


def _without(event: bytes) -> bytes:
    """An event without usage; nothing if it is there for that only."""
    if b'"usage"' not in event:
        return event
    data = b"".join(line[5:].strip() for line in event.splitlines() if line.startswith(b"data:"))
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        return event
    if not isinstance(value, dict) or "usage" not in value:
        return event
    if value.get("choices") == [] and isinstance(value["usage"], dict) and value.keys() <= _BARE:
        return b""
    if value["usage"] is not None or event.count(b'"usage"') > 1:
        return event  # it tells something else as well, or in another place
    return _PENDING.sub(b"", event, count=1)
