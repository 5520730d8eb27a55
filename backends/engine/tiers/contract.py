"""What a lower tier must do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tier(Protocol):
    """Blocks by key, as the sealed bytes that the codec made. Called from one thread at a time, never the engine's.

    Bounded in bytes and in age: a block that does not fit is not stored, and old ones give way first. A fault raises;
    the ladder counts it and, after a few, leaves the tier alone for a while.
    """

    name: str

    def has(self, keys: Sequence[bytes]) -> int:
        """How many of `keys`, counted from the first without a gap, are here (a promise that `get` may still break)."""
        ...

    def get(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """The sealed blocks; None for each that is not here (any more)."""
        ...

    def put(self, key: bytes, sealed: bytes) -> None:
        """Keep a block, if it fits."""
        ...

    def delete(self, key: bytes) -> None:
        """Forget a block, known or not: it was corrupt or foreign."""
        ...

    def clear(self) -> None:
        """Forget all blocks."""
        ...

    @property
    def bytes_used(self) -> int: ...

    def close(self) -> None: ...
