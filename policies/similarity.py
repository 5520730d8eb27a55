"""Similarity proposes, guards dispose: what two questions must share whatever their cosine says.

A bi-encoder puts "in 2020" and "in 2021", "is it safe" and "is it not safe" close together (cosine over 0.95), so no
threshold keeps them apart; and what its tokenizer folds away (case, accents) it cannot see at all. Each guard is a
small pure function from a question to a comparable value; two questions whose values differ are never given each
other's answer. A guard that is too strict costs a hit, one that is too lax a wrong answer, so doubt means different.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

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
_ORDINALS: dict[str, int] = {
    **{f"{word}th": value for word, value in _WORDS.items() if value > 3 and not word.endswith("y")},
    **{f"{word[:-1]}ieth": value for word, value in _WORDS.items() if word.endswith("y")},
    "first": 1,
    "second": 2,
    "third": 3,
    "fifth": 5,
    "eighth": 8,
    "ninth": 9,
    "twelfth": 12,
    "hundredth": 100,
}
_OPERATORS = {
    "minus": "-",
    "negative": "-",
    "plus": "+",
    "times": "*",
    "divided": "/",
    "half": "half",
    "quarter": "quarter",
}
_DASHES = dict.fromkeys(map(ord, "−–—‐‑"), "-")
_TOKEN = re.compile(
    r"(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?![\w,])|(?:(?<![\w.])\.)?[^\W_]*\d[\w.]*)"
    r"|(?P<word>[^\W\d_]+)|(?P<operator>[-+*/×÷^=<>]\s?(?=[\d.])|(?<=\d)\s?%)|(?P<break>[^\s-])"
)


def numbers(text: str) -> tuple[str, ...]:
    """Every number in a text, in order, in one spelling: 1,000 = one thousand; third = 3rd; signs and operators count.

    What only looks like a number (versions, hexadecimal, 3M, x2) stays letter by letter: 3.1 is not 3.10.
    """
    found: list[str] = []
    number = _WordNumber()
    for match in _TOKEN.finditer(text.translate(_DASHES)):
        word = (match["word"] or "").lower()
        if word and number.takes(word):
            continue
        found += number.spelled()
        number = _WordNumber()
        if match["number"]:
            digits = match["number"].rstrip(".")
            if not number.starts_with(digits):
                found.append(_plain(digits))
        elif word in _OPERATORS or word.removesuffix("s") in _OPERATORS:
            found.append(_OPERATORS[word if word in _OPERATORS else word.removesuffix("s")])
        elif word:
            number.takes(word)  # the word that ended one number may begin the next: "two three"
        elif match["operator"]:
            found.append(match["operator"].strip())
    marks = [char for char in text if not char.isascii() and unicodedata.category(char) in ("No", "Nl")]  # ², ½, Ⅳ
    return (*found, *number.spelled(), *marks)


def _plain(digits: str) -> str:
    """Thousands separators and ordinal endings removed; everything else as written."""
    if re.fullmatch(r"\d{1,3}(,\d{3})+(\.\d+)?", digits):
        digits = digits.replace(",", "")
    return re.sub(r"(?<=\d)(st|nd|rd|th)$", "", digits)


class _WordNumber:
    """A number in words, taken word by word: "two", "million", "three", "hundred" → 2,000,300."""

    def __init__(self) -> None:
        self._total = self._part = 0
        self._scale: int | None = None
        self._begun = self._ended = self._open = False
        self._digits = ""

    def starts_with(self, digits: str) -> bool:
        """Digits that a scale may follow ("5 million"); False if they are no plain whole number."""
        plain = digits.replace(",", "")
        if not plain.isascii() or not plain.isdigit() or plain != str(int(plain)):
            return False
        self._part, self._begun, self._open, self._digits = int(plain), True, True, plain
        return True

    def takes(self, word: str) -> bool:
        """Whether the word goes on (or begins) the number; if so it is taken."""
        stem = word.removesuffix("s")
        if self._ended:
            return False
        if word in _WORDS:
            if self._open or (self._begun and not self._continues(_WORDS[word])):
                return False
            self._part += _WORDS[word]
        elif stem in _ORDINALS:  # "thirds" and "fifths" too
            if self._open or (self._begun and not self._continues(_ORDINALS[stem])):
                return False
            self._part, self._ended = self._part + _ORDINALS[stem], True
        elif stem == "hundred" and self._part < 10:
            self._part = (self._part or 1) * 100
        elif (
            stem in _SCALES and (self._part or not self._begun) and (self._scale is None or _SCALES[stem] < self._scale)
        ):
            self._scale = _SCALES[stem]  # "a million" begins with its scale
            self._total, self._part = self._total + (self._part or 1) * self._scale, 0
        else:
            return word == "and" and self._begun and not self._open and self._part % 100 == 0  # "two hundred and five"
        self._begun, self._open = True, False
        return True

    def _continues(self, value: int) -> bool:
        """ "two hundred | three", "twenty | three", "two million | three", but not "two | three"."""
        if self._part == 0:
            return self._total > 0
        return self._part % 100 == 0 or (self._part % 100 >= 20 and self._part % 10 == 0 and value < 10)

    def spelled(self) -> list[str]:
        """The number in digits, or nothing."""
        return [str(self._total + self._part)] if self._begun else []


_APOSTROPHES = dict.fromkeys(map(ord, "’‘ʼ´`＇′"), "'")
_NEGATION = re.compile(
    r"(?:no|not|non|never|none|nobody|nothing|nowhere|neither|nor|cannot|without|except|unless|hardly|barely|lack(?:s|ing)?"
    r"|avoid(?:s|ing)?|prevent(?:s|ing)?|disallow(?:s|ed)?|exclud(?:e|es|ed|ing)"
    r"|(?:is|are|was|were|do|does|did|ca|could|wo|would|should|has|have|had|must|need|ai)n'?t)"
)
_EMPTY = frozenset(
    "a an the i you he she it we they me him her us them my your his its our their this that these those is are "
    "was were be been being do does did have has had can could will would shall should may might must to of in on "
    "at for with there any".split()
)


def _words(text: str) -> list[str]:
    """Words of letters; "don't" is one."""
    return re.findall(r"[^\W\d_]+(?:'[^\W\d_]+)?", text.translate(_APOSTROPHES))


def negations(text: str) -> tuple[str, ...]:
    """What a text negates: for each "not", "n't", "never", "without" … the next word that carries meaning."""
    words = [word.lower() for word in _words(text)]
    return tuple(
        next((other for other in words[index + 1 :] if other not in _EMPTY and not _NEGATION.fullmatch(other)), "")
        for index, word in enumerate(words)
        if _NEGATION.fullmatch(word)
    )


def verbatim(text: str) -> tuple[str, ...]:
    """Words that mean something else in another spelling, which an uncased encoder cannot see, in order.

    Capitals behind the first letter (MB and Mb, AIDS and aids), single letters (-o and -O) but for the pronoun and the
    article, and letters outside ASCII (año and ano).
    """
    return tuple(
        word
        for word in _words(text)
        if not word.isascii() or word[1:] != word[1:].lower() or (len(word) == 1 and word not in "aAI")
    )


GUARDS: tuple[tuple[str, Callable[[str], object]], ...] = (
    ("numbers", numbers),
    ("negation", negations),
    ("spelling", verbatim),
)


def reordered(question: str, other: str) -> bool:
    """Whether the same words that carry meaning stand in another order: "Paris bigger than London" and the reverse."""
    ours, theirs = ([word for word in map(str.lower, _words(text)) if word not in _EMPTY] for text in (question, other))
    return ours != theirs and sorted(ours) == sorted(theirs)


def veto(question: str, other: str) -> str:
    """The name of the first guard that keeps these two questions apart, or empty."""
    differing = next((name for name, guard in GUARDS if guard(question) != guard(other)), "")
    return differing or ("order" if reordered(question, other) else "")
