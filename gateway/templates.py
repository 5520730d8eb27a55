"""System prompts that an operator declares: called by name, put into one spelling, and kept warm on the engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
from pydantic import model_validator

from backends.dialects.openai_chat import MalformedRequest
from backends.protocol import Section

HEADER = "x-hitherto-template"

Normalisation = Literal["trim", "newlines"]


class TemplateConfig(Section):
    """A system prompt that clients call by name."""

    system: str | None = None
    """The prompt; or"""
    system_file: Path | None = None
    """a file with it, relative to the folder of the configuration file."""
    warm: bool = True
    """Compute its KV on every engine at the start, and keep it longest."""
    normalise: tuple[Normalisation, ...] = ()
    """`[trim, newlines]`: which differences in a client's own copy of it do not matter."""

    @model_validator(mode="after")
    def _one_text(self) -> TemplateConfig:
        if (self.system is None) == (self.system_file is None):
            raise ValueError("a template has either system or system_file")
        if not (self.system or "").strip():
            raise ValueError("the system prompt is empty")
        return self

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """The file's text in its place, read once, so that all processes have the same."""
        if not isinstance(data, dict) or not isinstance(data.get("system_file"), str) or "system" in data:
            return data
        path = data["system_file"]
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, RuntimeError) as error:
            raise ValueError(f"system_file: {path} cannot be read: {error}") from error
        return {"system": text, **{name: value for name, value in data.items() if name != "system_file"}}


def with_files_beside(path: Path, values: dict[str, Any]) -> tuple[dict[str, Any], list[Path]]:
    """The values of a configuration file with its templates' files looked for beside it, and those files."""
    templates = values.get("templates")
    if not isinstance(templates, dict):
        return values, []
    found, files = {}, []
    for name, entry in templates.items():
        if isinstance(entry, dict) and isinstance(entry.get("system_file"), str):
            file = entry["system_file"]
            # As it stands if it begins at a root or a home, else below the folder.
            file = file if file.startswith(("/", "~")) else str(path.parent / file)
            entry = {**entry, "system_file": file}
            files.append(Path(file))
        found[name] = entry
    return {**values, "templates": found}, files


@dataclass(frozen=True, slots=True)
class Template:
    """A declared system prompt. `normalise` says which differences in a client's copy of it do not matter."""

    name: str
    system: str
    warm: bool = True
    normalise: tuple[Normalisation, ...] = ()


class Templates:
    """The declared templates."""

    def __init__(self, templates: Sequence[Template] = ()) -> None:
        self._by_name = {template.name: template for template in templates}
        self._spellings: dict[tuple[Normalisation, ...], dict[str, str]] = {}
        """By what does not matter in them: texts without that, and as they were declared; the first one wins."""
        for template in templates:
            if template.normalise:
                known = self._spellings.setdefault(template.normalise, {})
                known.setdefault(normalised(template.system, template.normalise), template.system)
        self._exact = {template.system for template in templates}

    @staticmethod
    def declared(entries: Mapping[str, TemplateConfig]) -> Templates:
        """Those of a configuration."""
        return Templates(
            [Template(name, entry.system or "", entry.warm, entry.normalise) for name, entry in entries.items()]
        )

    @property
    def warm(self) -> list[Template]:
        return [template for template in self._by_name.values() if template.warm]

    def applied(self, body: dict[str, Any], raw: bytes, headers: Mapping[str, str]) -> tuple[dict[str, Any], bytes]:
        """The request with the template that it calls, or with its own copy of one in the declared spelling.

        Raises `MalformedRequest` for a template that does not exist, or beside a system prompt of the client's own.
        """
        name = headers.get(HEADER)
        messages = body.get("messages")
        if (name is None and not self._spellings) or not isinstance(messages, list) or not messages:
            return body, raw
        first = messages[0] if isinstance(messages[0], dict) else {}
        given = first.get("content") if first.get("role") in ("system", "developer") else None
        if name is None:
            text = self._declared(given) if isinstance(given, str) else None
            if text is None:
                return body, raw
            changed = [{**first, "content": text}, *messages[1:]]
        else:
            template = self._by_name.get(name)
            if template is None:
                known = ", ".join(sorted(self._by_name)) or "none"
                raise MalformedRequest(f"{HEADER}: there is no template {name!r} (known: {known})", HEADER)
            if given is not None:
                raise MalformedRequest(f"{HEADER}: the messages have a system prompt of their own", HEADER)
            changed = [{"role": "system", "content": template.system}, *messages]
        body = {**body, "messages": changed}
        try:
            return body, orjson.dumps(body)
        except TypeError as error:  # orjson reads deeper nesting than it writes
            raise MalformedRequest("the body is nested too deeply") from error

    def _declared(self, text: str) -> str | None:
        """The template that a text is another spelling of."""
        if text in self._exact:
            return None
        found = (known.get(normalised(text, how)) for how, known in self._spellings.items())
        return next((system for system in found if system is not None), None)


def normalised(text: str, how: Sequence[Normalisation]) -> str:
    """`newlines`: one kind of line end; `trim`: no blanks at line ends, nor around the text."""
    if "newlines" in how:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "trim" in how:
        text = "\n".join(line.rstrip(" \t") for line in text.split("\n")).strip()
    return text
