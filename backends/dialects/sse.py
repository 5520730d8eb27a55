"""Server-sent events: reading a finished stream, writing events (WHATWG HTML section 9.2)."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NAMED = re.compile(rb"^event:", re.M)
_NAMED_DELTA = re.compile(rb"^event:[^\r\n]*(?:_block_delta|\.delta)\r?$", re.M)
"""Anthropic's names, and those of OpenAI's responses."""
_DATA = re.compile(rb"^data:", re.M)


def data_fields(stream: bytes) -> Iterator[bytes]:
    """The data of each event of a whole stream, in order; its `data:` lines joined by newlines."""
    data: list[bytes] = []
    for line in stream.replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n"):
        if not line:
            if data:
                yield b"\n".join(data)
            data = []
        elif line.startswith(b"data:"):
            data.append(line[6:] if line.startswith(b"data: ") else line[5:])
    # An event that the stream's end cuts off was never dispatched, so it is not yielded.


def comments(stream: bytes) -> Iterator[bytes]:
    """The comment lines of a stream, with their colon."""
    for line in stream.split(b"\n"):
        if line.startswith(b":"):
            yield line.rstrip(b"\r")


def deltas(piece: bytes) -> int:
    """About how many tokens a piece of a stream of any dialect brings: one with each event that adds to the answer."""
    if _NAMED.search(piece):
        return len(_NAMED_DELTA.findall(piece))
    return len(_DATA.findall(piece))


def event(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"
