"""Numbers in a text, as values: 1,000 = one thousand, half a kilo = 500 g, 3 pm = 15:00, 25/03/1957 = March 25, 1957.

Two questions whose quantities differ never share an answer, so the same quantity must read the same in any spelling,
and whatever only looks like a number (versions, addresses, hexadecimal) stays letter by letter: 3.1 is not 3.10.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass

from policies.similarity.numerals import ORDINALS, SCALES, WORDS, WordNumber, in_digits, roman

_MONTHS = {
    name: number
    for number, names in enumerate(
        "january jan|february feb|march mar|april apr|may|june jun|july jul|august aug|september sep sept|october oct"
        "|november nov|december dec".split("|"),
        start=1,
    )
    for name in names.split()
}
_OPERATOR_WORDS = {"plus": "+", "times": "*", "divided": "/", "equals": "="}
_PARTS = {"half": 0.5, "halves": 0.5, "quarter": 0.25, "quarters": 0.25}

# unit → (dimension, factor). Months and years are not days; pounds may be money or weight, so they are themselves.
_MEASURES: dict[str, tuple[str, float]] = {
    unit: (dimension, factor)
    for dimension, line in {
        "time": "ms millisecond=0.001 s sec second=1 min minute=60 h hr hour=3600 d day=86400 wk week=604800 "
        "fortnight=1209600",
        "months": "month=1 quarter=3 yr year=12 decade=120 century=1200",
        "length": "nm nanometer=1e-9 mm millimeter=0.001 cm centimeter=0.01 m meter=1 km kilometer=1000 "
        "inch in=0.0254 ft foot feet=0.3048 yd yard=0.9144 mi mile=1609.344",
        "mass": "mcg microgram=1e-6 mg milligram=0.001 g gram=1 kg kilo kilogram=1000 tonne=1000000 lb=453.59237 "
        "oz ounce=28.349523125",
        "volume": "ml milliliter=0.001 cl centiliter=0.01 dl deciliter=0.1 l liter=1 gal gallon=3.785411784",
        "data": "b byte=1 kb kilobyte=1e3 mb megabyte=1e6 gb gigabyte=1e9 tb terabyte=1e12 kib=1024 mib=1048576 "
        "gib=1073741824 tib=1099511627776",
        "bits": "bit=1 kbit kilobit=1e3 mbit megabit=1e6 gbit gigabit=1e9",
        "percent": "% percent=1",
        "pressure": "pa pascal=1 kpa=1e3 bar=1e5 psi=6894.757",
        "power": "mw milliwatt=0.001 w watt=1 kw kilowatt=1e3 megawatt=1e6 hp=745.7",
        "voltage": "mv millivolt=0.001 v volt=1 kv kilovolt=1e3",
        "current": "ma milliamp=0.001 amp ampere=1",
        "kmh": "kmh=1",
        "mph": "mph=1",
        "spoons": "tsp teaspoon=1 tbsp tablespoon=3",
        "frequency": "hz hertz=1 khz=1e3 mhz=1e6 ghz=1e9",
        "energy": "kcal kilocalorie=1000 kj kilojoule=239.005736",
        "dollars": "$ usd dollar buck=1",
        "euros": "€ eur euro=1",
        "pounds": "£ gbp quid pound=1",
        "yen": "¥ jpy yen=1",
        "rupees": "₹ inr rupee=1",
    }.items()
    for group in re.split(r"(?<=[\d.]) ", line)
    for units, factor in [group.rsplit("=", 1)]
    for unit, factor in [(unit, float(factor)) for unit in units.split()]
}
_MEASURES |= {"celsius": ("celsius", 1.0), "fahrenheit": ("fahrenheit", 1.0), "°c": ("celsius", 1.0),
              "°f": ("fahrenheit", 1.0), "°": ("degrees", 1.0), "degree": ("degrees", 1.0)}  # fmt: skip
_MONEY = frozenset("$€£¥₹")
_SUFFIXES = {"k": 1e3, "grand": 1e3, "m": 1e6, "mn": 1e6, "bn": 1e9, "b": 1e9}
_PIECES = frozenset("sentence paragraph line word bullet example step part".split())
"""What an answer may be made of: "in two sentences" is a number, "cut in two" is none."""
_FRACTIONS = {"third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6, "seventh": 7, "eighth": 8, "tenth": 10}
_WRITTEN = re.compile(r"\d{10,}|0\d+|\d+\.\d*0")
"""Digits that are more than a number: of a telephone, with zeros before (a code) or behind (a version)."""
_BY_CASE = {"MW": "megawatt", "Mb": "mbit", "Gb": "gbit", "Kb": "kbit", "kb": "kb"}

_TOKEN = re.compile(
    r"(?P<iso>(?<![\w-])\d{4}-\d{1,2}-\d{1,2}(?![\w-]))"
    r"|(?P<slashed>(?<![\w/.])\d{1,2}[/.]\d{1,2}[/.](?:\d{4}|\d{2})(?![\w/.]\w))"
    r"|(?P<clock>(?<![\w:.])\d{1,2}[:.]\d{2}\s?(?:[ap]\.?m\b\.?)|(?<![\w:])\d{1,2}:\d{2}(?::\d{2})?(?![\w:])"
    r"|(?<![\w.])\d{1,2}\s?(?:[ap]m\b|[ap]\.m\.|o'clock))"
    r"|(?P<literal>(?<![\w.])0x[0-9a-f]+|(?<![\w.])v?\d+(?:\.\d+){2,})"
    r"|(?P<number>\d{1,3}(?:,\d{3})+(?:\.\d+)?(?!,?\d)|(?:(?<![\w.])\.)?\d+(?:\.\d+)?)"
    r"|(?P<word>[^\W\d_]+(?:'[^\W\d_]+)?)"
    r"|(?P<symbol>\S)",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Scan:
    """A text taken apart: its quantities in one spelling, sorted unless they are calculated with, and all words.

    Words are as written; a quantity among them is one word, in that one spelling, behind a #.
    """

    quantities: tuple[str, ...]
    words: tuple[str, ...]


def scan(text: str) -> Scan:
    """Take a text apart; `text` is as `text.normal` leaves it."""
    return _Scanner(in_digits(text)).run()


class _Scanner:
    def __init__(self, text: str) -> None:
        self._tokens = list(_TOKEN.finditer(text))
        self._text = text
        self._found: list[tuple[str, float | str]] = []
        self._words: list[str] = []
        self._at = 0
        self._raw = ""
        """The digits of the last number as they were written, where they may stand for more than their value."""
        self._last_factor = 0.0
        self._last_end = -1
        """The place behind the last quantity: two with nothing between may be one, as in 1 h 30 min."""

    def run(self) -> Scan:
        while self._at < len(self._tokens):
            match = self._tokens[self._at]
            step = getattr(self, f"_{match.lastgroup}")
            step(match)
        marks = [char for char in self._text if not char.isascii() and unicodedata.category(char) in ("No", "Nl")]
        found = [_spelled(*item) for item in self._found]
        if not any(kind == "op" for kind, _ in self._found):  # 7 - 3 is not 3 - 7, but 3 eggs and 7 apples are
            found.sort()
        return Scan((*found, *marks), (*self._words,))

    def _find(self, kind: str, value: float | str) -> None:
        self._found.append((kind, value))
        self._words.append(f"#{_spelled(kind, value)}")

    def _iso(self, match: re.Match[str]) -> None:
        year, month, day = map(int, match[0].split("-"))
        self._date(day, month, year)

    def _slashed(self, match: re.Match[str]) -> None:
        a, b, year = (int(part) for part in re.split("[/.]", match[0]))
        year += 0 if year > 99 else (2000 if year < 70 else 1900)
        if "." in match[0] or a > 12:
            self._date(a, b, year)
        elif b > 12:
            self._date(b, a, year)
        else:  # the day first, or the month? whoever spells it the same means the same
            self._take("date", f"{a}/{b}")
            self._find("n", float(year))

    def _date(self, day: int, month: int, year: int) -> None:
        self._take("date", f"{month}-{day}")
        self._find("n", float(year))

    def _clock(self, match: re.Match[str]) -> None:
        digits = [int(part) for part in re.findall(r"\d+", match[0])]
        hour, rest = digits[0], digits[1:]
        half = re.search("[ap]", match[0].lower().replace("o'clock", ""))
        if half:
            hour = hour % 12 + (12 if half[0] == "p" else 0)
        self._take("clock", ":".join(f"{part:02}" for part in (hour, *(rest or [0]))))

    def _literal(self, match: re.Match[str]) -> None:
        self._take("literal", match[0].lower().removeprefix("v"))

    def _symbol(self, match: re.Match[str]) -> None:
        char, following = match[0], self._peek(1)
        digits = following is not None and following.lastgroup == "number"
        if char in _MONEY and digits:
            self._at += 1
            self._amount(_MEASURES[char])
            return
        before = self._tokens[self._at - 1] if self._at else None
        if char in "-+*/×÷^=<>" and digits:
            behind_number = before is not None and before.lastgroup == "number"
            spaced = match.start() == 0 or self._text[match.start() - 1] in " (=<>+*/^,:"
            if char == "-" and spaced and not behind_number:
                self._at += 1
                self._amount(None, sign=-1.0)
                return
            if behind_number:
                self._find("op", char)
        self._at += 1

    def _number(self, match: re.Match[str]) -> None:
        self._amount(None)

    def _word(self, match: re.Match[str]) -> None:
        word = match[0].lower()
        if (value := roman(match[0])) is not None:
            self._take("n", value)
            return
        if word in _MONTHS and (following := self._peek(1)) is not None and following.lastgroup == "number":
            day = following[0]
            if re.fullmatch("[0-9]{1,2}", day) and 1 <= int(day) <= 31:
                self._take("date", f"{_MONTHS[word]}-{int(day)}")
                self._at += 1 + self._ending(1)
                return
        if word in _OPERATOR_WORDS and self._at and self._tokens[self._at - 1].lastgroup == "number":
            self._find("op", _OPERATOR_WORDS[word])
        elif word in ("minus", "negative") and self._starts_number(self._at + 1):
            self._at += 1
            if word == "minus" and self._at > 1 and self._tokens[self._at - 2].lastgroup == "number":
                self._find("op", "-")
                self._amount(None)
            else:
                self._amount(None, sign=-1.0)
            return
        elif self._is_amount(word) or (word in ORDINALS and word not in ("second", "first")):
            self._amount(None)
            return
        self._words.append(match[0])
        self._at += 1

    def _is_amount(self, word: str) -> bool:
        """Whether a word at this place counts something: not the one in "which one", the two in "the two"."""
        following = [match[0].lower() for match in self._tokens[self._at + 1 : self._at + 3]]
        if word in _PARTS:
            return bool(following) and (following[0] in ("a", "an", "of") or self._is_unit(following))
        if word == "one":
            follows = following[:1] and following[0] in _FRACTIONS and following[1:] == ["of"]
            follows = follows or self._starts_number(self._at + 1) or self._half_follows(self._at + 1)
            return follows or self._is_unit(following)
        if word == "two" and self._words and self._words[-1].lower() in ("the", "these", "those", "into", "in"):
            return self._is_unit(following) or bool(following and following[0].removesuffix("s") in _PIECES)
        return word in WORDS or word in SCALES or word == "hundred"

    @staticmethod
    def _is_unit(words: list[str]) -> bool:
        words = words[words[:1] == ["-"] :]
        return bool(words) and len(words[0]) > 2 and _singular(words[0]) in _MEASURES

    def _starts_number(self, position: int) -> bool:
        if position >= len(self._tokens):
            return False
        match = self._tokens[position]
        word = match[0].lower()
        return match.lastgroup == "number" or word in WORDS or word in SCALES or word == "hundred"

    def _peek(self, distance: int) -> re.Match[str] | None:
        position = self._at + distance
        return self._tokens[position] if position < len(self._tokens) else None

    def _ending(self, distance: int) -> int:
        """1 if the number at this distance has an ordinal's ending stuck to it, else 0."""
        number, ending = self._peek(distance - 1), self._peek(distance)
        stuck = number is not None and ending is not None and number.end() == ending.start()
        return int(stuck and ending is not None and ending[0].lower() in ("st", "nd", "rd", "th"))

    def _take(self, kind: str, value: float | str) -> None:
        self._find(kind, value)
        self._at += 1

    def _amount(self, measure: tuple[str, float] | None, sign: float = 1.0) -> None:
        """A number at this place, with the unit that follows or that came before."""
        begin, self._raw = self._at, ""
        value = sign * self._value()
        if measure is not None and measure[0] in ("dollars", "euros", "pounds", "yen", "rupees"):
            suffix = self._peek(0)
            if suffix is not None and suffix[0].lower() in _SUFFIXES:
                value *= _SUFFIXES[suffix[0].lower()]
                self._at += 1
            following = self._peek(0)
            if following is not None and _MEASURES.get(_singular(following[0].lower()), ("",))[0] == measure[0]:
                self._at += 1
            self._add(measure[0], value, begin)
            return
        skip = self._ending(0)
        if (of := self._peek(skip)) is not None and of[0].lower() == "of":
            skip += 1
        month = self._peek(skip)
        if month is not None and month[0].lower() in _MONTHS and sign == 1.0 and value in range(1, 32):
            self._at += skip + 1
            self._find("date", f"{_MONTHS[month[0].lower()]}-{int(value)}")
            return
        before = self._tokens[begin - 1] if begin else None
        stuck = before is not None and before.lastgroup == "word" and before.end() == self._tokens[begin].start()
        if stuck and begin > 1 and before is not None and before[0].lower() == "x":
            stuck = self._tokens[begin - 2].lastgroup != "number"  # 4x6 inch
        if not stuck or self._last_end == begin:  # the 8 of utf8mb4 is no amount, the 30 of 1h30min is
            measure = measure or self._measure()
        if measure is None and self._raw:
            self._find("literal", self._raw)
        elif measure is None:
            self._add("n", value, begin)
        elif measure[0] == "fahrenheit":
            self._add("celsius", round((value - 32) / 1.8, 1), begin)
        else:
            self._add(measure[0], value * measure[1], begin, measure[1])

    def _value(self) -> float:
        match = self._tokens[self._at]
        if match.lastgroup == "number":
            return self._digits(match)
        number, taken = WordNumber(), False
        first = match[0].lower()
        if first in _PARTS:
            self._at += 1
            return self._part(_PARTS[first])
        while (match_ := self._peek(0)) is not None:
            if match_.lastgroup == "word" and number.takes(match_[0].lower()):
                taken = True
            elif not (match_[0] == "-" and taken and self._starts_number(self._at + 1)):
                break
            self._at += 1
        value = number.value()
        if first in _FRACTIONS and self._words and self._words[-1].lower() in ("a", "an") and self._next("of"):
            ahead = self._peek(1)
            if ahead is None or ahead[0].lower() not in _MONTHS:  # the party on a fourth of July
                return 1 / value
        if (parts := self._parts(value)) is not None:
            return parts
        if (following := self._peek(0)) is not None and following[0].lower() == "grand":
            self._at += 1
            value *= _SUFFIXES["grand"]
        value += self._and_a_half()
        if not value.is_integer() and (scale := self._peek(0)) is not None and scale[0].lower() in SCALES:
            self._at += 1
            value *= SCALES[scale[0].lower()]  # two and a half thousand
        return value

    def _next(self, word: str) -> bool:
        following = self._peek(0)
        return following is not None and following[0].lower() == word

    def _digits(self, match: re.Match[str]) -> float:
        digits = match[0].replace(",", "")
        value = float(digits[:300])
        self._at += 1
        if _WRITTEN.fullmatch(digits) and "," not in match[0]:
            self._raw = digits
        if (fraction := self._fraction(value)) is not None or (fraction := self._parts(value)) is not None:
            return fraction
        following = self._peek(0)
        if following is None:
            return value
        word = following[0].lower()
        if word in SCALES:
            self._at += 1
            return value * SCALES[word]
        if following[0] in ("M", "B") and following.start() == match.end():  # 100M users
            self._at += 1
            return value * _SUFFIXES[word]
        if word == "s" and following.start() == match.end() and len(digits) == 4:  # the 1980s
            self._at += 1
            self._raw = f"{digits}s"
            return value
        if (part := self._mixed(value)) is not None:
            return part
        if word in ("k", "bn", "grand") and (word == "grand" or following.start() == match.end()):
            self._at += 1
            return value * _SUFFIXES[word]
        self._at += self._ending(0)
        return value + self._and_a_half()

    def _fraction(self, value: float) -> float | None:
        """3/4, if it is one."""
        slash, below = self._peek(0), self._peek(1)
        if slash is None or below is None or slash[0] != "/" or not re.fullmatch("[0-9]{1,3}", below[0]):
            return None
        if int(below[0]) not in (2, 3, 4, 5, 6, 8, 10, 16, 32, 64, 100) or not 0 < value < int(below[0]):
            return None
        self._at += 2
        return value / int(below[0])

    def _parts(self, value: float) -> float | None:
        """ "two thirds", "three quarters of an hour", if they are fractions; "the last three quarters" are months."""
        skip = int((dash := self._peek(0)) is not None and dash[0] == "-")
        below = self._peek(skip)
        name = below[0].lower() if below is not None else ""
        whole = _FRACTIONS.get(name.removesuffix("s"), 0)
        if not 0 < value < whole or name.endswith("s") != (value > 1) or (whole == 4 and value != 3):
            return None
        if value == 1 or whole == 4 or self._tokens[self._at - 1].lastgroup == "number":  # one third-party app
            ahead, last = self._peek(skip + 1), self._words[-1].lower() if self._words else ""
            if ahead is None or ahead[0].lower() != "of" or last in ("last", "past", "next", "first", "these"):
                return None
        self._at += skip + 1
        return self._part(value / whole)

    def _mixed(self, value: float) -> float | None:
        """2 1/2, if it is that."""
        above = self._peek(0)
        if above is None or above.lastgroup != "number" or not value.is_integer() or "." in above[0]:
            return None
        self._at += 1
        part = self._fraction(float(above[0].replace(",", "")[:300]))
        if part is None:
            self._at -= 1
            return None
        return value + part

    def _part(self, part: float) -> float:
        """ "half a", "a quarter of an": the words between a part and its unit."""
        while (match := self._peek(0)) is not None and match[0].lower() in ("a", "an", "of", "-", "the"):
            ahead = self._peek(1)
            if ahead is None or (match[0].lower() == "of" and ahead[0].lower() not in ("a", "an")):
                break
            self._at += 1
        return part

    def _and_a_half(self) -> float:
        if not self._half_follows(self._at):
            return 0.0
        self._at += 3
        return _PARTS[self._tokens[self._at - 1][0].lower()]

    def _half_follows(self, position: int) -> bool:
        words = [match[0].lower() for match in self._tokens[position : position + 3]]
        return words[:2] == ["and", "a"] and words[2:] in (["half"], ["quarter"])

    def _measure(self) -> tuple[str, float] | None:
        """The unit at this place, if there is one; "per cent" and "degrees Celsius" are two words."""
        skip = 0
        match = self._peek(0)
        if match is not None and match[0] == "-":
            skip, match = 1, self._peek(1)
        if match is None:
            return None
        word = match[0]
        follower = self._peek(skip + 1)
        next_word = follower[0].lower() if follower is not None else ""
        if word.lower() == "per" and next_word == "cent":
            self._at += skip + 2
            return _MEASURES["percent"]
        if word in ("°",) or word.lower() in ("degree", "degrees", "deg"):
            if next_word in ("c", "f", "celsius", "fahrenheit", "centigrade"):
                self._at += skip + 2
                return _MEASURES["fahrenheit" if next_word.startswith("f") else "celsius"]
            self._at += skip + 1
            return _MEASURES["degree"]
        if word in ("in", "second") and not (word == "in" and next_word in ("", ".")):
            return None  # "5 in a row", "the 2 second hand" …
        stuck = self._at > 0 and self._tokens[self._at - 1].end() == match.start()
        if word in ("C", "F") and stuck:
            self._at += skip + 1
            return _MEASURES["celsius" if word == "C" else "fahrenheit"]
        unit = _BY_CASE.get(word, _singular(word.lower()))
        measure = _MEASURES.get(unit)
        if measure is None or (len(unit) == 1 and unit.isalpha() and not stuck and unit not in "lgvwmsh"):
            return None
        self._at += skip + 1
        return measure

    def _add(self, kind: str, value: float, begin: int, factor: float = 1.0) -> None:
        """One more quantity; "1 minute" and "30 seconds" with nothing between them are one."""
        between = [match[0].lower() for match in self._tokens[self._last_end : begin]] if self._last_end >= 0 else ["."]
        joined = between in ([], ["and"]) and kind in ("time", "length", "mass", "months")
        joined = joined and factor < self._last_factor  # 1 h 30 min, but not 500 mg and 200 mg
        self._last_factor = factor
        last = self._found[-1] if self._found else ("", 0.0)
        if joined and last[0] == kind and isinstance(last[1], float) and last[1] > value > 0:
            self._found.pop()
            while not self._words.pop().startswith("#"):  # the "and" between
                pass
            self._find(kind, last[1] + value)
        else:
            self._find(kind, value)
        self._last_end = self._at


def _spelled(kind: str, value: float | str) -> str:
    return f"{kind}:{value:.9g}" if isinstance(value, float) else f"{kind}:{value}"


_BRITISH = {"metre": "meter", "litre": "liter", "gramme": "gram"}


def _singular(word: str) -> str:
    """A unit's word in the singular and in American spelling."""
    if word in _MEASURES:
        return word
    word = word.removesuffix("s") if len(word) > 2 else word
    for british, american in _BRITISH.items():
        if word.endswith(british):
            return word.removesuffix(british) + american
    return {"inche": "inch", "centurie": "century", "min": "min", "kilo": "kilo"}.get(word, word)


def unit_word(word: str) -> str:
    """One spelling for a unit that stands without a number ("in kilometres", "in km"); other words as they are."""
    singular = _singular(word)
    if singular not in _MEASURES or (len(word) < 3 and word not in ("km", "cm", "mm", "kg", "lb", "oz", "mb", "gb")):
        return word
    return next(name for name, measure in reversed(list(_MEASURES.items())) if measure == _MEASURES[singular])


_MORE_UNITS = frozenset("cup hectare acre stone pint oz knot kelvin".split())


def is_unit(word: str) -> bool:
    """Whether a word is the name of a unit."""
    singular = _singular(word)
    return (singular in _MEASURES and (len(word) > 2 or word in ("km", "cm", "mm", "kg", "lb", "°c", "°f"))
            ) or word in _MORE_UNITS or word.removesuffix("s") in _MORE_UNITS  # fmt: skip
