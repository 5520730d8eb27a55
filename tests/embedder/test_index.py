"""The scoped index against a naive dictionary, whole partitions and scanned ones alike."""

from __future__ import annotations

import random

import numpy as np
import pytest

from embedder.index import ScopedIndex, pack

DIMENSIONS = 64


def unit(seed: int) -> np.ndarray:
    vector = np.random.default_rng(seed).normal(size=DIMENSIONS).astype(np.float32)
    return vector / np.linalg.norm(vector)


def packed(*seeds: int) -> list[bytes]:
    return pack(np.stack([unit(seed) for seed in seeds]))


@pytest.mark.parametrize("small", [500, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_adds_removes_and_replacements_match_brute_force(seed: int, small: int) -> None:
    chance = random.Random(seed)
    index, model = ScopedIndex(DIMENSIONS, small), {}
    for number in range(300):
        key, scope = chance.randrange(40), chance.choice("abc")
        if chance.random() < 0.6:
            index.add(scope, [key], packed(number))
            model[key] = (scope, unit(number))
        else:
            index.remove(key)
            model.pop(key, None)
        assert len(index) == len(model)
        query, asked = unit(10_000 + number), chance.choice("abcd")
        found = index.search(asked, query, 5)
        exact = sorted((float(v @ query) for s, v in model.values() if s == asked), reverse=True)[:5]
        assert np.allclose([score for _, score in found], exact, atol=0.01)
        assert all(abs(score - float(model[key][1] @ query)) < 0.01 for key, score in found)
        assert (asked in index) == any(scope == asked for scope, _ in model.values())


def test_a_vector_is_nearest_to_itself_among_many() -> None:
    index = ScopedIndex(DIMENSIONS)
    index.add("s", list(range(5000)), pack(np.stack([unit(seed) for seed in range(5000)])))
    for seed in range(0, 5000, 250):
        (key, cosine), *_ = index.search("s", unit(seed), 1)
        assert key == seed and cosine > 0.999
    for seed in range(4990):
        index.remove(seed)
    assert sorted(key for key, _ in index.search("s", unit(4995), 20)) == list(range(4990, 5000))


def test_another_scope_is_never_searched() -> None:
    index = ScopedIndex(DIMENSIONS)
    index.add("mine", ["far"], packed(1))
    index.add("theirs", ["same"], packed(2))
    assert [key for key, _ in index.search("mine", unit(2), 5)] == ["far"]


def test_an_emptied_scope_costs_nothing_and_can_be_filled_again() -> None:
    index = ScopedIndex(DIMENSIONS)
    for _ in range(3):
        index.add("s", ["a", "b"], packed(1, 2))
        index.remove("a")
        index.remove("b")
        assert "s" not in index and index.search("s", unit(1), 1) == []


def test_what_has_no_direction_is_near_to_nothing() -> None:
    index = ScopedIndex(DIMENSIONS)
    index.add("s", ["zero"], pack(np.zeros((1, DIMENSIONS), np.float32)))
    index.add("s", ["broken"], [b"\x7f" * DIMENSIONS + np.float32(np.inf).tobytes()])
    assert all(cosine <= 0 for _, cosine in index.search("s", unit(1), 5))
    index.add("s", ["good"], packed(1))
    assert index.search("s", unit(1), 5)[0][0] == "good"
    assert all(cosine <= 0 for _, cosine in index.search("s", unit(1) * np.float32(np.nan), 5))


def test_a_vector_of_another_size_is_refused() -> None:
    index = ScopedIndex(DIMENSIONS)
    with pytest.raises(ValueError, match="64 dimensions has 68 bytes"):
        index.add("s", ["a"], [b"\0" * 100])
    assert len(index) == 0


def test_the_same_vector_packs_to_the_same_bytes_and_has_cosine_one_with_itself() -> None:
    assert packed(7) == packed(7)
    index = ScopedIndex(DIMENSIONS)
    index.add("s", ["a"], packed(7))
    assert index.search("s", unit(7), 1)[0][1] == pytest.approx(1.0, abs=1e-3)
