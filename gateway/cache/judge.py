"""`hitherto cache judge`: for pairs of questions, would an answer stored for one be served for the other?

Nothing is imitated: each pair is remembered and looked up in a real answer cache, in a namespace of its own.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import orjson

from backends.dialects.openai_chat import answer_from_json, view
from gateway.cache.answers import Answers
from gateway.cache.key import Scope, key_digest
from gateway.cache.lookup import Lookup, probability
from gateway.cache.question import Question, without_history
from gateway.cache.semantic import Semantic
from gateway.metrics import Metrics
from gateway.stores.sqlite import SQLiteAnswers
from policies.cacheability import CacheRules
from policies.controls import Controls

AT_ONCE = 32
_ANSWER = answer_from_json(
    b'{"choices":[{"index":0,"message":{"role":"assistant","content":"x"},"finish_reason":"stop"}]}'
)


class BadPair(ValueError):
    """A line of the file that is not a pair; the text names the line."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Two questions (text, or message lists), and whether one answer is right for both, if that is known."""

    a: Any
    b: Any
    same: bool | None
    kind: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the cache does with a pair."""

    pair: Pair
    served: bool
    similarity: float | None
    score: float | None
    """The verifier's probability that one answer serves both, where it was asked."""
    reason: str


def read_pairs(path: Path) -> Iterator[Pair]:
    """The pairs of a JSONL file. Raises `BadPair`."""
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = orjson.loads(line)
            pair = Pair(value["a"], value["b"], value.get("same"), str(value.get("kind", "")))
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise BadPair(f'{path}:{number}: a pair looks like {{"a": …, "b": …, "same": true}}') from error
        if not all(isinstance(side, str | list) and side for side in (pair.a, pair.b)):
            raise BadPair(f"{path}:{number}: a and b must be questions, or lists of messages")
        if pair.same not in (None, True, False):
            raise BadPair(f"{path}:{number}: same must be true or false")
        yield pair


async def judge(pairs: Iterable[Pair], semantic: Callable[[], Semantic], rules: CacheRules) -> AsyncIterator[Verdict]:
    """Verdicts in the order of the pairs: of guards and verifier, in shadow mode or not, without asking a model."""
    rules = replace(rules, shadow=False, judge=None)
    with tempfile.TemporaryDirectory() as folder:
        store = SQLiteAnswers(Path(folder) / "judge.sqlite")
        answers = Answers(store, 1 << 30, 60.0, Metrics(), await asyncio.to_thread(semantic))
        await answers.open()
        try:
            batch: list[tuple[int, Pair]] = []
            for item in enumerate(pairs):
                batch.append(item)
                if len(batch) == AT_ONCE:
                    for verdict in await asyncio.gather(*(_judge(answers, rules, *each) for each in batch)):
                        yield verdict
                    batch = []
            for verdict in await asyncio.gather(*(_judge(answers, rules, *each) for each in batch)):
                yield verdict
        finally:
            await answers.close()


async def _judge(answers: Answers, rules: CacheRules, number: int, pair: Pair) -> Verdict:
    stored, asked = (_question(side, rules, str(number)) for side in (pair.a, pair.b))
    refused = answers.remember(stored, Lookup("miss"), "judge", 200, _ANSWER)
    found = await answers.lookup(asked)
    score = found.score if answers.semantic is not None and answers.semantic.verifier is not None else None
    probable = None if score is None else probability(score)
    return Verdict(pair, found.entry is not None, found.similarity, probable, refused or found.reason or found.tier)


def _question(side: Any, rules: CacheRules, namespace: str) -> Question:
    messages = side if isinstance(side, list) else [{"role": "user", "content": side}]
    seen = view({"model": "judge", "messages": messages})
    if rules.drops_history:
        seen = without_history(seen)
    scope = Scope(seen, "judge", (), {}, "", namespace).digest()
    return Question(key_digest(scope, seen.question), scope, "judge", seen, Controls(namespace=namespace), rules)


def shares(verdicts: Sequence[Verdict]) -> list[tuple[str, str, int, int]]:
    """(kind, "same" or "different", served, of how many), with a total for each label; without unlabelled pairs."""
    counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for verdict in verdicts:
        if verdict.pair.same is not None:
            label = "same" if verdict.pair.same else "different"
            for kind in (verdict.pair.kind or "-", "all"):
                counts[kind, label][0] += verdict.served
                counts[kind, label][1] += 1
    ordered = sorted(counts, key=lambda item: (item[1] != "same", item[0] == "all", item[0]))
    return [(kind, label, *counts[kind, label]) for kind, label in ordered]  # type: ignore[misc]
