"""Templates: called by name, recognised in other spellings, refused where they cannot be meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest

from backends.dialects.openai_chat import MalformedRequest
from gateway.config import load
from gateway.settings_file import ConfigError
from gateway.templates import Template, TemplateConfig, Templates, normalised

TEXT = "You are the support assistant.\n\nBe brief."
TEMPLATES = Templates(
    [
        Template("support", TEXT, normalise=("trim", "newlines")),
        Template("exact", "Stay exact. "),
    ]
)


def applied(messages: list[dict[str, Any]], name: str | None = None) -> list[dict[str, Any]]:
    body = {"model": "m", "messages": messages, "unknown": 1}
    raw = orjson.dumps(body)
    new, sent = TEMPLATES.applied(body, raw, {"x-hitherto-template": name} if name else {})
    assert orjson.loads(sent) == new and new["unknown"] == 1
    if new is body:
        assert sent is raw, "what needs no change travels untouched"
    return list(new["messages"])


def user(text: str = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_template_called_by_name_becomes_the_system_prompt() -> None:
    assert applied([user()], "support") == [{"role": "system", "content": TEXT}, user()]


@pytest.mark.parametrize(
    "spelling", [TEXT + "\n", "  " + TEXT, TEXT.replace("\n", "\r\n"), TEXT.replace(".\n", ". \t\n")]
)
def test_a_copy_in_another_spelling_is_put_into_the_declared_one(spelling: str) -> None:
    system = {"role": "system", "content": spelling, "name": "x"}
    assert applied([system, user()]) == [{"role": "system", "content": TEXT, "name": "x"}, user()]


@pytest.mark.parametrize(
    "system", [TEXT, TEXT.replace("brief", "short"), TEXT.replace("the ", "the  "), "Stay exact.", "", None, [{"a": 1}]]
)
def test_other_prompts_are_not_touched(system: Any) -> None:
    messages = [{"role": "system", "content": system}, user(TEXT + " ")]
    assert applied(messages) == messages


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(MalformedRequest, match=r"no template 'nope' \(known: exact, support\)"):
        applied([user()], "nope")
    with pytest.raises(MalformedRequest, match="system prompt of their own"):
        applied([{"role": "system", "content": "x"}, user()], "support")


def test_normalising_keeps_what_matters() -> None:
    assert normalised(" a \r\n b", ()) == " a \r\n b"
    assert normalised("a  b\n\n  c\t\n", ("trim",)) == "a  b\n\n  c"
    assert normalised("a\rb", ("newlines",)) == "a\nb"


def test_a_file_is_looked_for_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "support.txt").write_text(TEXT)
    file = tmp_path / "hitherto.yaml"
    file.write_text(
        "templates:\n  support: {system_file: support.txt, normalise: [trim]}\n  other: {system: x, warm: false}\n"
    )
    assert load(file).templates == {
        "support": TemplateConfig(system=TEXT, normalise=("trim",)),
        "other": TemplateConfig(system="x", warm=False),
    }


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{system_file: gone.txt}", "gone.txt cannot be read"),
        ("{system: x, system_file: y}", "either system or system_file"),
        ("{}", "either system or system_file"),
        ("{system: ''}", "empty"),
        ("{system: x, normalise: [spaces]}", "trim"),
        ("{system: x, wram: true}", "not known"),
    ],
)
def test_a_template_that_cannot_be_used_is_named_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "hitherto.yaml"
    file.write_text(f"listen: 127.0.0.1:1\ntemplates:\n  support: {text}\n")
    with pytest.raises(ConfigError, match=words) as caught:
        load(file)
    assert f"{file}:3: templates.support" in str(caught.value)
