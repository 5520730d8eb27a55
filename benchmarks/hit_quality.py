"""How often the semantic tier serves what it should, and what it should not: `python -m benchmarks.hit_quality DATA`.

DATA is a folder as docs/hit-quality.md describes it. Pairs are judged by the functions that decide in the gateway
(cosine of the default encoder, then the guards), the stream by a whole answer cache. `--held-out` looks at the domains
that no guard was written for: once, at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from backends.dialects.openai_chat import answer_from_json, view
from benchmarks.table import table
from embedder.batcher import Batcher
from embedder.build import build
from embedder.config import EmbedderConfig
from gateway.cache.answers import Answers
from gateway.cache.key import Scope, key_digest
from gateway.cache.question import Question
from gateway.cache.semantic import Semantic
from gateway.metrics import Metrics
from gateway.stores.sqlite import SQLiteAnswers
from policies import similarity
from policies.cacheability import CacheRules
from policies.controls import Controls
from policies.similarity.text import read

THRESHOLDS = (0.80, 0.85, 0.90, 0.95)


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions, whether one answer serves both, and where they come from."""

    a: str
    b: str
    same: bool
    kind: str
    domain: str


class Encoded:
    """Vectors of texts, each made once."""

    def __init__(self) -> None:
        self._encoder = build(EmbedderConfig())
        self._vectors: dict[str, Any] = {}

    def learn(self, texts: Iterable[str]) -> None:
        new = sorted({text for text in texts if text not in self._vectors}, key=len)
        for start in range(0, len(new), 32):
            some = new[start : start + 32]
            self._vectors.update(zip(some, self._encoder.encode(some), strict=True))

    def cosine(self, pair: Pair) -> float:
        return float(numpy.dot(self._vectors[pair.a], self._vectors[pair.b]))


def handwritten(data: Path) -> list[Pair]:
    """The English question pairs that were written for this project."""
    pairs = []
    for path in sorted((data / "handwritten").glob("*.jsonl")):
        if path.stem.startswith(("conversations", "chinese")):
            continue
        for line in path.read_text().splitlines():
            value = json.loads(line)
            pairs.append(Pair(value["a"], value["b"], value["same"], value["kind"], path.stem))
    return pairs


_SLOT = re.compile(r"\[([\w ]+) : ([^\]]+)\]")


def slot_edits(data: Path, chance: random.Random, count: int) -> list[Pair]:
    """hwu64 and nlupp: the same sentence with another value in one slot (different), or asked politely (same)."""
    sentences: list[tuple[str, str, str, str]] = []  # source, sentence with {}, slot, value
    for path in sorted((data / "hwu64" / "trainset").glob("*.csv")):
        for line in path.read_text().splitlines()[1:]:
            marked = line.split('"')[1] if '"' in line else line.split(";")[3]
            for slot in _SLOT.finditer(marked):
                rest = _SLOT.sub(r"\2", marked[: slot.start()]) + "{}" + _SLOT.sub(r"\2", marked[slot.end() :])
                sentences.append(("hwu64", rest, slot[1], slot[2]))
    for path in sorted((data / "nlupp").glob("*/fold*.json")):
        for item in json.loads(path.read_text()):
            for name, slot in (item.get("slots") or {}).items():
                text, value = item["text"], slot.get("text", "")
                if value and text.count(value) == 1:
                    sentences.append((f"nlupp {path.parent.name}", text.replace(value, "{}"), name, value))
    values = defaultdict(set)
    for source, _, slot, value in sentences:
        values[source, slot].add(value)
    pairs = []
    for source, sentence, slot, value in chance.sample(sentences, min(count, len(sentences))):
        others = sorted(other for other in values[source, slot] if other.lower() != value.lower())
        if others and "{}" in sentence and len(sentence) > 10:
            text = sentence.replace("{}", value)
            pairs.append(Pair(text, sentence.replace("{}", chance.choice(others)), False, f"slot ({source})", source))
            pairs.append(Pair(text, _harmless(text, chance), True, f"harmless ({source})", source))
    return pairs


_AUXILIARY = re.compile(r"\b(can|could|should|do|does|did|is|are|will|would) (i|you|we|it|they|my|the)\b")
_DAYS = "monday tuesday wednesday thursday friday saturday sunday".split()


def rule_edits(data: Path, chance: random.Random, count: int) -> list[Pair]:
    """clinc150: a negation put in, a number or a day changed (different); case, politeness, a typo (same)."""
    texts = [text for text, _ in json.loads((data / "clinc150" / "data_full.json").read_text())["train"]]
    pairs = []
    for text in chance.sample(texts, len(texts)):
        changed = ""
        if number := re.search(r"\b\d+\b", text):
            kind, changed = "number", text[: number.start()] + str(int(number[0]) + 1) + text[number.end() :]
        elif day := next((day for day in _DAYS if day in text), ""):
            kind, changed = "day", text.replace(day, _DAYS[(_DAYS.index(day) + 1) % 7])
        elif (match := _AUXILIARY.search(text)) and chance.random() < 0.3:
            kind, changed = "negation", text[: match.end()] + " not" + text[match.end() :]
        if changed:
            pairs.append(Pair(text, changed, False, f"{kind} (clinc150)", "clinc150"))
            pairs.append(Pair(text, _harmless(text, chance), True, "harmless (clinc150)", "clinc150"))
        if len(pairs) >= 2 * count:
            break
    return pairs


def _harmless(text: str, chance: random.Random) -> str:
    """The same in another dress: capitals, a greeting, a question mark, two letters swapped in a long word."""
    dressed = text[0].upper() + text[1:] + "?" if chance.random() < 0.5 else text
    dressed = chance.choice(["{}", "please {}", "hi, {}", "{} please", "could you tell me: {}"]).format(dressed)
    longer = list(re.finditer(r"[a-z]{7,}", dressed))
    if longer and chance.random() < 0.5:
        at = chance.choice(longer).start() + 3
        dressed = dressed[:at] + dressed[at + 1] + dressed[at] + dressed[at + 2 :]
    return dressed


def qqp(data: Path, chance: random.Random, count: int) -> list[Pair]:
    """Quora's pairs, with their noisy labels: measured only."""
    rows = json.loads((data / "qqp" / "similiar_qqp_full.json").read_text())
    return [
        Pair(row["text_a"], row["text_b"], row["label"] == 1, "duplicate" if row["label"] else "not a duplicate", "qqp")
        for row in chance.sample(rows, count)
    ]


Judge = Callable[[Pair, float], bool]


def judges(encoded: Encoded) -> dict[str, Judge]:
    """Ways to decide, by name."""
    decided: dict[Pair, str] = {}

    def vetoed(pair: Pair) -> bool:
        if pair not in decided:
            decided[pair] = similarity.veto(pair.b, pair.a)
        return bool(decided[pair])

    return {
        "cosine": lambda pair, threshold: encoded.cosine(pair) >= threshold,
        "guards": lambda pair, threshold: encoded.cosine(pair) >= threshold and not vetoed(pair),
    }


def share(pairs: Sequence[Pair], served: Callable[[Pair], bool]) -> str:
    count = sum(map(served, pairs))
    return f"{count / len(pairs):.1%}" if pairs else "-"


def by_threshold(pairs: list[Pair], encoded: Encoded) -> str:
    """Served of what should be and of what should not, at several thresholds."""
    same, traps = [pair for pair in pairs if pair.same], [pair for pair in pairs if not pair.same]
    rows = []
    for threshold in THRESHOLDS:
        row = [f"{threshold:.2f}"]
        for judge in judges(encoded).values():
            row += [share(group, lambda pair, j=judge, t=threshold: j(pair, t)) for group in (same, traps)]
        rows.append(row)
    head = ["cosine ≥", f"cosine alone: of {len(same)} same", f"of {len(traps)} traps", "with guards: same", "traps"]
    return table(head, rows)


def by_kind(pairs: list[Pair], encoded: Encoded, threshold: float) -> str:
    kinds = defaultdict(list)
    for pair in pairs:
        kinds[not pair.same, pair.kind].append(pair)
    rows = [
        ["trap" if trap else "same", kind, str(len(group))]
        + [share(group, lambda pair, j=judge: j(pair, threshold)) for judge in judges(encoded).values()]
        for (trap, kind), group in sorted(kinds.items())
    ]
    return table(["", "kind", "pairs", f"cosine ≥ {threshold}", "with guards"], rows)


def by_guard(pairs: list[Pair], encoded: Encoded, threshold: float) -> str:
    """What each guard alone keeps from being served, and what only it does."""
    near = [pair for pair in pairs if encoded.cosine(pair) >= threshold]
    alone: Counter[tuple[str, bool]] = Counter()
    only: Counter[tuple[str, bool]] = Counter()
    for pair in near:
        ours, theirs = read(pair.b), read(pair.a)
        said = [name for name, differs in similarity.GUARDS if differs(ours, theirs)]
        alone.update((name, pair.same) for name in said)
        if len(said) == 1:
            only[said[0], pair.same] += 1
    rows = [
        [name, *(str(counter[name, same]) for counter in (alone, only) for same in (False, True))]
        for name, _ in similarity.GUARDS
    ]
    return table(["guard", "traps stopped", "right hits lost", "traps only it stops", "right hits only it loses"], rows)


async def stream(data: Path, chance: random.Random, count: int, guarded: bool, threshold: float) -> list[str]:
    """A Zipf stream of Quora questions by cluster of duplicates, every third request one that nobody asks again."""
    clusters = _clusters(data)
    distractors = [
        line.split("\t")[0] for line in (data / "query_wellformedness" / "train.tsv").read_text().splitlines()
    ]
    chance.shuffle(distractors)
    weights = [1 / (rank + 1) for rank in range(len(clusters))]
    wanted = chance.choices(range(len(clusters)), weights, k=count)
    rules = CacheRules(threshold=threshold, volatile={})
    owners: dict[bytes, int] = {}
    asked = exact = hits = wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        semantic = Semantic(Batcher(build(EmbedderConfig())))
        answers = Answers(SQLiteAnswers(Path(folder) / "a.sqlite"), 1 << 32, 60.0, Metrics(), semantic)
        await answers.open()
        for number, cluster in enumerate(wanted):
            owner = -number - 1 if number % 3 == 2 else cluster
            text = distractors[number % len(distractors)] if owner < 0 else chance.choice(clusters[cluster])
            question = _question(text, rules)
            lookup = await answers.lookup(question)
            asked += 1
            if lookup.entry is None:
                owners[question.key] = owner
                answers.remember(question, lookup, "b", 200, _ANSWER)
            elif lookup.tier == "semantic":
                hits += 1
                wrong += owners[lookup.entry.key] != owner
            else:
                exact += 1
        await answers.close()
    low, high = wilson(wrong, hits)
    name = "guards" if guarded else "cosine alone"
    return [name, f"{threshold:.2f}", f"{exact / asked:.1%}", f"{hits / asked:.1%}", f"{wrong / max(hits, 1):.1%}",
            f"{low:.1%} to {high:.1%} (n = {hits})"]  # fmt: skip


_ANSWER = answer_from_json(
    b'{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}'
)


def _question(text: str, rules: CacheRules) -> Question:
    seen = view({"model": "m", "messages": [{"role": "user", "content": text}]})
    scope = Scope(seen, "t", (), {}, "", "").digest()
    return Question(key_digest(scope, text), scope, "t", seen, Controls(), rules)


def _clusters(data: Path) -> list[list[str]]:
    """Questions that Quora's labels join, the largest clusters first."""
    parent: dict[str, str] = {}

    def root(text: str) -> str:
        while parent.setdefault(text, text) != text:
            parent[text] = parent[parent[text]]
            text = parent[text]
        return text

    for row in json.loads((data / "qqp" / "similiar_qqp_full.json").read_text()):
        if row["label"] == 1:
            parent[root(row["text_a"])] = root(row["text_b"])
    groups = defaultdict(list)
    for text in parent:
        groups[root(text)].append(text)
    return sorted((group for group in groups.values() if len(group) > 2), key=len, reverse=True)


def wilson(count: int, total: int, z: float = 1.96) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson 1927)."""
    if not total:
        return 0.0, 1.0
    p, spread = count / total, z * z / total
    middle, half = p + spread / 2, z * ((p * (1 - p) + spread / 4) / total) ** 0.5
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def _sections(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    chance, data, encoded = random.Random(arguments.seed), arguments.data, Encoded()
    pairs = handwritten(data)
    domains = sorted({pair.domain for pair in pairs})
    chosen = domains[1::2] if arguments.held_out else domains[0::2]
    pairs = [pair for pair in pairs if pair.domain in chosen]
    encoded.learn(text for pair in pairs for text in (pair.a, pair.b))
    yield f"Handwritten pairs, {'held-out ' if arguments.held_out else ''}domains: {', '.join(chosen)}", ""
    yield "By threshold", by_threshold(pairs, encoded)
    yield "By kind at 0.85", by_kind(pairs, encoded, 0.85)
    yield "By guard, among pairs with a cosine of 0.80 and more", by_guard(pairs, encoded, 0.80)
    if arguments.held_out:
        return
    started = time.perf_counter()
    for pair in pairs:
        similarity.veto(pair.a, pair.b)
    yield f"Guards, both texts read before: {(time.perf_counter() - started) / len(pairs) * 1e6:.0f} µs a pair", ""
    for title, made in (
        ("Generated: another slot value (hwu64, nlupp)", slot_edits(data, chance, arguments.count)),
        ("Generated: negation, number, day (clinc150)", rule_edits(data, chance, arguments.count)),
        ("Quora (noisy labels, measured only)", qqp(data, chance, arguments.count)),
    ):
        encoded.learn(text for pair in made for text in (pair.a, pair.b))
        yield title, by_threshold(made, encoded) + "\n\n" + by_kind(made, encoded, 0.85)
    guards = similarity.GUARDS
    rows = []
    for guarded in (False, True):
        similarity.GUARDS = guards if guarded else ()  # the very cache, with nothing but the cosine
        for threshold in (0.80, 0.85, 0.90):
            run = stream(data, random.Random(arguments.seed), arguments.stream, guarded, threshold)
            rows.append(asyncio.run(run))
    head = ["", "cosine ≥", "exact hits", "semantic hits", "wrong per semantic hit", "95 % interval"]
    yield f"A Zipf stream of {arguments.stream:,} requests, a third of them asked once", table(head, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("data", type=Path)
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--count", type=int, default=4000, help="generated pairs of each kind")
    parser.add_argument("--stream", type=int, default=15_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for title, text in _sections(arguments):
        print(f"### {title}\n\n{text}\n", flush=True)


if __name__ == "__main__":
    main()
