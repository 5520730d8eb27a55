"""A second opinion on two questions that the encoder finds alike. Off by default: none is shipped yet."""

from __future__ import annotations

from typing import Protocol


class Verifier(Protocol):
    """Says how probable it is that one answer serves two questions. Called from the encoder's thread only."""

    fingerprint: str
    """Changes whenever the same pair could get another score."""
    accept: float
    """The lowest probability that is good enough."""

    def probability(self, question: str, other: str) -> float:
        """From 0 to 1, the same in both orders. It may raise: then the candidate is not served."""
        ...
