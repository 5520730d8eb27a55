"""Numbers and times in words, and Roman numerals."""

from __future__ import annotations

import re

_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
SCALES = {"thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
WORDS: dict[str, int] = {
    **{word: value for value, word in enumerate(_UNITS.split())},
    **{word: 10 * value for value, word in enumerate(_TENS.split(), start=2)},
    "dozen": 12,
}
ORDINALS: dict[str, int] = {
    **{f"{word}th": value for word, value in WORDS.items() if value > 3 and not word.endswith("y")},
    **{f"{word[:-1]}ieth": value for word, value in WORDS.items() if word.endswith("y")},
    "first": 1,
    "second": 2,
    "third": 3,
    "fifth": 5,
    "eighth": 8,
    "ninth": 9,
    "twelfth": 12,
    "hundredth": 100,
}
_ROMAN = re.compile(r"X{0,3}(?:IX|IV|V?I{0,3})(?<=..)")
_ROMAN_IN_LOWER_CASE = frozenset("ii iii iv vii viii ix xii xiii xiv xv xvi xvii xviii".split())
"""Those that are no words, and no other abbreviations."""


_HOURS = "|".join(name for name, value in WORDS.items() if 1 <= value <= 12 and name != "dozen")
_FLAGS = re.IGNORECASE | re.ASCII
_PAST = re.compile(rf"\b(half|(?:a )?quarter) past ({_HOURS}|\d\d?)\b(?![:.%])", _FLAGS)
_TO = re.compile(
    rf"(?<=\bat )(?:a )?quarter to ({_HOURS}|\d\d?)\b(?![:.%]| (?:percent|hundred|thousand|million|billion)\b)", _FLAGS
)
_DAYTIME = re.compile(
    rf"(?<![\w.,:$€£-])((?:at|by|until|till|before|after|around) )?({_HOURS}|\d\d?)(:\d\d)?( o'clock)? "
    r"(?:(?:in the|this) (morning|afternoon|evening)|at (night)|(tonight))\b",
    _FLAGS,
)
_AND_A_HALF = re.compile(r"\b(?:an?|one) (hour|minute|day|week|year|lit(?:re|er)|kilo|mile) and a half\b(?!-)", _FLAGS)
_AGE = re.compile(r"(?<=\w)(?<!\ba)[- ]years?[- ]olds?\b", _FLAGS)
_DAY = {
    "morning": {hour: f"{hour} am" for hour in range(1, 12)},
    "afternoon": {hour: f"{hour} pm" for hour in (12, *range(1, 7))},
    "evening": {hour: f"{hour} pm" for hour in range(4, 12)},
    "night": {12: "12 am", **{hour: f"{hour} {'am' if hour < 5 else 'pm'}" for hour in (*range(1, 5), *range(7, 12))}},
}


def in_digits(text: str) -> str:
    """With the times of day and the halves that are told in several words in digits: a quarter past six in the evening
    (6:15 pm), an hour and a half (1.5 hour); ages as bare numbers. What may be no time of day stays."""
    clocked = _TO.sub(lambda match: _clock(match[1], -15) or match[0], text)
    clocked = _PAST.sub(lambda match: _clock(match[2], 30 if match[1].lower() == "half" else 15) or match[0], clocked)
    return _AGE.sub(" old", _AND_A_HALF.sub(r"1.5 \1", _DAYTIME.sub(_with_half, clocked)))


def _hour(word: str) -> int:
    return int(word) if word.isdigit() else WORDS[word.lower()]


def _clock(word: str, minutes: int) -> str:
    hour = _hour(word)
    if not 1 <= hour <= 12:
        return ""
    return f"{hour}:{minutes}" if minutes > 0 else f"{(hour - 1) or 12}:{60 + minutes}"


def _with_half(match: re.Match[str]) -> str:
    at, word, minutes, o_clock, day, night, tonight = match.groups()
    told = _DAY[(day or night or "night").lower()].get(_hour(word))
    if told is None or not (at or minutes or o_clock):  # "take 2 at night" may be two pills
        return match[0]
    hour, half = told.split(" ")
    return f"{at or ''}{hour}{minutes or ''} {half}{' tonight' if tonight else ''}"


def roman(text: str) -> float | None:
    """The value of a Roman numeral of two letters and more, up to 39; None if it is none."""
    if text in _ROMAN_IN_LOWER_CASE:
        text = text.upper()
    if not _ROMAN.fullmatch(text):
        return None
    values = [{"I": 1, "V": 5, "X": 10}[char] for char in text]
    return float(sum(-value if value < max(values[i:]) else value for i, value in enumerate(values)))


class WordNumber:
    """A number in words, taken word by word: "two", "million", "three", "hundred" → 2,000,300."""

    def __init__(self) -> None:
        self._total = self._part = 0
        self._scale: int | None = None
        self._begun = self._ended = False

    def takes(self, word: str) -> bool:
        """Whether the word goes on (or begins) the number; if so it is taken."""
        stem = word.removesuffix("s")
        if self._ended:
            return False
        if word in WORDS:
            if self._begun and not self._continues(WORDS[word]):
                return False
            self._part += WORDS[word]
        elif stem in ORDINALS:  # "thirds" and "fifths" too
            if self._begun and not self._continues(ORDINALS[stem]):
                return False
            self._part, self._ended = self._part + ORDINALS[stem], True
        elif stem == "hundred" and (self._part < 10 or 10 < self._part < 20):
            self._part = (self._part or 1) * 100
        elif stem in SCALES and (self._part or not self._begun) and (self._scale is None or SCALES[stem] < self._scale):
            self._scale = SCALES[stem]  # "a million" begins with its scale
            self._total, self._part = self._total + (self._part or 1) * self._scale, 0
        else:
            return word == "and" and self._begun and self._part > 0 and self._part % 100 == 0  # "two hundred and five"
        self._begun = True
        return True

    def _continues(self, value: int) -> bool:
        """ "two hundred | three", "twenty | three", "two million | three", but not "two | three"."""
        if self._part == 0:
            return self._total > 0
        return self._part % 100 == 0 or (self._part % 100 >= 20 and self._part % 10 == 0 and value < 10)

    def value(self) -> float:
        return float(self._total + self._part)
