"""What personal data and secrets look like in text, and the same text without them.

Masked is with a keyed hash of what stood there, so that the same value has the same mask and another value another one:
two texts that differ in an address only still differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from typing import Literal

from backends.protocol import Section

Sort = Literal["emails", "phones", "cards", "keys"]
SORTS: tuple[Sort, ...] = ("emails", "phones", "cards", "keys")

_PATTERNS: dict[Sort, re.Pattern[str]] = {
    "keys": re.compile(
        r"-----BEGIN [A-Z ]*PRIVATE KEY-----[\s\S]*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)"
        r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
        r"|\b(?:sk|pk|rk|hk)[-_][\w-]{16,}|\b(?:gh[pousr]|github_pat|glpat|xox[abprs]|hf|npm|dop_v1|shpat)[-_]\w[\w-]{14,}"
        r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b|\bAIza[\w-]{35}"
        r"|(?i:\bbearer\s+)[\w.~+/-]{16,}=*"
        r"|(?i:\b(?:api[-_ ]?key|secret|token|password|passwd|pwd)\b\s*[:=]\s*)"
        r"(?:\"[^\"\n]+\"|'[^'\n]+'|[^\s\"',;]{6,})"
    ),
    "emails": re.compile(r"[\w.!#$%&*+/=?^`{|}~'-]+@[\w-]+(?:\.[\w-]+)+"),
    "cards": re.compile(r"(?<![\w.])(?:\d[ -]?){12,18}\d(?![\w])"),
    "phones": re.compile(
        r"(?<![\w.])(?:\+|00)[1-9](?:[ ./-]?\(?\d+\)?){2,7}(?!\w)"
        r"|(?<![\w.-])\(?\d{3}\)?[ .-]\d{3}[ .-]\d{4}(?![\w-])"
        r"|(?<![\w.])0\d{1,4}[ /-]\d{3,4}[ -]?\d{3,6}(?!\w)"
    ),
}
_MARK = {"keys": "key", "emails": "email", "cards": "card", "phones": "phone"}


class Redaction(Section):
    """`redact:` of a tenant."""

    text: bool = True
    """False: no text of a question is stored at all, only hashes and vectors."""
    mask: tuple[Sort, ...] = ()
    """What is masked in stored questions and in the log: emails, phones, cards, keys."""


def masked(text: str, sorts: Iterable[Sort], key: bytes) -> str:
    """The text with what looks like one of these sorts replaced by `<email:3f9a1c>` and the like."""
    wanted = set(sorts)
    for sort in ("keys", "emails", "cards", "phones"):  # a key may hold what looks like a number
        if sort in wanted:
            text = _PATTERNS[sort].sub(_mask(sort, key), text)
    return text


def _mask(sort: Sort, key: bytes) -> Callable[[re.Match[str]], str]:
    secret = hashlib.blake2b(key).digest()

    def mask(match: re.Match[str]) -> str:
        found = match[0]
        digits = re.sub(r"\D", "", found)
        if sort == "cards" and not _is_card(digits):
            return found
        if sort == "phones" and not 7 <= len(digits) <= 15:
            return found
        value = digits if sort in ("cards", "phones") else found.casefold() if sort == "emails" else found
        digest = hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=3, key=secret).hexdigest()
        return f"<{_MARK[sort]}:{digest}>"

    return mask


def _is_card(digits: str) -> bool:
    """13 to 19 digits with the check digit of H. P. Luhn (US patent 2,950,048; ISO/IEC 7812-1)."""
    if not 13 <= len(digits) <= 19:
        return False
    doubled = [int(digit) * 2 if place % 2 else int(digit) for place, digit in enumerate(reversed(digits))]
    return sum(value - 9 if value > 9 else value for value in doubled) % 10 == 0 and len(set(digits)) > 1
