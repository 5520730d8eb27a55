"""Forms with files (multipart/form-data, RFC 7578): one field's values, and the same form with another one. Linear."""

from __future__ import annotations

from email.message import Message

PARTS_MOST = 1000
_HEAD_MOST = 4096


def is_form(content_type: str) -> bool:
    return content_type.lower().startswith("multipart/form-data")


def values(body: bytes, content_type: str, name: str) -> list[str]:
    """The values of a field."""
    return [value.decode("utf-8", "replace") for _, value in _fields(body, content_type, name)]


def with_value(body: bytes, content_type: str, name: str, value: str) -> bytes:
    """The same form with another value for each of a field's."""
    out, copied = [], 0
    for at, old in _fields(body, content_type, name):
        out += [body[copied:at], value.encode()]
        copied = at + len(old)
    return b"".join([*out, body[copied:]])


def _fields(body: bytes, content_type: str, name: str) -> list[tuple[int, bytes]]:
    """Where each value of a field stands, and what it is."""
    about = Message()
    about["content-type"] = content_type
    boundary = about.get_param("boundary")
    if not isinstance(boundary, str) or not boundary:
        return []
    found, at = [], 0
    mark = b"--" + boundary.encode("latin-1", "replace")
    for number, part in enumerate(body.split(mark, PARTS_MOST)):
        headers, separator, rest = part.partition(b"\r\n\r\n")
        if number and separator and len(headers) <= _HEAD_MOST and _name(headers) == name:
            found.append((at + len(headers) + len(separator), rest.removesuffix(b"\r\n")))
        at += len(part) + len(mark)
    return found


def _name(headers: bytes) -> object:
    about = Message()
    for line in headers.decode("latin-1").split("\r\n"):
        key, _, text = line.partition(":")
        if key.strip().lower() == "content-disposition":
            about["content-disposition"] = text.strip()
    return about.get_param("name", header="content-disposition")
