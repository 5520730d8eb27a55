"""How often the semantic tier serves what it should, and what it should not: `python -m benchmarks.hit_quality DATA`.

DATA is a folder as docs/hit-quality.md describes it. Measured is on what nobody tuned to: hand-written pairs of domains
that the verifier never saw, edits of questions and with words that are kept for measuring, and Quora's pairs.
Pairs go through `gateway.cache.judge`, the stream through a whole answer cache, audits included. `--gptcache PYTHON`:
the interpreter of an environment with gptcache, for its defaults on the same pairs (benchmarks/gptcache_peer.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import orjson

from backends.dialects.openai_chat import answer_from_json, view
from backends.protocol import Answer
from benchmarks.table import table
from embedder.config import EmbedderConfig
from gateway.cache import judge as judging
from gateway.cache.answers import Answers
from gateway.cache.key import Scope, key_digest
from gateway.cache.lookup import Lookup
from gateway.cache.question import Question
from gateway.cache.semantic import load
from gateway.metrics import Metrics
from gateway.stores.sqlite import SQLiteAnswers
from policies import similarity
from policies.cacheability import CacheRules
from policies.controls import Controls
from policies.risk import interval
from scripts.edits import Editor, Pair, bases, generated
from scripts.train_verifier import HELD_OUT, parts

RATES = (0.005, 0.01, 0.02, 0.05)
SYSTEMS: dict[str, tuple[str, float | None]] = {
    "cosine ≥ 0.85": ("none", 0.85),
    "with guards": ("none", 0.85),
    "guards and verifier": ("shipped", None),
}
"""Name → the verifier, and the cosine that is asked for."""


def served(pairs: Sequence[Pair], system: str, rate: float) -> list[judging.Verdict]:
    """What a cache does with each pair."""
    verifier, threshold = SYSTEMS[system]
    rules = CacheRules(threshold=threshold, max_wrong_rate=rate, volatile={})
    asked = [judging.Pair(pair.a, pair.b, pair.same, pair.kind) for pair in pairs]

    async def run() -> list[judging.Verdict]:
        config = EmbedderConfig(verifier=verifier)
        return [verdict async for verdict in judging.judge(asked, lambda: load(config, threshold), rules)]

    guards = similarity.GUARDS
    similarity.GUARDS = guards if system != "cosine ≥ 0.85" else ()  # the very cache, with nothing but the cosine
    try:
        return asyncio.run(run())
    finally:
        similarity.GUARDS = guards


def by_gptcache(pairs: Sequence[Pair], python: str) -> list[bool]:
    """What GPTCache with its defaults serves."""
    script = Path(__file__).with_name("gptcache_peer.py")
    lines = "\n".join(json.dumps({"a": pair.a, "b": pair.b}) for pair in pairs)
    done = subprocess.run([python, str(script)], input=lines, capture_output=True, text=True, check=True)
    return [line == "1" for line in done.stdout.split()]


def share(count: int, total: int) -> str:
    low, high = interval(count, total)
    return f"{count / total:.1%} ({low:.1%}–{high:.1%})" if total else "-"


def compared(pairs: Sequence[Pair], rate: float, gptcache: str | None) -> str:
    """Each system's share of what should be served and of what should not, by kind."""
    hits = {system: [verdict.served for verdict in served(pairs, system, rate)] for system in SYSTEMS}
    if gptcache:
        hits["GPTCache"] = by_gptcache(pairs, gptcache)
    groups = defaultdict(list)
    for number, pair in enumerate(pairs):
        for kind in (pair.kind, "all"):
            groups[not pair.same, kind == "all", kind].append(number)
    rows = [
        ["trap" if trap else "same", kind, str(len(numbers))]
        + [share(sum(found[number] for number in numbers), len(numbers)) for found in hits.values()]
        for (trap, _, kind), numbers in sorted(groups.items())
    ]
    return table(["", "kind", "pairs", *hits], rows)


def by_rate(pairs: Sequence[Pair]) -> str:
    """Guards and verifier at each `max_wrong_rate`, before any live evidence."""
    rows = []
    for rate in RATES:
        verdicts = served(pairs, "guards and verifier", rate)
        same = [verdict.served for verdict in verdicts if verdict.pair.same]
        traps = [verdict.served for verdict in verdicts if not verdict.pair.same]
        wrong = sum(traps)
        rows.append(
            [f"{rate:.1%}", share(sum(same), len(same)), share(wrong, len(traps)), share(wrong, wrong + sum(same))]
        )
    return table(["max_wrong_rate", "of same", "of traps", "wrong per hit, where half are traps"], rows)


def qqp(data: Path, chance: random.Random, count: int) -> list[Pair]:
    """Quora's pairs, with their noisy labels: measured only."""
    rows = json.loads((data / "qqp" / "similiar_qqp_full.json").read_text())
    return [
        Pair(row["text_a"], row["text_b"], row["label"] == 1, "duplicate" if row["label"] else "not a duplicate", "qqp")
        for row in chance.sample(rows, count)
    ]


def families(pairs: Sequence[Pair]) -> list[list[str]]:
    """The questions that share an answer, of pairs that say which do."""
    parent: dict[str, str] = {}

    def root(text: str) -> str:
        while parent.setdefault(text, text) != text:
            parent[text] = parent[parent[text]]
            text = parent[text]
        return text

    for pair in pairs:
        a, b = root(pair.a), root(pair.b)
        if pair.same:
            parent[a] = b
    groups = defaultdict(list)
    for text in parent:
        groups[root(text)].append(text)
    return list(groups.values())


async def stream(data: Path, pairs: Sequence[Pair], count: int, rate: float, audit: float, seed: int) -> list[str]:
    """Traffic: families of held-out pairs by Zipf's law, each asked in its wordings and in harmless edits of them,
    their traps among them; every third request is a question of its own. What is wrong is known, audits find it."""
    chance = random.Random(seed)
    editor = Editor(True, chance)
    # Not of banking77 and clinc150, where many different people ask the same.
    asked = [text for text, source in bases(data, True) if source in ("nq_open", "query_wellformedness")]
    groups, alone = families(pairs), chance.sample(asked, len(asked))
    chance.shuffle(groups)
    weights = [1 / (rank + 1) for rank in range(len(groups))]
    rules = CacheRules(max_wrong_rate=rate, audit=audit, volatile={})
    owners: dict[bytes, int] = {}
    exact = hits = wrong = unknown = audits = 0
    with tempfile.TemporaryDirectory() as folder:
        store = SQLiteAnswers(Path(folder) / "a.sqlite")
        answers = Answers(store, 1 << 32, 60.0, Metrics(), load(EmbedderConfig(), None))
        await answers.open()
        for number in range(count):
            if number % 3 == 2:
                owner, text = -number, alone[number // 3 % len(alone)]
            else:
                owner = chance.choices(range(len(groups)), weights)[0]
                text = chance.choice(groups[owner])
                text = editor.harmless(text, 2) if chance.random() < 0.5 else text
            question = _question(text, rules)
            lookup = await answers.lookup(question)
            if lookup.entry is None:
                owners[question.key] = owner
                answers.remember(question, lookup, "b", 200, _answer(owner))
            elif lookup.tier != "semantic":
                exact += 1
            else:
                theirs = owners[lookup.entry.key]
                if theirs != owner and owner < 0 and theirs < 0:
                    unknown += 1  # two searches of the public sets, which nobody has compared
                else:
                    hits, wrong = hits + 1, wrong + (theirs != owner)
                if chance.random() < audit:  # as the pipeline does
                    audits += 1
                    audited = Lookup("miss", "audit", score=lookup.score, near=lookup.nearest)
                    owners[question.key] = owner
                    answers.remember(question, audited, "b", 200, _answer(owner))
            if number % 50 == 0:
                await answers.settled()
        await answers.close()
    low, high = interval(wrong, hits)
    return [f"{rate:.1%}", f"{audit:.0%}", f"{exact / count:.1%}", f"{hits / count:.1%}", f"{wrong / max(hits, 1):.2%}",
            f"{low:.2%} to {high:.2%} (n = {hits})", str(unknown), str(audits)]  # fmt: skip


def _answer(owner: int) -> Answer:
    """What only this family's answer says."""
    message = {"role": "assistant", "content": f"The answer is number {abs(owner) + 1000 * (owner < 0) + 10}."}
    return answer_from_json(orjson.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}))


def _question(text: str, rules: CacheRules) -> Question:
    seen = view({"model": "m", "messages": [{"role": "user", "content": text}]})
    scope = Scope(seen, "t", (), {}, "", "").digest()
    return Question(key_digest(scope, text), scope, "t", seen, Controls(), rules)


def times(pairs: Sequence[Pair]) -> str:
    """Milliseconds of each step of a decision, one after the other, on the thread that the gateway uses."""
    semantic = load(EmbedderConfig(), None)
    encoder, verifier = semantic._batcher.encoder, semantic.verifier
    assert verifier is not None
    steps: dict[str, Callable[[Pair], object]] = {
        "encoder": lambda pair: encoder.fits(pair.b) and encoder.encode([pair.b]),
        "guards, new texts": lambda pair: similarity.veto(pair.b, pair.a, similarity.hard(0.9)),
        "verifier, both orders": lambda pair: verifier.score(pair.b, pair.a),
    }
    rows, whole = [], [0.0] * len(pairs)
    for name, step in steps.items():
        took = []
        for number, pair in enumerate(pairs):
            began = time.perf_counter()
            step(pair)
            took.append((time.perf_counter() - began) * 1e3)
            whole[number] += took[-1]
        rows.append(_spread(name, took))
    semantic.close()
    return table(["step", "p50", "p95", "p99"], [*rows, _spread("together", whole)])


def _spread(name: str, took: list[float]) -> list[str]:
    ordered = sorted(took)
    return [name, *(f"{ordered[int(len(ordered) * part)]:.2f} ms" for part in (0.5, 0.95, 0.99))]


def sample(pairs: Sequence[Pair], count: int, rate: float, seed: int) -> str:
    """Every decision on a sample, with its reason in words."""
    chosen = random.Random(seed).sample(list(pairs), count)
    rows = []
    for verdict in served(chosen, "guards and verifier", rate):
        pair = verdict.pair
        right = "" if verdict.served == pair.same else "wrong" if verdict.served else "lost"
        cosine = "-" if verdict.similarity is None else f"{verdict.similarity:.2f}"
        score = "-" if verdict.score is None else f"{verdict.score:.3f}"
        rows.append(
            [right, "same" if pair.same else "trap", pair.kind, cosine, score, explained(verdict), pair.a, pair.b]
        )
    rows.sort(key=lambda row: (["wrong", "lost", ""].index(row[0]), row[1], row[2]))
    return table(["", "label", "kind", "cosine", "verifier", "decision", "stored question", "asked"], rows)


def explained(verdict: judging.Verdict) -> str:
    """Why a pair was served or not."""
    if verdict.served:
        if verdict.reason == "exact":
            return "served: the same text"
        return "served: near, no guard objects, and the verifier is sure enough"
    reason = verdict.reason
    if reason.startswith("veto-"):
        return f"refused by a guard: {_GUARDS[reason.removeprefix('veto-')]}"
    return {
        "below-threshold": "refused: too far apart to be looked at",
        "verifier": "refused: no guard objects, but the verifier is not sure enough",
        "language": "refused: not recognised as English",
        "first-in-scope": "refused: another history or other options",
    }.get(reason, f"refused: {reason}")


_GUARDS = {
    "numbers": "the numbers differ",
    "verbatim": "quoted text, paths or operators differ",
    "calendar": "dates or times differ",
    "units": "units differ",
    "negation": "one of them denies",
    "antonym": "one says the opposite",
    "quantifier": "all, some or none",
    "kind": "who, when, where, why or how",
    "form": "another form of answer is wanted",
    "order": "two things have changed places",
    "role": "another role",
    "language": "one of them is not English",
    "answer": "the answer speaks of what only the stored question has",
    "length": "too long to compare",
}


def worst(pairs: Sequence[Pair], rate: float) -> str:
    """The traps that are served, the verifier's most certain ones first."""
    verdicts = [verdict for verdict in served(pairs, "guards and verifier", rate) if verdict.served]
    wrong = sorted((one for one in verdicts if not one.pair.same), key=lambda one: -(one.score or 1))
    rows = [
        [f"{one.score or 1:.3f}", f"{one.similarity or 1:.2f}", one.pair.kind, one.pair.a, one.pair.b] for one in wrong
    ]
    return table(["verifier", "cosine", "kind", "stored question", "asked"], rows[:20])


def conversations(data: Path) -> str:
    """Message lists: what is served with the history as it is, and where last turns may stand alone."""
    pairs = []
    for name in ("conversations", "conversations_long"):
        pairs += list(judging.read_pairs(data / "handwritten" / f"{name}.jsonl"))
    rules, verdicts = CacheRules(volatile={}), []
    for drops in (False, True):

        async def run(chosen: CacheRules) -> list[judging.Verdict]:
            config = EmbedderConfig()
            return [verdict async for verdict in judging.judge(pairs, lambda: load(config, None), chosen)]

        verdicts.append(asyncio.run(run(replace(rules, drops_history=drops))))
    before, after = (judging.shares(each) for each in verdicts)
    rows = [
        [label, kind, str(total), share(hits, total), share(alone, total)]
        for (kind, label, hits, total), (_, _, alone, _) in zip(before, after, strict=True)
    ]
    return table(["", "kind", "pairs", "history: exact", "history: standalone"], rows)


def sections(arguments: argparse.Namespace) -> Iterator[tuple[str, str]]:
    data, rate, chance = arguments.data, arguments.rate, random.Random(arguments.seed)
    held_out = parts()["measure"]
    made = generated(data, arguments.count, "measure", arguments.seed)
    sets = {
        f"Hand-written pairs of held-out domains ({', '.join(HELD_OUT)})": held_out,
        "Generated edits of held-out questions": made,
        "Quora (noisy labels, measured only)": qqp(data, chance, arguments.count),
    }
    wanted = arguments.only
    if "pairs" in wanted:
        for title, pairs in sets.items():
            yield title, compared(pairs, rate, arguments.gptcache)
            if not title.startswith("Quora"):
                yield f"{title}: by max_wrong_rate", by_rate(pairs)
    if "times" in wanted:
        yield "Milliseconds of a decision", times(held_out[:500])
    if "conversations" in wanted:
        yield "Conversations", conversations(data)
    if "worst" in wanted:
        yield "Traps that are served", worst(held_out, rate)
    if "sample" in wanted:
        yield "A sample of 200 decisions", sample(held_out, 200, rate, arguments.seed)
    if "stream" in wanted:
        rows = [asyncio.run(stream(data, held_out, arguments.stream, each, 0.02, arguments.seed)) for each in RATES]
        head = "max_wrong_rate|audit|exact|semantic|wrong per semantic hit|95 % interval|unlabelled|audits".split("|")
        yield f"A stream of {arguments.stream:,} requests", table(head, rows)


SECTIONS = ("pairs", "times", "conversations", "worst", "sample", "stream")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rate", type=float, default=CacheRules().max_wrong_rate, help="the max_wrong_rate of tables")
    parser.add_argument("--count", type=int, default=2000, help="generated pairs, and Quora's")
    parser.add_argument("--stream", type=int, default=8_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gptcache", help="the python of an environment that has gptcache")
    arguments = parser.parse_args()
    for title, text in sections(arguments):
        print(f"### {title}\n\n{text}\n", flush=True)


if __name__ == "__main__":
    main()
