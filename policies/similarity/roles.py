"""Who does what to whom: the same words in other places."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

from policies.similarity.polarity import NEGATORS
from policies.similarity.text import EMPTY, REMEMBERED, Reading, meaning
from policies.similarity.wording import other_owner, residue

_PREPOSITIONS = {
    **dict.fromkeys("to into onto as".split(), "to"),
    **dict.fromkeys("from".split(), "from"),
    **dict.fromkeys("in on at inside within".split(), "in"),
    **{word: word for word in "by than with for of over under before after against without about via through".split()},
}
_PERSONS = {
    **dict.fromkeys("i me we us".split(), "i"),
    "you": "you",
    **dict.fromkeys("he him".split(), "he"),
    **dict.fromkeys("she her".split(), "she"),
    **dict.fromkeys("they them".split(), "they"),
}
_JOINING = frozenset("and or vs versus".split())
_SYMMETRIC = frozenset("difference differences differ vs versus compare compared comparison between or".split())
_MUTUAL = re.compile(
    r"how far (?:is|are) (?:it from )?(?:the )?\w+(?: \w+)? (?:from|to) (?:the )?\w+(?: \w+)?"
    r"|(?:is|are) (?:an? |the )?\w+(?: \w+)? the same (?:thing )?as (?:an? |the )?\w+(?: \w+)?"
)
"""It is as far from A to B as from B to A."""
_IRREGULAR = frozenset(
    "built bought caught kept lost paid sent sold spent taught won written spoken broken drawn".split()
)
_BEING = frozenset("is are was were be been being".split())
_LIGHT = frozenset("differ difference compare comparison between first also only".split())


@lru_cache(maxsize=REMEMBERED)
def places(reading: Reading) -> list[tuple[str, str]]:
    """(word, the preposition that governs it or empty), in order; quantities are words like others."""
    found: list[tuple[str, str]] = []
    role = before = ""
    joined = False
    for word in reading.words:
        if word in _PREPOSITIONS and not (word == "to" and before in _INFINITIVE):
            role = _PREPOSITIONS[word]
        elif word.startswith("#"):
            found.append((word, role))
        elif word in EMPTY or word in NEGATORS:  # what a "not" belongs to is the business of another guard
            if word not in _ARTICLES:
                joined = word in _JOINING
                role = role if joined else ""
        elif word not in _LIGHT:
            found.append((meaning(word), role))
            role, joined = "" if joined else role, False  # "with A and B": both, and nobody else
        before = word
    return found


_INFINITIVE = frozenset(
    ["", *"how want wanna need like have has had way ways able try trying possible going used".split()]
)
"""Words after which "to" belongs to a verb."""
_ARTICLES = frozenset("a an the my your his her its our their this that these those".split())


def exchanged(a: Reading, b: Reading) -> bool:
    """Whether two things have changed places: from A to B, from B to A; A beats B, B beats A."""
    ours, theirs = places(a), places(b)
    alike = set(a.content) == set(b.content)
    counted, others = _numbers(ours), _numbers(theirs)
    if alike and counted != others and sorted(counted) == sorted(others):
        return True  # 3 eggs and 7 apples, 7 eggs and 3 apples
    if all(_MUTUAL.fullmatch(" ".join(reading.words)) for reading in (a, b)):
        return False
    mine, yours = dict(reversed(ours)), dict(reversed(theirs))
    if any({mine[word], yours.get(word, "")} == {"to", "from"} for word in mine):
        return True
    shared = [word for word in dict.fromkeys(word for word, _ in ours) if word in yours]
    if len(shared) < 2:
        return False
    moved = [word for word in shared if mine[word] != yours[word]]
    roles = set(mine.values()) & set(yours.values()) - {""}
    if alike and any({mine[word], yours[word]} <= roles for word in moved):
        return True  # "for A and B from C", "for A from B and C"
    for x in moved:
        for y in moved:
            if mine[x] == yours[y] and mine[y] == yours[x] and mine[x] != mine[y]:
                return True
    if _SYMMETRIC & set(a.words) and _SYMMETRIC & set(b.words):
        return False  # the difference between A and B is that between B and A
    return (
        (alike and _inverted(a, b, shared, mine, yours)) or _passive(a, b, mine, yours) or _passive(b, a, yours, mine)
    )


def _inverted(a: Reading, b: Reading, shared: list[str], mine: dict[str, str], yours: dict[str, str]) -> bool:
    """Whether the same words in the same role come in another order."""
    still = [word for word in shared if mine[word] == yours[word] == ""]  # "in 2020" may stand anywhere
    order = [word for word in dict.fromkeys(word for word, _ in places(b)) if word in set(still)]
    if still == order or (_in_order(still, order) >= len(still) - 1 and len(still) > 3):
        return False  # one word has moved, at most
    if bool(_BEING & set(a.words)) != bool(_BEING & set(b.words)):  # "how do you compute it", "how is it computed"
        for verb in (_participle(a), _participle(b)):
            if [word for word in still if word != verb] == [word for word in order if word != verb]:
                return False  # by whom is the business of `_passive`
    return _grouped(a, still) != _grouped(b, order)


def _participle(reading: Reading) -> str:
    """The verb of a passive: what was done. Empty if there is none."""
    words = reading.words
    if any(word.endswith("ing") for word in words):
        return ""  # "who is funding it" is no passive
    place = next((place for place, word in enumerate(words) if word in _BEING), len(words))
    for before, word in pairwise(words[place:]):
        if (word.endswith("ed") or word in _IRREGULAR) and before not in _ARTICLES:
            return meaning(word)
    return ""


def _grouped(reading: Reading, order: list[str]) -> list[tuple[str, ...]]:
    """The order, with words that "and", "or" or "versus" joins in any order."""
    joined = {
        (meaning(before), meaning(after))
        for before, word, after in zip(reading.words, reading.words[1:], _behind(reading.words), strict=False)
        if word in _JOINING
    }
    groups: list[list[str]] = []
    for word in order:
        if groups and (groups[-1][-1], word) in joined:
            groups[-1].append(word)
        else:
            groups.append([word])
    return [tuple(sorted(group)) for group in groups]


def _behind(words: tuple[str, ...]) -> list[str]:
    """For each place the second word behind it that is no article."""
    following = []
    for place in range(len(words)):
        rest = [word for word in words[place + 2 : place + 4] if word not in _ARTICLES]
        following.append(rest[0] if rest else "")
    return following


def _numbers(found: list[tuple[str, str]]) -> list[str]:
    return [word for word, _ in found if word.startswith("#")]


def _in_order(first: list[str], second: list[str]) -> int:
    """The length of the longest common subsequence of two orders of the same words."""
    place = {word: index for index, word in enumerate(second)}
    best: list[int] = []
    for index, word in enumerate(first):
        best.append(1 + max((best[before] for before in range(index) if place[first[before]] < place[word]), default=0))
    return max(best, default=0)


def other_role(a: Reading, b: Reading) -> bool:
    """Whether one is asked by, or of, somebody else: "as a buyer" and "as a seller", "my flat" and "your flat"."""
    ours, theirs = _asker(a), _asker(b)
    if (ours and theirs and ours != theirs) or other_owner(a, b):
        return True
    if any(residue(a, b)):
        return False
    mine, yours = _persons(a), _persons(b)
    return mine != yours and (sorted(mine) == sorted(yours) or {"he", "she"} == set(mine) ^ set(yours))


def _persons(reading: Reading) -> list[str]:
    """Who is spoken of, in order: "will you pay me" and "will I pay you"."""
    return [_PERSONS[word] for word in reading.words if word in _PERSONS]


def _asker(reading: Reading) -> frozenset[str]:
    words = reading.words
    found: set[str] = set()
    for index, word in enumerate(words[:-2]):
        if word in ("i", "as", "you") and words[index + 1] in ("a", "an", "the", "my", "your", "am", "are"):
            rest = [other for other in words[index + 2 : index + 5] if other not in EMPTY]
            found.update(f"{'you' if word == 'you' else 'i'} {meaning(other)}" for other in rest[:1])
    return frozenset(found)


def _passive(a: Reading, b: Reading, mine: dict[str, str], yours: dict[str, str]) -> bool:
    """ "influenced by Dylan" and "influenced Dylan"."""
    words = [word for word in a.words if word not in _ARTICLES]
    for index, word in enumerate(words[1:-1], start=1):
        if word != "by":
            continue
        verb, agent = meaning(words[index - 1]), meaning(words[index + 1])
        order = [item for item, _ in places(b)]
        if verb in order and agent in order and yours.get(agent) == "" and order.index(verb) < order.index(agent):
            return True
    return False
