"""What two questions do not have in common, once spelling, inflection and politeness are set aside."""

from __future__ import annotations

from functools import lru_cache

from policies.similarity.lexicon import is_word, misspelt
from policies.similarity.quantities import is_unit
from policies.similarity.text import Reading, fold, meaning, says_nothing

PAIRS = 400
"""More pairs of words than this are not looked at for typing mistakes."""
PASSAGE = 15
"""So many words in a row that two texts share are a passage that both are about."""
_DAYS = "monday tuesday wednesday thursday friday saturday sunday"
_MONTHS = "january february march april may june july august september october november december"
_OTHERS = (
    "weekend spring summer autumn winter easter christmas halloween ramadan eid diwali thanksgiving hanukkah hourly "
    "daily weekly monthly quarterly yearly annual annually today tomorrow yesterday tonight noon midnight morning "
    "afternoon evening night"
)
_CALENDAR = {
    **{word: word for word in f"{_DAYS} {_MONTHS} {_OTHERS}".split() if word != "may"},
    **{word[:3]: word for word in f"{_DAYS} {_MONTHS}".split() if word != "may"},
    "tues": "tuesday",
    "thurs": "thursday",
    "sept": "september",
    "annually": "yearly",
    "annual": "yearly",
}
_WEEKEND = frozenset(("saturday", "sunday"))
_MY, _YOUR = frozenset("my mine our ours".split()), frozenset("your yours".split())
_OWNERS = {
    **dict.fromkeys(_MY, "my"),
    **dict.fromkeys(_YOUR, "your"),
    **dict.fromkeys("his her hers their theirs".split(), "their"),
}


@lru_cache(maxsize=64)  # several guards ask for the same pair
def residue(a: Reading, b: Reading) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The meaningful words (stems, in order) that only one of two texts has."""
    ours, theirs = frozenset(a.content), frozenset(b.content)
    left = [word for word in dict.fromkeys(a.content) if word not in theirs]
    right = [word for word in dict.fromkeys(b.content) if word not in ours]
    left, right = _without_compounds(a, b, left, right)
    right, left = _without_compounds(b, a, right, left)
    for word in list(left) if len(left) * len(right) <= PAIRS else ():
        twin = next((other for other in right if _mistyped(a, b, word, other)), None)
        if twin is not None:
            left.remove(word)
            right.remove(twin)
    return (*left,), (*right,)


def _mistyped(a: Reading, b: Reading, word: str, other: str) -> bool:
    """Whether two words are one, mistyped; a name that was written as one is what it says."""
    mine, yours = a.spelled[word], b.spelled[other]
    written = (mine in a.capitals and not is_word(mine)) or (yours in b.capitals and not is_word(yours))
    return misspelt(mine, yours) and not (written and fold(mine) != fold(yours))


def _without_compounds(a: Reading, b: Reading, words: list[str], others: list[str]) -> tuple[list[str], list[str]]:
    """Without "pay slip" in one text and "payslip" in the other."""
    for other in list(others):
        whole = b.spelled[other]
        for first, second in zip(a.words, a.words[1:], strict=False):
            if first + second == whole:
                others = [word for word in others if word != other]
                words = [word for word in words if a.spelled[word] not in (first, second)]
    return words, others


def other_numbers(a: Reading, b: Reading) -> bool:
    """Whether their quantities differ in value: numbers, amounts with units, prices, dates, times, versions."""
    return a.quantities != b.quantities


def clashing_numbers(a: Reading, b: Reading) -> bool:
    """Whether each has a number that the other one lacks, whatever it counts: a number that only one of them mentions
    may belong to its story, or be told in words."""
    ours, theirs = (set(reading.quantities) for reading in (a, b))
    alone = [
        any(not any(_equal(one, other) for other in others) for one in values)
        for values, others in ((ours, theirs), (theirs, ours))
    ]
    return any(alone) if set(a.content) == set(b.content) else all(alone)


def _equal(one: str, other: str) -> bool:
    """Whether two quantities may be one, told with its unit and without; 50 % is a half."""
    if one == other:
        return True
    (kind, _, value), (number, _, told) = sorted(
        (one.partition(":"), other.partition(":")), key=lambda part: part[0] == "n"
    )
    if number != "n" or kind in ("n", "months"):  # "3 years old" is told without its unit, "3 months" is not
        return False
    return told == (f"{float(value) / 100:.9g}" if kind == "percent" and float(value) < 100 else value)


def other_verbatim(a: Reading, b: Reading) -> bool:
    """Whether each quotes, or names by its identifier, what the other one does not have letter by letter.

    Where only one has quotes or an identifier, its words are compared like others.
    """
    if a.symbols != b.symbols:
        return True
    return all(
        any(fold(part) not in other.folded for part in parts) for parts, other in ((a.quoted, b), (b.quoted, a))
    ) or all(any(fold(part) not in other.folded for part in parts) for parts, other in ((a.code, b), (b.code, a)))


def other_calendar(a: Reading, b: Reading) -> bool:
    """Whether they name other days, months or seasons."""
    ours, theirs = ({_CALENDAR[word] for word in reading.words if word in _CALENDAR} for reading in (a, b))
    for days, others in ((ours, theirs), (theirs, ours)):
        if "tonight" in days:
            days.remove("tonight")
            days |= {"today", "evening"}
        if "weekend" in days and others >= _WEEKEND:
            days |= _WEEKEND
    return bool(ours - theirs and theirs - ours)


def other_units(a: Reading, b: Reading) -> bool:
    """Whether they want the answer in other units."""
    ours, theirs = ({word for word in reading.content if is_unit(reading.spelled[word])} for reading in (a, b))
    return bool(ours - theirs and theirs - ours)


def other_names(a: Reading, b: Reading) -> bool:
    """Whether they name other things: each has a name, or a word that no dictionary has, which the other has not."""
    left, right = residue(a, b)
    return bool(a.names.intersection(left) and b.names.intersection(right))


def other_owner(a: Reading, b: Reading) -> bool:
    """Whether the same is asked of mine and of yours."""
    ours, theirs = ({_OWNERS[word] for word in reading.words if word in _OWNERS} for reading in (a, b))
    return bool(ours and theirs and not ours & theirs and not any(residue(a, b)))


def added(a: Reading, b: Reading) -> bool:
    """Whether one says all that the other one says, and more: "in Europe", "for children", "without sugar"."""
    left, right = residue(a, b)
    return bool(left) != bool(right)


def substituted(a: Reading, b: Reading) -> bool:
    """Whether they are the same but for one word."""
    left, right = residue(a, b)
    return len(left) == len(right) == 1


def other_task(a: Reading, b: Reading) -> bool:
    """Whether they want something else of the same passage, whose words outweigh those that make the question."""
    if min(len(a.words), len(b.words)) < PASSAGE:
        return False
    ours, theirs = _runs(a), _runs(b)
    shared = ours.keys() & theirs.keys()
    if not shared:
        return False
    tasks = []
    for reading, runs in ((a, ours), (b, theirs)):
        passage = {place for run in shared for place in range(runs[run], runs[run] + PASSAGE)}
        rest = [word for place, word in enumerate(reading.words) if place not in passage and not word.startswith("#")]
        tasks.append({meaning(word) for word in rest if not says_nothing(word)})
    return tasks[0] != tasks[1]


def _runs(reading: Reading) -> dict[tuple[str, ...], int]:
    """Every run of `PASSAGE` words, with its place."""
    words = reading.words
    return {words[place : place + PASSAGE]: place for place in range(len(words) - PASSAGE + 1)}


def foreign(a: Reading, b: Reading) -> bool:
    """Whether a word differs in a language whose words mean nothing to the other guards."""
    return not (a.english and b.english) and any(residue(a, b))
