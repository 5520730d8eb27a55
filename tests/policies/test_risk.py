"""The limit that keeps a promise: its bounds are exact, and simulated traffic, drift and bad entries included, keeps
it."""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

from policies import risk
from policies.risk import NEVER, Pool, Seen


def test_the_bound_is_that_of_clopper_and_pearson() -> None:
    for wrong, total, known in (
        (0, 299, 0.00997),
        (0, 59, 0.04951),
        (1, 100, 0.04656),
        (3, 100, 0.07571),
        (5, 1000, 0.01048),
    ):
        assert risk.upper_bound(wrong, total) == pytest.approx(known, abs=2e-5)
    assert risk.upper_bound(4, 4) == 1.0
    assert risk.interval(0, 0) == (0.0, 1.0)
    low, high = risk.interval(10, 100)
    assert (round(low, 4), round(high, 4)) == (0.0490, 0.1762)


def test_too_little_evidence_proves_nothing() -> None:
    right = [Seen(float(score), True) for score in range(298)]
    assert risk.tested_limit(right, 0.01) == NEVER
    assert risk.tested_limit([*right, Seen(300.0, True)], 0.01) == 0.0
    assert risk.tested_limit([], 0.01) == NEVER


def test_one_wrong_pair_among_the_very_first_does_not_end_it() -> None:
    seen = [Seen(float(2000 - place), place != 3) for place in range(2000)]
    assert risk.tested_limit(seen, 0.01) <= 1.0, "one of two thousand is wrong"
    assert risk.tested_limit(seen[:1000], 0.01) == NEVER, "the second beginning is at 1,200"


def test_a_limit_is_proven_with_the_stated_confidence() -> None:
    """Of many calibration sets drawn anew, no more than one in twenty may give a limit over which too much is wrong."""
    chance, failures, served = random.Random(5), 0, 0.0
    for _ in range(300):
        seen = [Seen(score := chance.uniform(0, 6), chance.random() < _right(score)) for _ in range(800)]
        limit = risk.tested_limit(seen, 0.05)
        if limit != NEVER:
            failures += _wrong_over(limit) > 0.05
            served += (6 - limit) / 6
    assert failures <= 300 * 0.05 + 2 * math.sqrt(300 * 0.05 * 0.95)
    assert served / 300 > 0.3, "and it is not bought by serving nothing"


def _right(score: float) -> float:
    return 1 / (1 + math.exp(-score))


def _wrong_over(limit: float) -> float:
    points = [limit + (6 - limit) * (step + 0.5) / 200 for step in range(200)]
    return sum(1 - _right(point) for point in points) / 200


def test_one_audited_failure_too_many_raises_the_limit_and_a_scope_may_have_one() -> None:
    pool = Pool()
    for _ in range(99):
        pool.add(Seen(3.0, True))
    pool.add(Seen(2.0, False))
    assert pool.limit(0.01, 1.0) == 1.0, "one of a hundred is allowed"
    pool.add(Seen(2.5, False))
    assert 2.0 < pool.limit(0.01, 1.0) <= 2.5, "of two the lower one is refused now"
    young = Pool()
    young.add(Seen(4.0, False))
    assert young.limit(0.01, 1.0) > 4.0, "of a pool that is on its own"
    assert risk.narrowed(0.01, 1.0, young, []) == 1.0, "of a scope that inherits what the whole has seen"
    young.add(Seen(4.5, False))
    assert risk.narrowed(0.01, 1.0, young, []) > 4.0
    assert risk.narrowed(0.01, 1.0, None, [False]) == NEVER, "an entry is locked out by the first one"
    assert risk.narrowed(0.01, 1.0, None, [True, False, True]) == 1.0, "unless it has been right before"
    assert risk.narrowed(0.01, 1.0, None, [True, False, True, False]) == NEVER, "and then by the second"


def test_looking_again_and_again_spends_no_more_than_was_allowed() -> None:
    spent = sum(1 - risk.checkpoint(400 * 2**k, 0.01)[1] for k in range(30))
    assert risk.checkpoint(399, 0.01) == (0, risk.CONFIDENCE) and risk.checkpoint(900, 0.01)[0] == 800
    assert spent <= 1 - risk.CONFIDENCE


def test_live_evidence_lowers_the_limit_only_when_it_proves_that_less_is_safe() -> None:
    pool, chance = Pool(), random.Random(2)
    for number in range(1600):
        pool.add(Seen(chance.uniform(0, 6), True))
        if number < 399:
            assert risk.everywhere(0.01, 5.0, pool) == 5.0
    assert risk.everywhere(0.01, 5.0, pool) < 0.5
    assert risk.everywhere(0.01, NEVER, pool) < 0.5, "even where the calibration proved nothing"


Truth = Callable[[int, float, int], float]
"""(request, score, entry) → probability that the entry's answer is right."""


def _honest(request: int, score: float, entry: int) -> float:
    return _right(score)


def _drifting(request: int, score: float, entry: int) -> float:
    """From the middle on the verifier is far too sure of itself."""
    return _right(score - (2.5 if request > 10_000 else 0))


def _seasons(request: int, score: float, entry: int) -> float:
    return _right(score - (2.0 if request // 10_000 % 2 else 0))


def _poisoned(request: int, score: float, entry: int) -> float:
    """One entry in two hundred is always wrong, however sure the verifier is, one of the most asked ones among them."""
    return 0.0 if entry % 200 == 12 else _right(score)


def _flat(request: int, score: float, entry: int) -> float:
    """The score tells nothing, and the calibration knew nothing of it."""
    return 0.93


def simulate(truth: Truth, rate: float, seed: int, audit: float, requests: int, after: int) -> tuple[int, int, int]:
    """(hits, wrong ones, requests) after so many: a tenant's traffic through the limit, as `gateway.cache` applies
    it."""
    chance = random.Random(seed)
    calibration = [Seen(s := chance.uniform(0, 8), chance.random() < _right(s)) for _ in range(3000)]
    first, pool = risk.tested_limit(calibration, rate), Pool()
    scopes: dict[int, Pool] = defaultdict(Pool)
    entries: dict[int, list[bool]] = defaultdict(list)
    hits = wrong = 0
    everywhere, changed = first, False
    for request in range(requests):
        entry = min(int(chance.paretovariate(1.0)), 5000)
        score = chance.uniform(0, 8)
        right = chance.random() < truth(request, score, entry)
        if changed:
            everywhere, changed = risk.everywhere(rate, first, pool), False
        served = score >= risk.narrowed(rate, everywhere, scopes[entry % 5], entries[entry])
        if request >= after:
            hits, wrong = hits + served, wrong + (served and not right)
        if chance.random() < audit:  # of hits, and of refused candidates as well
            changed = True
            for known in (pool, scopes[entry % 5]):
                known.add(Seen(score, right))
            entries[entry].append(right)
    return hits, wrong, requests - after


def cases() -> Iterator[tuple[Truth, float]]:
    for truth in (_honest, _drifting, _seasons, _poisoned, _flat):
        for rate in (0.005, 0.01, 0.02, 0.05):
            yield truth, rate


@pytest.mark.parametrize(
    ("truth", "rate"), list(cases()), ids=lambda value: getattr(value, "__name__", str(value)).strip("_")
)
def test_simulated_traffic_keeps_the_promise(truth: Truth, rate: float) -> None:
    """From the first request on; after a change from when it had to be noticed on (two thirds of the time are left)."""
    after = {"_drifting": 20_000, "_flat": 30_000}.get(truth.__name__, 0)
    runs = [simulate(truth, rate, seed, audit=0.05, requests=45_000, after=after) for seed in (1, 2)]
    hits, wrong, requests = (sum(column) for column in zip(*runs, strict=True))
    print(f"{truth.__name__} {rate}: {hits / requests:.1%} hits, {wrong / max(hits, 1):.2%} wrong")
    # What noticing takes: one audited failure each time that little is served and hardly ever audited, and so many more
    # each time that it gets worse again.
    times = {"_drifting": 1, "_flat": 1, "_seasons": 2 * (risk.LATELY + 1)}.get(truth.__name__, 0)
    noticing = 2 * times / 0.05
    assert wrong <= rate * hits + 2.6 * math.sqrt(rate * hits) + 1 + noticing
