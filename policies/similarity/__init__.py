"""Similarity proposes, guards dispose: what two questions must share whatever their cosine says.

A bi-encoder puts "in 2020" and "in 2021", "is it safe" and "is it not safe" close together (cosine over 0.95), so no
threshold keeps them apart. Both questions are read (`text`), and each guard compares one thing in the two readings;
the first one that finds a difference names the reason why the stored answer is not given. A guard that is too strict
costs a hit, one that is too lax a wrong answer, so doubt means different; but a guard that costs more right hits than
it stops wrong ones goes (docs/hit-quality.md has the counts).
"""

from __future__ import annotations

from collections.abc import Callable

from policies.similarity import form, polarity, roles, wording
from policies.similarity.quantities import scan
from policies.similarity.text import Reading, fold, in_one_unit, normal, read

LONGEST = 4_000
"""Longer texts (in characters) are the same only letter by letter."""
Guard = Callable[[Reading, Reading], bool]
GUARDS: tuple[tuple[str, Guard], ...] = (
    ("numbers", wording.other_numbers),
    ("verbatim", wording.other_verbatim),
    ("calendar", wording.other_calendar),
    ("units", wording.other_units),
    ("negation", polarity.negation),
    ("antonym", polarity.opposed),
    ("quantifier", polarity.quantified),
    ("kind", form.other_kind),
    ("form", form.other_form),
    ("order", roles.exchanged),
    ("role", roles.other_role),
    ("language", wording.foreign),
    ("passage", wording.other_task),
    ("names", wording.other_names),
    ("scope", wording.added),
    ("word", wording.substituted),
)
"""Reason → guard, in the order in which they are asked. True means: keep these two questions apart."""

HARD: tuple[tuple[str, Guard], ...] = (
    ("numbers", wording.clashing_numbers),
    *(
        (name, guard)
        for name, guard in GUARDS
        if name in "verbatim calendar units antonym quantifier form order role language".split()
    ),
)
"""Those that stay where a verifier decides: the others only guess at what it knows better (docs/hit-quality.md)."""
NEGATION_FROM = 0.75
"""The cosine from which on one more "not" makes another question; in a free rewording it may stand for another word."""


def hard(cosine: float) -> tuple[tuple[str, Guard], ...]:
    """The guards that stay where a verifier decides, for two questions with this cosine."""
    return HARD if cosine < NEGATION_FROM else (*HARD, ("negation", polarity.negation))


def prepare(question: str) -> None:
    """Read a question now, while its vector is being made, so that `veto` need not."""
    reading = read(question)
    for look in (form.kind, form.constraints, polarity.negated, roles.places):
        look(reading)


def veto(question: str, other: str, guards: tuple[tuple[str, Guard], ...] | None = None) -> str:
    """The name of the first guard (of all, or of those given) that keeps these two questions apart, or empty; about
    0.2 ms for new texts."""
    if question == other:
        return ""
    if max(len(question), len(other)) > LONGEST:
        return "length"
    ours, theirs = read(question), read(other)
    return next((name for name, differs in (GUARDS if guards is None else guards) if differs(ours, theirs)), "")


def answer_tells(question: str, other: str, answer: str) -> bool:
    """Whether an answer to `other` speaks of a number, name or identifier that `other` has and `question` has not.

    Then it belongs to `other` alone, however close the questions are.
    """
    ours, theirs = read(question), read(other)
    numbers = set(theirs.quantities) - set(ours.quantities)
    words = {theirs.spelled[name] for name in theirs.names - set(ours.content)} | theirs.code
    missing = [word for word in words if fold(word) not in ours.folded]
    if not numbers and not missing:
        return False
    if len(answer) > 4 * LONGEST:
        return True  # it says so much that it may well say that
    plain, told = normal(answer), fold(answer)
    return bool(numbers and numbers & set(scan(in_one_unit(plain)).quantities)) or any(
        fold(word) in told for word in missing
    )


def agree(answer: str, other: str) -> bool:
    """Whether two answers say the same: the same numbers and names, nothing denied, and nearly the same words."""
    if answer.split() == other.split():
        return True
    if max(len(answer), len(other)) > LONGEST:
        return False
    ours, theirs = read(answer), read(other)
    if ours.quantities != theirs.quantities or ours.names != theirs.names or ours.symbols != theirs.symbols:
        return False
    if polarity.negation(ours, theirs) or polarity.opposed(ours, theirs):
        return False
    mine, yours = set(ours.content), set(theirs.content)
    return bool(mine) and len(mine & yours) >= 0.8 * len(mine | yours)
