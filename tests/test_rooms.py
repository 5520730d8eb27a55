"""The rules of the house: who imports whom, where heavy libraries live, how long a module may get."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROOMS = ("gateway", "policies", "embedder", "backends")
MAY_IMPORT = {
    "gateway": {"gateway", "policies", "embedder", "backends"},
    "policies": {"policies", "backends.protocol"},
    "embedder": {"embedder"},
    "backends": {"backends"},
}
HOMES = {
    "torch": ("backends/engine/", "embedder/"),
    "transformers": ("backends/engine/",),
    "huggingface_hub": ("backends/engine/models.py",),
    "faiss": ("embedder/index.py",),
    "sentence_transformers": ("embedder/sentence.py",),
    "onnxruntime": ("embedder/onnx.py",),
    "spellchecker": ("policies/similarity/lexicon.py",),
    "snowballstemmer": ("policies/similarity/lexicon.py",),
    "redis": ("gateway/stores/redis", "gateway/cache/feed", "backends/engine/tiers/redis"),
    "fastapi": ("gateway/api/", "gateway/app.py", "gateway/serve.py"),
    "aiohttp": ("backends/upstream.py",),
    "prometheus_client": ("gateway/metrics.py",),
    "opentelemetry": ("gateway/telemetry.py",),
    "rich": ("gateway/reports.py",),
    "genai_prices": ("gateway/prices.py",),
    "sqlite3": ("gateway/stores/sqlite", "gateway/app.py"),
    "typer": ("gateway/cli",),
}
NO_TORCH_EVER = ("blocks", "prefix_cache", "scheduler", "sequence", "config", "request", "supervisor", "backend")
BANNED = {"utils", "util", "helpers", "manager", "base", "common", "misc"}
LINE_CAP = 500
FUNCTION_CAP = 60


def modules() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def imports(path: Path, top_level_only: bool = False) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_rooms_import_only_what_lies_below_them(path: Path) -> None:
    allowed = MAY_IMPORT[path.relative_to(ROOT).parts[0]]
    for name in imports(path):
        if name.split(".")[0] in ROOMS:
            assert any(name == room or name.startswith(f"{room}.") for room in allowed), f"{path} imports {name}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_heavy_libraries_stay_at_home(path: Path) -> None:
    where = str(path.relative_to(ROOT))
    for name in imports(path):
        homes = HOMES.get(name.split(".")[0])
        if homes is not None:
            assert where.startswith(homes), f"{where} imports {name}, which lives in {', '.join(homes)}"


@pytest.mark.parametrize("path", modules(), ids=name_of)
def test_modules_are_small_and_named_for_what_they_hold(path: Path) -> None:
    text = path.read_text()
    assert path.stem not in BANNED
    assert text.count("\n") <= LINE_CAP
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert (node.end_lineno or 0) - node.lineno < FUNCTION_CAP, f"{path}: {node.name} is too long"


def test_there_are_no_import_cycles() -> None:
    known = {name_of(path): path for path in modules()}
    graph = {
        name: {target for target in imports(path, top_level_only=True) if target in known and target != name}
        for name, path in known.items()
    }
    state: dict[str, int] = {}

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert state.get(name) != 1, f"import cycle: {' → '.join((*trail, name))}"
        if state.get(name) == 2:
            return
        state[name] = 1
        for target in graph[name]:
            visit(target, (*trail, name))
        state[name] = 2

    for name in graph:
        visit(name, ())


def test_the_pure_parts_of_the_engine_import_no_torch() -> None:
    for stem in NO_TORCH_EVER:
        names = {name.split(".")[0] for name in imports(ROOT / "backends/engine" / f"{stem}.py")}
        assert not names & {"torch", "transformers", "numpy"}


@pytest.mark.parametrize(
    "room", ["gateway.app", "gateway.cli", "gateway.serve", "backends.build", "policies.similarity"]
)
def test_the_gateway_imports_without_torch(room: str) -> None:
    heavy = "{'torch', 'transformers', 'faiss', 'numpy', 'onnxruntime', 'spellchecker', 'snowballstemmer', 'redis'}"
    code = f"import sys, {room}; sys.exit(', '.join({heavy} & set(sys.modules)) or None)"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
