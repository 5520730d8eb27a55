"""What personal data and secrets look like in text, and the same text without them.

Masked is with a keyed hash of what stood there, so that the same value has the same mask and another value another one:
two texts that differ in an address only still differ. Every pattern is linear: a run is begun once (what stands before
it is looked at), its length is bounded, and what it means is decided in Python.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Literal

from backends.protocol import Section

Sort = Literal["emails", "phones", "cards", "keys"]
SORTS: tuple[Sort, ...] = ("emails", "phones", "cards", "keys")

_NAMES = r"(?:api[-_ ]?key|secret|token|password|passwd|pwd|passphrase|credentials?)"
_PATTERNS: dict[Sort, re.Pattern[str]] = {
    "keys": re.compile(
        r"-----BEGIN [A-Z ]{0,30}PRIVATE KEY(?: BLOCK)?-----[A-Za-z0-9+/=\s:.,-]{0,20000}"
        r"|(?<![\w-])eyJ[\w-]{8,4000}\.[\w-]{8,8000}(?:\.[\w-]{0,2000})?"  # a JSON web token
        r"|(?<![A-Za-z0-9])(?:sk|pk|rk|hk)[-_][\w-]{16,200}"
        r"|(?<![A-Za-z0-9])(?:gh[pousr]|github_pat|glpat|xox[abprs]|hf|npm|dop_v1|shpat|whsec|lin_api)[-_]\w[\w-]{14,200}"
        r"|(?<![A-Za-z0-9])(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])|(?<![A-Za-z0-9])AIza[\w-]{35}"
        r"|(?<![A-Za-z])(?i:bearer|basic) {1,4}[\w.~+/-]{12,4000}={0,2}"
        r"|(?<=://)[^\s:/@]{1,64}:[^\s/@]{1,128}(?=@)"  # user and password of a URL
        rf"|(?i:{_NAMES}(?:[-_](?:access[-_])?key)?)[\"']?\s{{0,4}}[:=]\s{{0,4}}"
        r"(?:\"[^\"\n]{1,500}\"|'[^'\n]{1,500}'|[^\s\"',;]{4,500})"
        r"|(?i:access[-_ ]?key)[\"']?\s{0,4}[:=]\s{0,4}[\"']?[^\s\"',;]{8,500}"
    ),
    "emails": re.compile(r"(?<![\w.+-])[\w.!#$%&*+/=?^`{|}~'-]{1,64}@[\w-]{1,63}(?:\.[\w-]{1,63}){1,8}"),
    "cards": re.compile(r"(?<![\w.])\d(?:[ .-]?\d){12,40}(?!\w)"),
    "phones": re.compile(r"(?<![\w.+-])(?:\+|\(?0|\(?\d{3}\)?[ .-])[\d ./()-]{5,22}(?<=\d)(?!\w)"),
}
_MARK = {"keys": "key", "emails": "email", "cards": "card", "phones": "phone"}


class Redaction(Section):
    """`redact:` of a tenant."""

    text: bool = True
    """`false`: no text of a question is stored at all; a stored answer then serves the very same question only."""
    mask: tuple[Sort, ...] = ()
    """What is masked in stored questions and in the log: `emails`, `phones`, `cards`, `keys`."""

    def and_also(self, other: Redaction) -> Redaction:
        """What both keep out."""
        return Redaction(text=self.text and other.text, mask=tuple(dict.fromkeys((*self.mask, *other.mask))))


def masked(text: str, sorts: Iterable[Sort], key: bytes) -> str:
    """The text with what looks like one of these sorts replaced by `<email:3f9a1c>` and the like."""
    wanted = set(sorts)
    for sort in ("keys", "emails", "cards", "phones"):  # a key may hold what looks like a number
        if sort in wanted:
            text = _PATTERNS[sort].sub(_mask(sort, key), text)
    return text


def _mask(sort: Sort, key: bytes) -> Callable[[re.Match[str]], str]:
    secret = hashlib.blake2b(key).digest()

    def mark(value: str) -> str:
        digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=3, key=secret)
        return f"<{_MARK[sort]}:{digest.hexdigest()}>"

    def mask(match: re.Match[str]) -> str:
        found = match[0]
        if sort == "cards":
            return _without_cards(found, mark)
        if sort == "phones":
            digits = re.sub(r"\D", "", found)
            return mark(digits) if _is_phone(found, digits) else found
        return mark(found.casefold() if sort == "emails" else found)

    return mask


def _without_cards(run: str, mark: Callable[[str], str]) -> str:
    """A run of digits with the numbers of cards in it masked, the longest first."""
    places = [place for place, char in enumerate(run) if char.isdigit()]
    for size in (19, 18, 16, 15, 14, 13):
        for first in range(len(places) - size + 1):
            start, end = places[first], places[first + size - 1] + 1
            digits = re.sub(r"\D", "", run[start:end])
            joined = (start and run[start - 1].isdigit()) or (end < len(run) and run[end].isdigit())
            if not joined and _is_card(digits):
                return f"{run[:start]}{mark(digits)}{_without_cards(run[end:], mark)}"
    return run


def _is_card(digits: str) -> bool:
    """13 to 19 digits with the check digit of H. P. Luhn (US patent 2,950,048; ISO/IEC 7812-1)."""
    if not 13 <= len(digits) <= 19:
        return False
    doubled = [int(digit) * 2 if place % 2 else int(digit) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0 and len(set(digits)) > 1


def _is_phone(found: str, digits: str) -> bool:
    """International with a + or 00; or national: grouped, of a length that numbers have, and no date."""
    if not 7 <= len(digits) <= 15:
        return False
    if found.startswith(("+", "00")):
        return True
    groups = re.findall(r"\d+", found)
    if re.fullmatch(r"\d{4}[-/.]\d{1,2}[-/.]\d{1,2}|\d{1,2}[-/.]\d{1,2}[-/.]\d{2,4}", found):
        return False
    return len(groups) >= 2 and 9 <= len(digits) <= 12 and "." not in found.replace(". ", "")[:3]
