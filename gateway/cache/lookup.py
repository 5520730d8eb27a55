"""What a lookup in the answer cache found."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from gateway.stores.contract import Entry, Source

if TYPE_CHECKING:  # numpy and faiss are not there where only exact answers are served
    from gateway.cache.semantic import Neighbours

Tier = Literal["exact", "semantic", "alias", "stale", "miss", "bypass"]


def probability(score: float) -> float:
    """Of log-odds."""
    return 1 / (1 + math.exp(-max(-700.0, score)))


@dataclass(slots=True)
class Lookup:
    """What a lookup found, or why it found nothing. `neighbours` holds the question's vector for storing the answer."""

    tier: Tier
    reason: str = ""
    entry: Entry | None = None
    similarity: float | None = None
    neighbours: asyncio.Future[Neighbours | None] | None = field(default=None, repr=False)
    score: float | None = None
    """The verifier's log-odds for the candidate that was served, or of the best that was refused."""
    source: Source = "grey"
    """Where a comparison with `near` comes from."""
    near: bytes | None = None
    """The key of an entry whose answer a fresh one is to be compared with: it was just not good enough, or is
    audited."""
    nearest: bytes | None = None
    """The key of the candidate that was served, or else of the nearest one."""
    took: tuple[float, int] = (0.0, 0)
    """Seconds and tokens of looking for similar questions."""

    def packed(self) -> bytes | None:
        """The question's packed vector, if it is made by now."""
        known = self.neighbours
        if known is None or not known.done() or known.cancelled() or known.exception() is not None:
            return None
        result = known.result()
        return result.packed if result is not None else None


@dataclass(frozen=True, slots=True)
class Found:
    """An entry that may be served. `wording` is what its answer was found under: an alias' own question."""

    entry: Entry
    wording: str | None
    alias: bool
    stale: bool = False
