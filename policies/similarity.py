"""Similarity proposes, guards dispose: what two questions must share whatever their cosine says.

A bi-encoder puts "in 2020" and "in 2021", "is it safe" and "is it not safe" close together (cosine over 0.95), so no
threshold keeps them apart. Each guard is a small pure function from a question to a comparable value; two questions
whose values differ are never given each other's answer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_SCALES = {"thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_WORDS: dict[str, int] = {
    **{word: value for value, word in enumerate(_UNITS.split())},
    **{word: 10 * value for value, word in enumerate(_TENS.split(), start=2)},
    "dozen": 12,
}
_ORDINALS = {
    "first": 1, "second": 2, "third": 3, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "ninth": 9,
    "tenth": 10, "eleventh": 11, "twelfth": 12, "twentieth": 20, "thirtieth": 30, "fiftieth": 50, "hundredth": 100,
}  # fmt: skip
_TOKEN = re.compile(
    r"(?P<sign>(?<![\w.)])[-−])?(?P<digits>\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)*)"
    r"(?:(?P<suffix>k|bn)(?![a-z]))?|(?P<word>[a-z]+)",
    re.IGNORECASE,
)
_SUFFIXES = {"k": 1000, "bn": 10**9}


def numbers(text: str) -> Counter[str]:
    """Every number in a text, in one spelling: 1,000 = 1000 = one thousand = 1k; 3rd = third; 50% = 50; 1.50 = 1.5.

    Dotted sequences of three and more parts (versions, addresses) stay as they are.
    """
    found: Counter[str] = Counter()
    number = _WordNumber()
    for match in _TOKEN.finditer(text):
        word = (match["word"] or "").lower()
        if word and number.takes(word):
            continue
        found.update(number.spelled())
        number = _WordNumber()
        if word == "half":
            found["1/2"] += 1
        elif word:
            number.takes(word)  # the word that ended one number may begin the next: "two three"
        else:
            found[_spelled(match["sign"] or "", match["digits"], (match["suffix"] or "").lower())] += 1
    found.update(number.spelled())
    return found


class _WordNumber:
    """A number in words, taken word by word: "two", "million", "three", "hundred" → 2,000,300."""

    def __init__(self) -> None:
        self._total = self._part = 0
        self._scale: int | None = None
        self._begun = self._ended = False

    def takes(self, word: str) -> bool:
        """Whether the word goes on (or begins) the number; if so it is taken."""
        if self._ended:
            return False
        if word in _WORDS:
            if self._begun and not self._continues(_WORDS[word]):
                return False
            self._part += _WORDS[word]
        elif word in _ORDINALS:
            if self._begun and not self._continues(_ORDINALS[word]):
                return False
            self._part, self._ended = self._part + _ORDINALS[word], True
        elif word == "hundred" and self._begun and 0 < self._part < 10:
            self._part *= 100
        elif word in _SCALES and self._part and (self._scale is None or _SCALES[word] < self._scale):
            self._scale = _SCALES[word]
            self._total, self._part = self._total + self._part * self._scale, 0
        else:
            return word == "and" and self._begun and self._part % 100 == 0  # "two hundred and five"
        self._begun = True
        return True

    def _continues(self, value: int) -> bool:
        """ "two hundred | three", "twenty | three", "two million | three", but not "two | three"."""
        if self._part == 0:
            return self._total > 0
        return self._part % 100 == 0 or (self._part % 100 >= 20 and self._part % 10 == 0 and value < 10)

    def spelled(self) -> list[str]:
        """The number in digits, or nothing."""
        return [str(self._total + self._part)] if self._begun else []


def _spelled(sign: str, digits: str, suffix: str) -> str:
    plain = digits.replace(",", "")
    if plain.count(".") > 1:
        return plain
    value = Fraction(plain) * _SUFFIXES.get(suffix, 1)
    return str(-value if sign else value)


_NEGATIONS = re.compile(
    r"\b(?:no|not|never|none|nobody|nothing|nowhere|neither|nor|cannot|without|except|unless|hardly|barely|lack(?:s|ing)?"
    r"|avoid(?:s|ing)?|prevent(?:s|ing)?|disallow(?:s|ed)?|exclud(?:e|es|ed|ing)|isnt|arent|wasnt|werent|dont|doesnt|didnt|cant|couldnt|wont|wouldnt|shouldnt"
    r"|hasnt|havent|hadnt|mustnt)\b|n't\b",
    re.IGNORECASE,
)


def negations(text: str) -> int:
    """How often a text negates: "not", "n't", "never", "without" … with any apostrophe or none."""
    return len(_NEGATIONS.findall(text.replace("’", "'").replace("ʼ", "'").replace("`", "'")))


GUARDS: tuple[tuple[str, Callable[[str], object]], ...] = (("numbers", numbers), ("negation", negations))


def veto(question: str, other: str) -> str:
    """The name of the first guard that keeps these two questions apart, or empty."""
    return next((name for name, guard in GUARDS if guard(question) != guard(other)), "")
