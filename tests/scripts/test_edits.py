"""Edits that change nothing, edits that change the answer, and words that are kept for measuring."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from policies import similarity
from scripts.edits import Editor, read_pairs
from scripts.train_verifier import CALIBRATION, HELD_OUT, PAIRS, parts

QUESTIONS = [
    "What is the largest city in France?",
    "How do I add a user in Linux without a password?",
    "When was the first Ford built in 1903?",
    "Can I pay with two cards at the same time?",
    "How many miles is it from Boston to Chicago?",
    "Why do cats purr when they are happy?",
]


@pytest.fixture(params=[False, True], ids=["train", "held-out"])
def editor(request: pytest.FixtureRequest) -> Editor:
    return Editor(request.param, random.Random(3))


def test_harmless_edits_keep_numbers_and_negations(editor: Editor) -> None:
    for text in QUESTIONS * 30:
        made = editor.harmless(text)
        assert made != text
        veto = similarity.veto(text, made, similarity.HARD)
        assert veto in ("", "antonym", "order", "form", "verbatim"), f"{text} | {made}: {veto}"


def test_harmful_edits_change_something_and_say_what(editor: Editor) -> None:
    kinds = Counter[str]()
    for text in QUESTIONS * 60:
        if (made := editor.harmful(text)) is not None:
            assert made[0].lower() != text.lower()
            kinds[made[1]] += 1
    assert {"negation", "number", "scope"} <= kinds.keys() and len(kinds) >= 5


def test_words_for_training_and_for_measuring_are_not_the_same() -> None:
    train, measure = (Editor(held_out, random.Random(1)) for held_out in (False, True))
    for name in ("synonyms", "antonyms", "scopes"):
        ours, theirs = (set(map(str, editor._swaps.get(name, editor._scopes))) for editor in (train, measure))
        assert ours and theirs and not ours & theirs


def test_the_pairs_are_well_formed_and_balanced() -> None:
    total = same = 0
    for path in sorted(PAIRS.glob("*.jsonl")):
        seen: set[str] = set()
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            value = json.loads(line)
            where = f"{path.name}:{number}"
            assert set(value) == {"a", "b", "same", "kind"} and isinstance(value["same"], bool), where
            assert value["a"] and value["b"] and value["a"] != value["b"], where
            assert line not in seen, where
            seen.add(line)
            total, same = total + 1, same + value["same"]
    assert total > 19_000 and 0.48 < same / total < 0.52


def test_what_is_measured_is_not_trained_on() -> None:
    found = parts()
    texts = {
        part: {text.lower().strip(" ?.!") for pair in pairs for text in (pair.a, pair.b)}
        for part, pairs in found.items()
    }
    assert not texts["train"] & texts["measure"] and not texts["train"] & texts["calibrate"]
    assert {pair.source for pair in found["measure"]} == set(HELD_OUT)
    assert {pair.source for pair in found["calibrate"]} == set(CALIBRATION)
    assert all(len(pairs) > 1500 for pairs in found.values())


def test_conversations_with_one_history_become_pairs_of_last_turns(tmp_path: Path) -> None:
    turn = {"role": "user", "content": "Is it?"}
    head = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    lines = [
        {"a": [*head, turn], "b": [*head, {**turn, "content": "Is it so?"}], "same": True, "kind": "k"},
        {"a": [*head, turn], "b": [turn], "same": False, "kind": "k"},
    ]
    path = tmp_path / "c.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    assert [(pair.a, pair.b) for pair in read_pairs(path)] == [("Is it?", "Is it so?")]
