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
_SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
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
    total, part, in_words = 0, 0, False

    def close() -> None:
        nonlocal total, part, in_words
        if in_words:
            found[str(total + part)] += 1
        total, part, in_words = 0, 0, False

    for match in _TOKEN.finditer(text):
        word = (match["word"] or "").lower()
        if word == "half":
            close()
            found["1/2"] += 1
        elif word in _WORDS:
            value = _WORDS[word]
            if in_words and not _continues(part, value):
                close()  # "two three" are two numbers, "twenty three" and "two hundred three" are one
            part += value
            in_words = True
        elif word in _SCALES and in_words:
            scale = _SCALES[word]
            if scale == 100:
                part *= scale
            else:
                total, part = total + part * scale, 0
        elif word in _ORDINALS:
            part += _ORDINALS[word]
            in_words = True
            close()
        elif word == "and" and in_words and (part % 100 == 0):
            continue  # "two hundred and five"
        else:
            close()
            if match["digits"]:
                found[_spelled(match["sign"] or "", match["digits"], (match["suffix"] or "").lower())] += 1
    close()
    return found


def _continues(part: int, value: int) -> bool:
    """Whether a number word goes on a number: "two hundred | three", "twenty | three", but not "two | three"."""
    if part and part % 100 == 0:
        return True
    return part % 100 >= 20 and part % 10 == 0 and value < 10


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
