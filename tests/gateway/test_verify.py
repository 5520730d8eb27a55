"""`hitherto verify` as its users call it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_a_few_prompts_through_every_tier_are_the_same(tmp_path: Path, model_folder: Path) -> None:
    config, prompts = tmp_path / "x.yaml", tmp_path / "prompts.txt"
    config.write_text(
        f"backends: {{local: {{kind: engine, model: {model_folder}, kv: {{device: 256MiB}}}}}}\n"
        "models: {m: {try: [local]}}\n"
    )
    prompts.write_text("Tell me about tides.\n\nTell me about the many kinds of bread that are baked in the world.\n")
    command = [sys.executable, "-m", "gateway.cli", "verify", "--config", str(config), "--prompts", str(prompts)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    assert [(row[0], row[1], row[2], row[4]) for row in rows] == [
        ("device", "2", "2", "0"),
        ("ram", "2", "2", "0"),
        ("disk", "2", "2", "0"),
    ]


def test_an_unknown_engine_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "gateway.cli", "verify", "--backend", "nobody"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert result.returncode == 2 and "no engine 'nobody'" in result.stderr
