"""`hitherto cache judge` as its users call it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PAIRS = [
    {"a": "What is the capital of France?", "b": "Tell me the capital of France", "same": True, "kind": "near"},
    {"a": "Who won the world cup in 2020?", "b": "Who won the world cup in 2021?", "same": False, "kind": "number"},
    {"a": "Is aspirin safe for children?", "b": "Is aspirin not safe for children?", "same": False, "kind": "negation"},
    {"a": "How do I bake bread?", "b": "How do I bake bread?", "same": True, "kind": "near"},
    {
        "a": [{"role": "user", "content": "Tell me about Rome"}, {"role": "assistant", "content": "A city."},
              {"role": "user", "content": "How old is it?"}],
        "b": [{"role": "user", "content": "Tell me about Oslo"}, {"role": "assistant", "content": "A city."},
              {"role": "user", "content": "How old is it?"}],
        "same": False, "kind": "history",
    },
]  # fmt: skip


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gateway.cli", "cache", "judge", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_each_pair_gets_a_verdict_and_labels_a_table(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text("\n".join(map(json.dumps, PAIRS)) + "\n\n")
    verdicts = [json.loads(line) for line in run(str(file), "--json").stdout.splitlines()]
    assert [(v["served"], v["reason"]) for v in verdicts] == [
        (True, "semantic"),
        (False, "veto-numbers"),
        (False, "veto-negation"),
        (True, "exact"),
        (False, "first-in-scope"),
    ]
    assert 0.9 < verdicts[0]["similarity"] < 1 and set(verdicts[0]) == {"served", "similarity", "score", "reason"}
    assert verdicts[0]["score"] > 0.9 and verdicts[1]["score"] is None
    table = run(str(file)).stdout
    assert "near                     same              2        2   100.0%" in table
    assert "all                      different         0        3     0.0%" in table


def test_a_bad_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    for text in ('{"a": "x"}', '{"a": "x", "b": 3}', '{"a": "x", "b": "y", "same": "maybe"}', "not json"):
        file.write_text(f'{{"a": "x", "b": "y"}}\n{text}\n')
        result = run(str(file))
        assert result.returncode == 2 and f"{file}:2: " in result.stderr and "Traceback" not in result.stderr
    assert run(str(tmp_path / "missing.jsonl")).returncode == 2
