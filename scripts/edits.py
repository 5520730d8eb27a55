"""Question pairs made by rule out of single questions: edits that change nothing, and edits that change the answer.

Paraphrase data knows that far rewordings mean the same; what it lacks is that one word makes another question. The
words are in `pairs/words.yaml`. A quarter of them, chosen by hash, is used for measuring only, never for training, so
that a measurement tells about words the model was not shown.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import yaml

WORDS = Path(__file__).parent / "pairs" / "words.yaml"
_CONTRACTED = [
    line.split(", ")
    for line in """what is, what's
who is, who's
where is, where's
how is, how's
that is, that's
it is, it's
do not, don't
does not, doesn't
did not, didn't
is not, isn't
are not, aren't
was not, wasn't
cannot, can't
can not, can't
could not, couldn't
should not, shouldn't
will not, won't
i am, i'm
i have, i've
i would, i'd
you are, you're
they are, they're
we are, we're""".splitlines()
]
_NUMERALS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen".split()
_ORDINALS = "first second third fourth fifth sixth seventh eighth ninth tenth".split()
_AUXILIARY = re.compile(
    r"\b(can|could|should|do|does|did|is|are|was|were|will|would|must) (i|you|we|it|they|he|she|my|the|a|an|this)\b"
)
_PLAIN_AUXILIARY = re.compile(r"\b(can|should|could|would|will|must|is|are|was|were) (?=[a-z])")
_DENIALS = (
    (r"\b(?<!or )not ", ""),
    (r"\bcan't\b", "can"),
    (r"\bwon't\b", "will"),
    (r"(?<=\w)n't\b", ""),
    (r"\bwithout\b", "with"),
    (r"\bnever ", "always "),
)
_POLITE = re.compile(r"\b(?:can|could|would|will) you\b")
_BOTH_WAYS = re.compile(r"\b(?:far|many|long|hours?|miles|kilometers|distance|away)\b", re.IGNORECASE)
_BETWEEN = re.compile(r"\bbetween ([\w.+#-]+) and ([\w.+#-]+)(\s*\??)$")
_PATH = re.compile(r"\b(from) ((?:[\w.+#-]+ ){1,2})(to|into) ((?:[\w.+#-]+ ?){1,2})(?=$|\?|,)")
_HOW_TO = re.compile(
    r"(how|where) (?:do|can) (?:i|we|you) (?!look\b|feel\b|sound\b|get\b|know\b|not\b)(\w.*?)[?. ]*$",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"(?<![\w.,])\d{1,4}(?![\w.,]\d|\d)")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions, whether one answer serves both, what kind of difference there is, and where they come from."""

    a: str
    b: str
    same: bool
    kind: str
    source: str


def read_pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a JSONL file; of conversations with one history, the last turns."""
    for line in path.read_text().splitlines():
        value = json.loads(line)
        a, b = value["a"], value["b"]
        if isinstance(a, list):
            if a[:-1] != b[:-1]:
                continue
            a, b = a[-1]["content"], b[-1]["content"]
        yield Pair(a, b, value["same"], value["kind"], path.stem)


class Editor:
    """Edits of questions with one share of the words."""

    def __init__(self, held_out: bool, chance: random.Random) -> None:
        """`held_out`: use the words that are kept for measuring, not the ones for training."""
        self._chance = chance
        words = yaml.safe_load(WORDS.read_text())

        def mine(text: str) -> bool:
            return (_hashed(text) < 64) == held_out

        def pairs(name: str) -> list[tuple[str, str]]:
            found = []
            for line in filter(mine, words[name]):
                one, other = line.split(", ")
                found += [(one, other), (other, one)]
            return found

        self._swaps = {name: pairs(name) for name in ("synonyms", "antonyms", "roles", "units", "quantifiers", "kinds")}
        self._scopes = [line for line in words["scopes"] if mine(line)]
        # Of the groups that are kept for measuring the first half is trained on, the other half is new.
        self._groups: dict[str, list[str]] = {}
        for name, line in words["entities"].items():
            group, kept = line.split(), _hashed(name) < 64
            if kept or not held_out:
                half = len(group) // 2
                self._groups[name] = group if not kept else group[half:] if held_out else group[:half]
        self._forms = [variants for name, variants in words["forms"].items() if (_hashed(name) < 96) == held_out]
        self._fronts = [line for line in words["fillers_front"] if mine(line)]
        self._backs = [line for line in words["fillers_back"] if mine(line)]
        self._confessions = [line for line in words["confessions"] if mine(line)]

    @cached_property
    def _index(self) -> dict[str, list[tuple[str, str]]]:
        """Word → (kind, other word)."""
        index = defaultdict(list)
        for kind, swaps in self._swaps.items():
            for one, other in swaps:
                index[one].append((kind, other))
        return index

    def harmless(self, text: str, most: int = 3) -> str:
        """The question with one to `most` edits that change nothing."""
        kinds: list[Callable[[str], str]] = [
            self._synonym, self._synonym, self._contract, self._front, self._back, self._typo, self._case,
            self._punctuation, self._numerals, self._exchange, self._articles, self._confess,
        ]  # fmt: skip
        made = text
        for edit in self._chance.sample(kinds, self._chance.randint(1, most)):
            made = edit(made)
        return made if made != text else self._front(text)

    def harmful(self, text: str) -> tuple[str, str] | None:
        """The question with one edit that asks for another answer, and its kind; None if none of them fits."""
        kinds: list[Callable[[str], tuple[str, str] | None]] = [
            self._swap, self._swap, self._swap, self._entity, self._entity, self._number, self._number, self._negate,
            self._direction, self._scope, self._kind,
        ]  # fmt: skip
        self._chance.shuffle(kinds)
        for edit in kinds:
            made = edit(text)
            if made is not None and made[0] != text:
                return made
        return None

    def form(self, text: str) -> Pair:
        """A question with a demand on its answer's form, against the same or another demand."""
        ours, theirs = self._chance.sample(self._forms, 2)
        bare = text.rstrip("?. ")
        plain = self._chance.random() < 0.3
        same = self._chance.random() < 0.5
        a = f"{bare}, {self._chance.choice(ours)}"
        other = self._chance.choice(ours if same else theirs)
        b = text if plain and not same else f"{self.harmless(bare, 1).rstrip('?. ')}, {other}"
        return Pair(a, b, same, "form" if same else "format", "")

    def pair(self, text: str) -> Pair | None:
        """A pair out of one question, as often one that shares an answer as one that does not."""
        if self._chance.random() < 0.06:
            return self.form(text)
        base = self.harmless(text, 1) if self._chance.random() < 0.3 else text
        harmful = self.harmful(text)
        if harmful is None or self._chance.random() < 0.5:
            return Pair(base, self.harmless(text), True, "harmless", "")
        made, kind = harmful
        if self._chance.random() < 0.4:
            made = self.harmless(made, 2)
        return Pair(base, made, False, kind, "") if made.lower() != base.lower() else None

    def _swap(self, text: str) -> tuple[str, str] | None:
        """Antonym, role, unit or quantifier."""
        found = [
            (word, kind, other)
            for word, kind, other in self._swappable(text)
            if kind not in ("synonyms", "kinds") and not re.search(rf"\bhow {re.escape(word)}\b", text.lower())
        ]  # how long and how short ask for one measure
        if not found:
            return None
        word, kind, other = self._chance.choice(found)
        return _replace(text, word, other), {"antonyms": "antonym"}.get(kind, kind.rstrip("s"))

    def _synonym(self, text: str) -> str:
        found = [(word, other) for word, kind, other in self._swappable(text) if kind == "synonyms"]
        if not found:
            return text
        word, other = self._chance.choice(found)
        return _replace(text, word, other)

    def _swappable(self, text: str) -> list[tuple[str, str, str]]:
        words = re.findall(r"[\w']+", text.lower())
        spans = {" ".join(words[at : at + size]) for size in (1, 2, 3) for at in range(len(words) - size + 1)}
        return [(span, kind, other) for span in sorted(spans) for kind, other in self._index.get(span, ())]

    def _entity(self, text: str) -> tuple[str, str] | None:
        words = set(re.findall(r"[\w']+", text.lower()))
        found = [(word, group) for group in self._groups.values() for word in group if word in words]
        if not found:
            return None
        word, group = self._chance.choice(found)
        others = [one for one in group if one not in words]
        return (_replace(text, word, self._chance.choice(others)), "entity") if others else None

    def _number(self, text: str) -> tuple[str, str] | None:
        numbers = list(_NUMBER.finditer(text))
        if numbers:
            match = self._chance.choice(numbers)
            value = int(match[0])
            near = 1700 <= value <= 2100
            changed = value + self._chance.choice((-1, 1, 2, -2, 10) if near else (1, 2, 5, 10, value, -value // 2))
            changed = abs(changed) if changed != value else value + 1
            return text[: match.start()] + str(changed) + text[match.end() :], "number"
        for names in (_NUMERALS[2:], _ORDINALS):
            there = [name for name in names if re.search(rf"\b{name}\b", text, re.IGNORECASE)]
            if there:
                word = self._chance.choice(there)
                return _replace(text, word, self._chance.choice([name for name in names if name != word])), "number"
        return None

    def _negate(self, text: str) -> tuple[str, str] | None:
        lower = text.lower()
        for there, gone in _DENIALS:
            if re.search(there, lower):
                return re.sub(there, gone, lower, count=1), "negation"
        if _POLITE.search(lower):
            return None
        match = _AUXILIARY.search(lower)
        if match is not None:
            # "Isn't it safe?" asks what "Is it safe?" does.
            short = match.start() > 0 and self._chance.random() < 0.5 and match[1] not in ("must", "will")
            verb = {"can": "can't"}.get(match[1], match[1] + "n't")
            made = f"{verb} {match[2]}" if short else f"{match[1]} {match[2]} not"
            if match[2] in ("my", "the", "a", "an", "this") and not short:
                made = f"{verb} {match[2]}"
            return lower[: match.start()] + made + lower[match.end() :], "negation"
        match = _PLAIN_AUXILIARY.search(lower)
        if match is not None:
            return lower[: match.start()] + f"{match[1]} not " + lower[match.end() :], "negation"
        return None

    def _direction(self, text: str) -> tuple[str, str] | None:
        match = _PATH.search(text)
        if match is None or _BOTH_WAYS.search(text):
            return None
        one, other = match[2].strip(), match[4].strip()
        made = f"{match[1]} {other} {match[3]} {one}"
        return text[: match.start()] + made + text[match.end() :], "direction"

    def _scope(self, text: str) -> tuple[str, str] | None:
        if self._chance.random() < 0.6:
            return None  # it fits every question, and would be most of what is made
        bare = text.rstrip("?. ")
        ending = "?" if text.rstrip().endswith("?") else ""
        return f"{bare} {self._chance.choice(self._scopes)}{ending}", "scope"

    def _kind(self, text: str) -> tuple[str, str] | None:
        lower = text.lower()
        found = [(one, other) for one, other in self._swaps["kinds"] if lower.startswith(one + " ")]
        if not found:
            return None
        one, other = self._chance.choice(found)
        return other + lower[len(one) :], "wh"

    def _contract(self, text: str) -> str:
        found = [(one, other) for both in _CONTRACTED for one, other in (both, both[::-1]) if one in text.lower()]
        if not found:
            return text
        one, other = self._chance.choice(found)
        return _replace(text, one, other)

    def _front(self, text: str) -> str:
        filler = self._chance.choice(self._fronts)
        return filler + text[0].lower() + text[1:] if text else text

    def _back(self, text: str) -> str:
        return text.rstrip("?. ") + self._chance.choice(self._backs)

    def _confess(self, text: str) -> str:
        """ "How do I …" → "I don't know how to …": who asks does not know."""
        match = _HOW_TO.match(text)
        return text if match is None else f"{self._chance.choice(self._confessions)} {match[1].lower()} to {match[2]}"

    def _typo(self, text: str) -> str:
        words = list(re.finditer(r"\b[a-z]{5,}\b", text))
        if not words:
            return text
        match = self._chance.choice(words)
        word, at = match[0], self._chance.randrange(1, len(match[0]) - 2)
        way = self._chance.randrange(3)
        made = (
            word[:at] + word[at + 1] + word[at] + word[at + 2 :],
            word[:at] + word[at + 1 :],
            word[:at] + word[at] + word[at:],
        )[way]
        return text[: match.start()] + made + text[match.end() :]

    def _case(self, text: str) -> str:
        return self._chance.choice((text.lower(), text.capitalize(), text[:1].upper() + text[1:], text.upper()))

    def _punctuation(self, text: str) -> str:
        bare = text.rstrip("?.! ")
        return self._chance.choice((bare, bare + "?", bare + "??", bare + " ?", bare.replace(",", "").replace("'", "")))

    def _numerals(self, text: str) -> str:
        def digits(match: re.Match[str]) -> str:
            value = int(match[0])
            return _NUMERALS[value] if value < len(_NUMERALS) else match[0]

        if _NUMBER.search(text):
            return _NUMBER.sub(digits, text, count=1)
        for value, name in enumerate(_NUMERALS[2:], start=2):
            if re.search(rf"\b{name}\b", text):
                return re.sub(rf"\b{name}\b", str(value), text, count=1)
        return text

    def _exchange(self, text: str) -> str:
        """A and B → B and A."""
        match = _BETWEEN.search(text)
        return text if match is None else f"{text[: match.start()]}between {match[2]} and {match[1]}{match[3]}"

    def _articles(self, text: str) -> str:
        """As people type into a search box."""
        made = re.sub(r"^(what|who|where) (is|are|was|were) (the )?", "", text, flags=re.IGNORECASE)
        if made != text and self._chance.random() < 0.5 and not re.match(r"(?:who|where)\b", text, re.IGNORECASE):
            return made
        return re.sub(r"\bthe ", "", text, count=1)


def _hashed(text: str) -> int:
    return hashlib.blake2b(text.encode(), digest_size=1).digest()[0]


def _half(text: str) -> bool:
    return _hashed(text) < 128


def _replace(text: str, word: str, other: str) -> str:
    """The first occurrence, with its capital letter."""

    def put(match: re.Match[str]) -> str:
        return other[:1].upper() + other[1:] if match[0][:1].isupper() else other

    return re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", put, text, count=1, flags=re.IGNORECASE)


def bases(data: Path, held_out: bool) -> list[tuple[str, str]]:
    """(question, source) of the licensed sets; their test parts if `held_out`, else their training parts."""
    found = []
    part = ["NQ-open.efficientqa.test.1.1"] if held_out else ["NQ-open.dev", "NQ-open.efficientqa.dev.1.1"]
    for name in part:
        for line in (data / "nq_open" / f"{name}.jsonl").read_text().splitlines():
            found.append((json.loads(line)["question"], "nq_open"))
    rows = (data / "query_wellformedness" / f"{'test' if held_out else 'train'}.tsv").read_text().splitlines()
    for text, score in (line.split("\t") for line in rows):
        if float(score) >= 0.6:
            found.append((text.replace(" ?", "?"), "query_wellformedness"))
    with (data / "banking77" / f"{'test' if held_out else 'train'}.csv").open() as file:
        found += [(row["text"].strip(), "banking77") for row in csv.DictReader(file)]
    intents = json.loads((data / "clinc150" / "data_full.json").read_text())["test" if held_out else "train"]
    found += [(text, "clinc150") for text, _ in intents]
    return [(text, source) for text, source in found if 3 <= len(text.split()) <= 30]


Part = Literal["train", "calibrate", "measure"]
"""Calibration and measuring share the words that are kept for them, but no question."""


def generated(data: Path, count: int, part: Part, seed: int) -> list[Pair]:
    """About `count` pairs made from `bases`, and slot edits of hwu64 and nlupp beside them."""
    chance = random.Random(seed)
    held_out = part != "train"
    editor = Editor(held_out, chance)
    questions = [base for base in bases(data, held_out) if part == "train" or _half(base[0]) == (part == "measure")]
    chance.shuffle(questions)
    if held_out:
        known = {text.lower() for text, _ in bases(data, False)}
        questions = [(text, source) for text, source in questions if text.lower() not in known]
    pairs = []
    for text, source in questions[:count]:
        made = editor.pair(text)
        if made is not None:
            pairs.append(Pair(made.a, made.b, made.same, made.kind, source))
    slots = slot_edits(data, editor, chance, count // 5, held_out)
    return pairs + [pair for pair in slots if part == "train" or _half(pair.a) == (part == "measure")]


_SLOT = re.compile(r"\[([\w ]+) : ([^\]]+)\]")


def slot_edits(data: Path, editor: Editor, chance: random.Random, count: int, held_out: bool) -> list[Pair]:
    """hwu64 and nlupp: the same sentence with another value in one slot (different), or harmlessly edited (same)."""
    sentences: list[tuple[str, str, str, str]] = []  # source, sentence with {}, slot, value
    folder = data / "hwu64" / ("testset" if held_out else "trainset")
    for path in sorted(folder.rglob("*.csv")):
        for line in path.read_text().splitlines()[1:]:
            marked = line.split('"')[1] if '"' in line else line.split(";")[3]
            for slot in _SLOT.finditer(marked):
                rest = _SLOT.sub(r"\2", marked[: slot.start()]) + "{}" + _SLOT.sub(r"\2", marked[slot.end() :])
                sentences.append(("hwu64", rest, slot[1], slot[2]))
    for path in sorted((data / "nlupp").glob("*/fold*.json")):
        if (path.stem in ("fold0", "fold1")) != held_out:
            continue
        for item in json.loads(path.read_text()):
            for name, slot in (item.get("slots") or {}).items():
                text, value = item["text"], slot.get("text", "")
                if value and text.count(value) == 1:
                    sentences.append(("nlupp", text.replace(value, "{}"), name, value))
    values = defaultdict(set)
    for source, _, name, value in sentences:
        values[source, name].add(value)
    pairs = []
    for source, sentence, name, value in chance.sample(sentences, min(count, len(sentences))):
        others = sorted(other for other in values[source, name] if not _alike(other.lower(), value.lower()))
        if not others or "{}" not in sentence or len(sentence) <= 10:
            continue
        text = sentence.replace("{}", value)
        if chance.random() < 0.5:
            other = sentence.replace("{}", chance.choice(others))
            other = editor.harmless(other, 2) if chance.random() < 0.4 else other
            pairs.append(Pair(text, other, False, "slot", source))
        else:
            pairs.append(Pair(text, editor.harmless(text), True, "harmless", source))
    return pairs


def _alike(value: str, other: str) -> bool:
    """Whether two values may be one: "train" and "trains", "friday" and "this friday"."""
    return value in other or other in value


def split(pairs: Sequence[Pair], domains: Sequence[str]) -> tuple[list[Pair], list[Pair]]:
    """The pairs of these sources, and the others."""
    inside = [pair for pair in pairs if pair.source in domains]
    return inside, [pair for pair in pairs if pair.source not in domains]
