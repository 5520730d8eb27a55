"""What a store of answers must do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored answer. Times are seconds since the epoch.

    `body` is the answer as JSON without id and created, `vector` the question's embedding as float32 bytes (None
    where there is none), made by the encoder with the fingerprint `embedder`.
    """

    key: bytes
    scope: bytes
    tenant: str
    surface: str
    model: str
    backend: str
    question: str | None
    body: bytes
    has_usage: bool
    created: float
    expires: float
    vector: bytes | None = None
    embedder: str = ""


@dataclass(frozen=True, slots=True)
class Known:
    """What stays in memory of every entry, whether its body does or not."""

    created: float
    expires: float
    size: int
    scope: bytes
    has_usage: bool


class AnswerStore(Protocol):
    """Blocking calls, made from worker threads. Any of them may raise; callers count that as a cache fault."""

    def known(self) -> Iterator[tuple[bytes, Known]]:
        """Key and facts of every entry, oldest first."""
        ...

    def vectors(self, embedder: str) -> Iterator[tuple[bytes, bytes, bytes]]:
        """(key, scope, vector) of every entry that this encoder embedded."""
        ...

    def last(self) -> int:
        """The number of the newest write; 0 if there was none."""
        ...

    def since(self, number: int, embedder: str) -> Iterator[tuple[int, bytes, Known, bytes | None]]:
        """Number of the write, key, facts, and vector by this encoder, of what was written after that number."""
        ...

    def get(self, key: bytes) -> Entry | None: ...

    def put(self, entries: Sequence[Entry]) -> None:
        """Store all or none, except over newer ones; durable when it returns (against a crash of the process)."""
        ...

    def delete(self, keys: Sequence[tuple[bytes, float]]) -> None:
        """Delete the entries with these keys, unless they were created after the time given with each."""
        ...

    def close(self) -> None: ...
