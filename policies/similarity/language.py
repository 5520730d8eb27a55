"""Is this a text that the guards and the verifier can read? Their word lists and their training are English.

What they do not know they would not find different, so it is refused, not guessed at: it can still be an exact hit.
"""

from __future__ import annotations

import re
import unicodedata
from functools import lru_cache

from policies.similarity.lexicon import is_word
from policies.similarity.text import EMPTY, REMEMBERED

_WORD = re.compile(r"[^\W\d_]+")
_QUOTED = re.compile(r"[\"“„«`][^\"“”„«»`]{0,500}[\"”“»`]|(?<!\w)'[^']{2,500}'(?!\w)")
_SMALL = """
de la le les un une des du el los las que es en y por con para como il lo della di che der das und ist ich ein eine
wie mit den het een van och att jag det er og ikke não uma os do em wer wo wann warum mot passe kto jest hai mera
tum kya chi
"""
_FOREIGN = frozenset(_SMALL.split()) - EMPTY
"""Small words of other languages; two names may be joined by one of them, a sentence has more."""
ENOUGH = 0.5
"""So many of a text's words must be English; names, code and typing errors are the rest."""


@lru_cache(maxsize=REMEMBERED)
def is_english(text: str) -> bool:
    """Whether most words are English, apart from what is quoted. A short word counts only if it is one of grammar:
    "la", "de" and "es" stand in English dictionaries, too."""
    written = _WORD.findall(_QUOTED.sub(" ", text)) or _WORD.findall(text)
    words = [word.lower() for word in written]
    if not words:
        return True  # a sum, say
    names = any(word in EMPTY for word in words)  # beside English grammar Los Angeles and DES are names
    small = sum(
        word in _FOREIGN and not (names and form[0].isupper()) for word, form in zip(words, written, strict=True)
    )
    accented = sum(not word.isascii() for word in words)
    if "¿" in text or "¡" in text or small >= 0.3 * len(words) or (small and small + accented >= 0.4 * len(words)):
        return False
    if any(not _is_latin(word) for word in words):
        foreign = sum(len(word) for word in words if not _is_latin(word))
        if foreign > 0.2 * sum(map(len, words)):
            return False
    known = sum((len(word) >= 4 or word in EMPTY) and (word in EMPTY or is_word(word)) for word in words)
    short = sum(len(word) < 4 and word not in EMPTY and is_word(word) for word in words)
    # Without a single longer English word ("c++ stl map") the short ones must do.
    return known + (0.5 if known else 1) * short >= ENOUGH * len(words)


def _is_latin(word: str) -> bool:
    return all(char.isascii() or unicodedata.name(char, "").startswith("LATIN") for char in word)
