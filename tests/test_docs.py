"""What the documents say is so: links, commands, settings, examples."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from backends.config import OpenAIConfig
from backends.engine.config import EngineConfig, KVConfig
from embedder.config import EmbedderConfig
from gateway.cache.config import CacheConfig, SemanticConfig
from gateway.config import Settings, load
from gateway.metrics import Metrics
from gateway.tenants import load as load_tenants
from gateway.tenants import load_file
from policies.volatility import DEFAULTS
from scripts.settings_doc import PAGE, SECTIONS, rendered

ROOT = Path(__file__).parents[1]
DOCUMENTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_files_exist(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (path.parent / target).exists(), target
    for target in re.findall(r"`((?:gateway|backends|embedder|policies|tests|docs|examples)/[\w/]+\.\w+)", text):
        assert (ROOT / target).exists(), target


def test_examples_and_the_readmes_settings_are_valid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "HITHERTO_ADMIN_KEY"):
        monkeypatch.setenv(name, "x")
    settings = load(ROOT / "examples/hitherto.yaml")
    assert settings.tenants is not None and settings.prices
    tenants = load_tenants(settings.tenants, settings.surroundings())
    assert tenants.find("hk-example")[0].name == "acme", "the example's key is the one that its comment names"  # type: ignore[index]
    assert set(tenants.by_name) == {path.stem for path in (ROOT / "examples/tenants").glob("*.yaml")}
    for block in re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        file = tmp_path / "readme.yaml"
        file.write_text(block)
        load(file)
    for block in re.findall(r"```yaml tenant\n(.*?)```", (ROOT / "README.md").read_text(), re.S):
        file.write_text(block)
        load_file(file, settings.surroundings())


def test_every_setting_and_its_default_stand_in_the_documentation() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    names = set(re.findall(r"`([\w.]+)`", text))
    for name in Settings.model_fields:
        if name not in ("transparent", "backends", "models", "embedder", "cache"):
            assert name in names, name
    for prefix, section in (("cache.", CacheConfig), ("embedder.", EmbedderConfig), ("kv.", KVConfig)):
        for name in section.model_fields:
            assert f"{prefix}{name}" in names, f"{prefix}{name}"
    for name in (*SemanticConfig.model_fields, *DEFAULTS):
        assert name in names, name
    for section in (EngineConfig, OpenAIConfig):
        for name in set(section.model_fields) - {"kind", "kv"}:
            assert name in names, name


def test_the_page_of_policies_has_every_key_with_its_default_and_a_meaning() -> None:
    page = PAGE.read_text()
    assert rendered(page) == page, "make docs"
    assert {name for name in SECTIONS if f"<!-- keys of {name} -->" not in page} == set()
    for line in page.splitlines():
        if line.startswith("| `"):
            assert all(cell.strip() for cell in line.strip("|").split(" | ")), line


def test_every_metric_stands_in_the_documentation() -> None:
    text = (ROOT / "docs/configuration.md").read_text()
    for family in Metrics().registry.collect():
        assert f"`{family.name}" in text, family.name


def test_makefile_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for path in DOCUMENTS:
        for words in re.findall(r"`make ([a-z ]+)`", path.read_text()):
            assert set(words.split()) <= targets, words


def test_no_registry_host_is_written_down() -> None:
    for path in [*ROOT.glob("*.toml"), *ROOT.glob("*.txt"), ROOT / "Makefile", ROOT / ".ci/run"]:
        assert not re.search(r"(index-url|find-links|pypi\.org|files\.pythonhosted)", path.read_text()), path


def test_the_base_dependencies_do_not_pull_torch_in() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    base = project[project.index("dependencies = [") : project.index("[project.optional-dependencies]")]
    assert not re.search(r"torch|transformers|faiss|numpy", base)
