"""The scoped index against a naive dictionary."""

from __future__ import annotations

import random

import numpy as np
import pytest

from embedder.index import ScopedIndex

DIMENSIONS = 8


def unit(seed: int) -> np.ndarray:
    vector = np.random.default_rng(seed).normal(size=DIMENSIONS).astype(np.float32)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("seed", range(8))
def test_random_adds_removes_and_replacements_match_brute_force(seed: int) -> None:
    chance = random.Random(seed)
    index, model = ScopedIndex(DIMENSIONS), {}
    for number in range(300):
        key, scope = chance.randrange(40), chance.choice("abc")
        if chance.random() < 0.6:
            index.add(scope, [key], unit(number)[None])
            model[key] = (scope, unit(number))
        else:
            index.remove(key)
            model.pop(key, None)
        assert len(index) == len(model)
        query, asked = unit(10_000 + number), chance.choice("abcd")
        found = index.search(asked, query, 5)
        exact = sorted(((float(v @ query), k) for k, (s, v) in model.items() if s == asked), reverse=True)[:5]
        assert [key for key, _ in found] == [key for _, key in exact]
        assert np.allclose([score for _, score in found], [score for score, _ in exact], atol=1e-5)
        assert (asked in index) == any(scope == asked for scope, _ in model.values())


def test_another_scope_is_never_searched() -> None:
    index = ScopedIndex(DIMENSIONS)
    index.add("mine", ["far"], unit(1)[None])
    index.add("theirs", ["same"], unit(2)[None])
    assert [key for key, _ in index.search("mine", unit(2), 5)] == ["far"]


def test_an_emptied_scope_costs_nothing_and_can_be_filled_again() -> None:
    index = ScopedIndex(DIMENSIONS)
    for _ in range(3):
        index.add("s", ["a", "b"], np.stack([unit(1), unit(2)]))
        index.remove("a")
        index.remove("b")
        assert "s" not in index and index.search("s", unit(1), 1) == []
