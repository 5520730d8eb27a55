"""Why was a prefix not reused? Compares each prompt with the latest ones and remembers where they part. No torch.

Two prompts that are the same but for a date near the top share only what stands before the date. The doctor finds where
two prompts part, whether they come together again, and so how many tokens one small difference costs.
"""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

HISTORY = 16
FINDINGS = 20
_WORTH = 32
"""Tokens that a difference must cost to be told."""
_SKIP = 12
_SHIFTS = range(-6, 7)
_BYTES = 4


@dataclass
class Finding:
    """One difference that keeps coming: where, what, and what it costs."""

    position: int
    before: str
    variants: deque[str] = field(default_factory=lambda: deque(maxlen=5))
    reason: str = ""
    times: int = 0
    lost_tokens: int = 0


class PrefixDoctor:
    """Looks at prompts as they come; thread-safe. `decode` turns token ids into text."""

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._lock = threading.Lock()
        self._history: dict[str, deque[bytes]] = {}
        self._findings: OrderedDict[tuple[str, int, str], Finding] = OrderedDict()
        self._prompt_tokens = self._reused_tokens = self._lost_tokens = 0

    def look(self, prompt: Sequence[int], salt: str = "") -> None:
        """Compare a prompt with the latest ones of the same tenant."""
        packed = array("I", prompt).tobytes()
        with self._lock:
            history = self._history.setdefault(salt, deque(maxlen=HISTORY))
            others = list(history)
            history.append(packed)
            if len(self._history) > 1000:
                self._history.pop(next(iter(self._history)))
            self._prompt_tokens += len(prompt)
        lost, parted = max(((_lost(packed, other), other) for other in others), default=((0, 0), b""))
        if lost[0] >= _WORTH and not any(_common(packed, other) // _BYTES >= lost[0] + lost[1] for other in others):
            self._note(salt, prompt, parted, *lost)

    def reused(self, tokens: int) -> None:
        """That many tokens of a prompt were found in a cache."""
        with self._lock:
            self._reused_tokens += tokens

    def report(self) -> dict[str, Any]:
        """Totals, and what cost most first."""
        with self._lock:
            findings = sorted(self._findings.values(), key=lambda finding: -finding.lost_tokens)
            return {
                "prompt_tokens": self._prompt_tokens,
                "reused_tokens": self._reused_tokens,
                "lost_tokens": self._lost_tokens,
                "findings": [
                    {
                        "position": finding.position,
                        "before": finding.before,
                        "variants": list(finding.variants),
                        "reason": finding.reason,
                        "times": finding.times,
                        "lost_tokens": finding.lost_tokens,
                    }
                    for finding in findings
                ],
            }

    def _note(self, salt: str, prompt: Sequence[int], other: bytes, lost: int, position: int) -> None:
        theirs = array("I", other).tolist()
        before = self._decode(prompt[max(0, position - 12) : position])
        ours, was = (self._decode(tokens[position : position + _SKIP]) for tokens in (prompt, theirs))
        with self._lock:
            finding = self._findings.pop((salt, position, before), None) or Finding(position, before)
            for variant in (was, ours):
                if variant not in finding.variants:
                    finding.variants.append(variant)
            finding.reason = _reason(before[-16:], was, ours)
            finding.times += 1
            finding.lost_tokens += lost
            self._lost_tokens += lost
            self._findings[salt, position, before] = finding
            while len(self._findings) > FINDINGS:
                self._findings.popitem(last=False)


def _lost(ours: bytes, theirs: bytes) -> tuple[int, int]:
    """(tokens that are the same again after the first difference, where that is): what the difference costs."""
    position = _common(ours, theirs) // _BYTES
    start = (position + _SKIP) * _BYTES
    best = 0
    for shift in _SHIFTS:
        if 0 <= start + shift * _BYTES < len(theirs) and start < len(ours):
            best = max(best, _common(ours[start:], theirs[start + shift * _BYTES :]) // _BYTES)
    return best, position


def _common(a: bytes, b: bytes) -> int:
    """Length of the common beginning, by bisection over slices (each comparison is one memcmp)."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


_DATE = re.compile(
    r"\d{4}-\d\d?(-\d\d?)?|\d\d?[:/.]\d\d|\b(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*\b|\b(mon|tues|wednes|thurs|fri|satur|sun)day\b",
    re.IGNORECASE,
)


def _reason(before: str, was: str, now: str) -> str:
    """A guess at what differs, in words for the one who writes the prompt."""
    if all(_DATE.search(before + variant[:12]) for variant in (was, now)):  # they may part within the date
        return "a date or time: put it at the end of the prompt, or round it"
    theirs, ours = was.split(), now.split()
    common = max(1, min(len(theirs), len(ours)) - 2)  # the windows may end at different words
    if theirs[:common] == ours[:common]:
        return "blanks or line ends: trim the prompt"
    if re.sub(r"\d+", "", was) == re.sub(r"\d+", "", now):
        return "a number or identifier: put it after what stays the same"
    if was.lstrip().startswith(("{", "[", '"')) or now.lstrip().startswith(("{", "[", '"')):
        return "structured data, perhaps tools or fields in another order: send them in a fixed order"
    return "different text: put what changes after what stays the same"
