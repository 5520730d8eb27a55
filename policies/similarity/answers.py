"""Do two answers say the same? What an audit asks of a stored answer and a fresh one.

Models word the same answer differently each time, so only what contradicts counts as another one, and only what agrees
in every fact as the same; between them nothing is said, and nothing is learnt.
"""

from __future__ import annotations

from typing import Literal

from policies.similarity import LONGEST, agree, polarity
from policies.similarity.text import Reading, read

Verdict = Literal["same", "different", "unsure"]
CLOSE = 0.90
"""The cosine of two answers (of the means over their parts) from which on they speak of the same."""
APART = 0.55
"""Under it they speak of different things."""
SHORT = 12
"""Answers with so few words of meaning say one thing; their facts can be compared one by one."""


def compared(answer: str, other: str, question: str, cosine: float | None) -> Verdict:
    """Two answers to a question. `cosine`: how near they are; None if that is not known."""
    if not answer.strip() or not other.strip():
        return "unsure"
    if agree(answer, other):
        return "same"
    if max(len(answer), len(other)) > LONGEST:
        return "different" if cosine is not None and cosine < APART else "unsure"
    ours, theirs = read(answer), read(other)
    if max(len(ours.content), len(theirs.content)) <= SHORT:
        return _short(ours, theirs, set(read(question[:LONGEST]).content), cosine)
    if cosine is None:
        return "unsure"
    numbers, others = set(ours.quantities), set(theirs.quantities)
    if cosine < APART or (min(len(numbers), len(others)) > 1 and not numbers & others):
        return "different"
    facts, told = _facts(ours), _facts(theirs)
    shared = len(facts & told) / max(1, min(len(facts), len(told)))
    return "same" if cosine >= CLOSE and (not facts or not told or shared >= 0.8) else "unsure"


def _short(ours: Reading, theirs: Reading, asked: set[str], cosine: float | None) -> Verdict:
    numbers, names = set(ours.quantities) ^ set(theirs.quantities), ours.names ^ theirs.names
    one_way = not (set(ours.quantities) and set(theirs.quantities))  # one of them just does not say it
    if polarity.negation(ours, theirs) or polarity.opposed(ours, theirs):
        return "different"
    if numbers and not one_way and not set(ours.quantities) & set(theirs.quantities):
        return "different"
    if ours.names and theirs.names and not ours.names & theirs.names:
        return "different"
    if cosine is not None and cosine < APART:
        return "different"
    less, more = sorted((set(ours.content), set(theirs.content)), key=len)
    if less <= more and more - less <= asked and not numbers and (less or ours.quantities):
        return "same"  # "Paris" and "The capital of France is Paris", which repeats the question
    return "same" if cosine is not None and cosine >= CLOSE and not numbers and not names else "unsure"


def _facts(reading: Reading) -> set[object]:
    """What two answers must agree in: numbers and names."""
    return {*reading.quantities, *reading.names}
