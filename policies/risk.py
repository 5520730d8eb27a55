"""How sure must the verifier be, if at most this share of what is served may be wrong?

Two sources say it. The calibration set (pairs that were labelled by hand, and that the verifier was not trained on)
gives a limit before anything was served. Live evidence (fresh answers compared with the stored ones that were, or
would have been, served in their place) moves it: up as soon as what was seen exceeds the allowance, down only when
enough was seen to prove that less is safe.

Sources: exact binomial bound, Clopper and Pearson 1934; testing limits from the strictest on and stopping at the first
that fails, Learn Then Test (Angelopoulos et al. 2021, fixed sequences); looking again and again at growing evidence, a
union bound over checkpoints, each with its share of the risk; the allowance, online risk control in the manner of
Adaptive Conformal Inference (Gibbs and Candès 2021). docs/hit-quality.md states what this promises, and when.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice

CONFIDENCE = 0.95
NEVER = math.inf
"""A limit that no score reaches."""
LEVELS = 64
"""So many limits are tried; more would not tell more."""
STARTS = (0, 12)
"""Where the tests begin, in units of the number of hits that one wrong one is allowed in; 0: as early as possible."""
LATELY = 2
"""What the allowance looks at, in units of the number of hits that one wrong one is allowed in: after a drift it
takes no more than three wrong answers that were noticed until the limit rises."""
REMEMBERED = 16
"""What is remembered, in the same units: a proof wants more than an alarm."""
MOST = 3200
"""What is remembered at most: as many as the strictest rate (0.5 %) asks for."""
HOPELESS = 0.002
"""If so little speaks for what is served over the limit being right often enough, no limit is high enough."""
UNLUCKY = 3.0
"""An entry may be so many times as bad as the whole; entries differ."""
UNLUCKIEST = 0.15
"""But no worse than this: two failures in a row lock it out, whatever the rate."""
CREDIT = 1.0
"""A tenant inherits the calibration and a scope what its tenant has seen: one wrong answer alone speaks against
neither."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A pair that was looked at: the verifier's score (log-odds), and whether one answer serves both; None: nobody
    could tell."""

    score: float
    right: bool | None


def upper_bound(wrong: int, total: int, confidence: float = CONFIDENCE) -> float:
    """The largest share of wrong ones that is compatible with what was seen (one-sided, Clopper and Pearson 1934)."""
    if wrong >= total:
        return 1.0
    low, high = wrong / total, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if _at_most(wrong, total, middle) > 1 - confidence else (low, middle)
    return high


def _at_most(count: int, total: int, share: float) -> float:
    """P(X <= count) for X ~ Binomial(total, share)."""
    if share <= 0:
        return 1.0
    log_odds, term, total_term = math.log(share) - math.log1p(-share), total * math.log1p(-share), 0.0
    for k in range(count + 1):
        total_term += math.exp(term)
        term += log_odds + math.log((total - k) / (k + 1)) if k < total else 0.0
    return min(1.0, total_term)


def tested_limit(seen: Sequence[Seen], rate: float, confidence: float = CONFIDENCE) -> float:
    """The lowest score at and over which at most `rate` is wrong with `confidence`, or `NEVER`.

    The limits that are tried are fixed shares of the evidence, strictest first; the first one that fails ends it, so
    that no correction for trying many is needed (fixed-sequence testing). One wrong pair among the very first must not
    end it, so there are two beginnings, between which the error is divided (Learn Then Test, algorithm 1).
    """
    ordered = sorted(seen, key=lambda one: -one.score)
    if not 0 < rate < 1:
        return NEVER
    starts = [start / rate for start in STARTS if start / rate <= len(ordered)]
    error = (1 - confidence) / len(starts)
    # With fewer than `first` no number of right ones would prove anything.
    first = math.ceil(math.log(error) / math.log1p(-rate))
    steps = sorted({round(len(ordered) * (step + 1) / LEVELS) for step in range(LEVELS)})
    wrongs = list(accumulate((not one.right for one in ordered), initial=0))
    passed = NEVER
    for start in starts:
        begin = max(first, math.ceil(start))
        for size in [begin, *(step for step in steps if step > begin)]:
            if size > len(ordered):
                break
            while size < len(ordered) and ordered[size].score == ordered[size - 1].score:
                size += 1  # a limit cannot tell equal scores apart
            if _at_most(wrongs[size], size, rate) > error:  # the bound is over `rate`
                break
            passed = min(passed, ordered[size - 1].score)
    return passed


def checkpoint(total: int, rate: float) -> tuple[int, float]:
    """How much evidence there was at the last time that it may be looked at, and the confidence to ask for then, so
    that looking again and again stays honest.

    The k-th look, when there is twice as much as at the one before, spends (1 - CONFIDENCE) / (k (k + 1)); all looks
    of a process together spend no more than 1 - CONFIDENCE.
    """
    size, k = math.ceil(4 / rate), 1
    if total < size:
        return 0, CONFIDENCE
    while 2 * size <= total:
        size, k = 2 * size, k + 1
    return size, 1 - (1 - CONFIDENCE) / (k * (k + 1))


@dataclass(slots=True)
class Pool:
    """What was seen of everything, or of a scope; the newest of it, oldest first."""

    seen: deque[Seen] = field(default_factory=lambda: deque(maxlen=MOST))
    total: int = 0
    proofs: dict[float, tuple[int, float]] = field(default_factory=dict)
    """Rate → how much there was at the last look, and what it proved."""

    def add(self, one: Seen) -> None:
        self.seen.append(one)
        self.total += 1

    def limit(self, rate: float, start: float, credit: float = 0.0) -> float:
        """The lowest limit from `start` on over which of what was seen lately no more than `rate` was wrong, or
        `credit` of them. What nobody could tell says nothing here."""
        told = (one for one in reversed(self.seen) if one.right is not None)
        lately = list(islice(told, math.ceil(LATELY / rate)))
        wrong = sorted(one.score for one in lately if not one.right and one.score >= start)
        if not wrong:
            return start
        scores = sorted(one.score for one in lately)
        if len(lately) >= math.ceil(LATELY / rate):
            credit = 0.0  # it has a record of its own by now
        limit = start
        for number, score in enumerate(wrong):
            if len(wrong) - number <= max(credit, rate * (len(scores) - bisect_left(scores, limit))):
                break
            limit = math.nextafter(score, NEVER)
        return limit

    def proven(self, rate: float) -> float:
        """The lowest limit that this evidence alone proves, or `NEVER`; what nobody could tell counts as wrong."""
        size, confidence = checkpoint(self.total, rate)
        if not size:
            return NEVER
        looked, proof = self.proofs.get(rate, (0, NEVER))
        if looked != size:
            newest = list(islice(reversed(self.seen), min(size, math.ceil(REMEMBERED / rate))))
            proof = tested_limit(newest, rate, confidence)
            self.proofs[rate] = size, proof
        return proof


def everywhere(rate: float, calibration: float, pool: Pool) -> float:
    """The score that a hit of a tenant must reach now; `calibration`: the limit before any evidence."""
    proof = pool.proven(rate)
    limit = pool.limit(rate, min(calibration, proof), CREDIT)
    inside = [one for one in pool.seen if one.right is not None and one.score >= limit]
    wrong = sum(not one.right for one in inside)
    if wrong > 1 and 1 - _at_most(wrong - 1, len(inside), rate) < HOPELESS:
        return max(limit, proof)  # scores tell nothing here: nothing serves until something is proven
    return limit


def locked(rate: float, entry: Collection[bool]) -> bool:
    """Whether an entry is too often wrong for chance to explain it; `entry`: of what is known of it, what was right."""
    wrong = sum(not right for right in entry)
    return wrong > 0 and 1 - _at_most(wrong - 1, len(entry), min(UNLUCKIEST, UNLUCKY * rate)) < 1 - CONFIDENCE


def narrowed(rate: float, limit: float, scope: Pool | None, entry: Collection[bool]) -> float:
    """The same within one scope, for one entry; `entry`: of what is known of it, what was right.

    A narrower pool inherits what the wider one says, and can only tighten it: a scope is believed after the second
    wrong answer that the allowance has no room for; an entry is locked out as soon as chance does not explain its
    failures, which is after the first or the second of them.
    """
    return NEVER if locked(rate, entry) else limit if scope is None else scope.limit(rate, limit, CREDIT)


def interval(wrong: int, total: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The two-sided exact interval of a share (Clopper and Pearson 1934)."""
    side = (1 - confidence) / 2
    high = upper_bound(wrong, total, 1 - side) if total else 1.0
    if not wrong:
        return 0.0, high
    below, low = 0.0, wrong / total
    for _ in range(50):
        middle = (below + low) / 2
        below, low = (middle, low) if 1 - _at_most(wrong - 1, total, middle) < side else (below, middle)
    return low, high
