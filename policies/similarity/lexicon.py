"""English words: which exist, and their stems. The word list is pyspellchecker's, the stems are Snowball's."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any


@cache
def _words() -> Any:
    from spellchecker import SpellChecker

    return SpellChecker().word_frequency.dictionary


@cache
def _stemmer() -> Any:
    import snowballstemmer

    return snowballstemmer.stemmer("english")


@lru_cache(maxsize=16384)
def is_word(word: str) -> bool:
    """Whether an English dictionary has this word (in lower case)."""
    return bool(_words().get(word, 0))


@lru_cache(maxsize=16384)
def stem(word: str) -> str:
    """The stem of a word in lower case: what stays the same when it is inflected."""
    return str(_stemmer().stemWord(word))


def misspelt(a: str, b: str) -> bool:
    """Whether one of two words is the other one mistyped: it is no word itself, and hardly differs.

    Two words that exist are two words, however close ("import", "export"); so are two that nobody knows.
    """
    if a == b:
        return True
    short = min(len(a), len(b))
    if short < 4 or is_word(a) == is_word(b):
        return short >= 5 and not is_word(a) and not is_word(b) and _squeezed(a) == _squeezed(b)
    longer, shorter = (a, b) if len(a) > len(b) else (b, a)
    if longer.endswith(shorter) or (longer.startswith(shorter) and len(longer) > len(shorter) + 1):
        return False  # Kubuntu is not Ubuntu
    return _distance(a, b) <= (1 if short < 7 else 2)


def _squeezed(word: str) -> str:
    """Without doubled letters."""
    return "".join(char for index, char in enumerate(word) if index == 0 or char != word[index - 1])


def _distance(a: str, b: str) -> int:
    """Letters added, left out, replaced, or swapped with their neighbour (Damerau 1964, optimal string alignment)."""
    if abs(len(a) - len(b)) > 2:
        return 3
    rows = [list(range(len(b) + 1))]
    for i, left in enumerate(a, start=1):
        row = [i]
        for j, right in enumerate(b, start=1):
            cost = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (left != right))
            if i > 1 and j > 1 and left == b[j - 2] and a[i - 2] == right:
                cost = min(cost, rows[-2][j - 2] + 1)
            row.append(cost)
        rows.append(row)
    return rows[-1][-1]
