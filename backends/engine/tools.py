"""Tools: how a model is told of them, and how its calls are read. No torch.

Two forms of a call are known: Hermes (`<tool_call>{"name": …, "arguments": …}</tool_call>`, as Qwen, SmolLM and others
write it) and Llama 3's bare object with `parameters`. For a chat template that knows no tools, the system prompt
explains the Hermes form.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from backends.engine.request import BadRequest
from backends.engine.stops import overlap


@dataclass(frozen=True, slots=True)
class ToolForm:
    """How one call stands in the text. `begin` empty: the whole text is one object."""

    begin: str
    end: str
    arguments: str
    in_template: bool
    """The chat template renders tools itself."""


HERMES = ToolForm("<tool_call>", "</tool_call>", "arguments", True)
LLAMA = ToolForm("", "", "parameters", True)
EXPLAINED = ToolForm("<tool_call>", "</tool_call>", "arguments", False)


def form_of(template: str) -> ToolForm:
    """The form that a chat template teaches its model. Raises `BadRequest` where we cannot read it."""
    if "tools" not in template:
        return EXPLAINED
    if HERMES.begin in template and not any(mark in template for mark in ("<function=", "<arg_key>")):
        return HERMES
    if "parameters" in template and "python_tag" in template:
        return LLAMA
    raise BadRequest("tools: this model writes tool calls in a form that the built-in engine cannot read", "tools")


def explain(tools: Sequence[Mapping[str, Any]]) -> str:
    """The system prompt's part about tools, for a model whose chat template has none."""
    functions = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call functions. Their signatures stand between <tools> and </tools>:\n"
        f"<tools>\n{functions}\n</tools>\n"
        "To call one, answer with its name and arguments as a JSON object between <tool_call> and </tool_call>:\n"
        '<tool_call>\n{"name": "FUNCTION", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
    )


def plain_turns(messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with tools, calls and results written into their texts, for a chat template that knows none of them."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        content = message.get("content") or ""
        if message["role"] == "tool":
            turns.append({"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"})
            continue
        calls = [
            f"{HERMES.begin}\n{json.dumps(call['function'], ensure_ascii=False)}\n{HERMES.end}"
            for call in message.get("tool_calls") or ()
        ]
        turns.append({"role": message["role"], "content": "\n".join([content, *calls] if content else calls or [""])})
    if tools:
        system = turns.pop(0)["content"] + "\n\n" if turns and turns[0]["role"] == "system" else ""
        turns.insert(0, {"role": "system", "content": system + explain(tools)})
    return turns


def arguments_schemas(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The JSON schema of each function's arguments, by its name."""
    return {tool["function"]["name"]: tool["function"].get("parameters") or {"type": "object"} for tool in tools}


class ToolCalls:
    """Splits a growing text into what is said and which functions are called.

    What only looks like a call (no JSON, an unknown function) stays text: nothing that the model wrote is lost.
    """

    def __init__(self, form: ToolForm, names: frozenset[str]) -> None:
        self._form, self._names = form, names
        self._held = ""
        self._inside = self._begun = self._after_call = False
        self.found = 0

    def push(self, text: str) -> tuple[str, list[dict[str, Any]]]:
        """The text that is certainly no call, and the calls that are complete."""
        self._held += text
        if not self._form.begin:
            return self._bare()
        said: str = ""
        calls: list[dict[str, Any]] = []
        while True:
            if not self._inside:
                before, mark, after = self._held.partition(self._form.begin)
                if not mark:
                    keep = overlap(self._held, self._form.begin)
                    said += self._said(self._held[: len(self._held) - keep])
                    self._held = self._held[len(self._held) - keep :]
                    return said, calls
                said, self._held, self._inside = said + self._said(before), after, True
            body, mark, after = self._held.partition(self._form.end)
            if not mark:
                return said, calls
            call = self._call(body)
            if call is None:
                said += self._said(f"{self._form.begin}{body}{self._form.end}")
            else:
                self._after_call = True
                calls.append(call)
            self._held, self._inside = after, False

    def flush(self) -> tuple[str, list[dict[str, Any]]]:
        """What is left at the end of the text."""
        held, inside = self._held, self._inside
        self._held, self._inside = "", False
        if self._form.begin:
            call = self._call(held) if inside else None  # some models end their turn in place of the end mark
            if call is not None:
                return "", [call]
            return self._said(self._form.begin + held if inside else held), []
        call = None if self._begun else self._call(held)
        return ("", [call]) if call is not None else (held, [])

    def _said(self, text: str) -> str:
        """The same text; blanks behind a call say nothing."""
        if self._after_call:
            text = text.lstrip()
            self._after_call = not text
        return text

    def _bare(self) -> tuple[str, list[dict[str, Any]]]:
        if not self._begun and self._held.lstrip()[:1] in ("", "{"):
            return "", []  # perhaps a call: only the end tells
        said, self._held, self._begun = self._held, "", True
        return said, []

    def _call(self, body: str) -> dict[str, Any] | None:
        try:
            value = json.loads(body)
            name, arguments = value["name"], value.get(self._form.arguments, {})
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict | str):
            return None
        written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        self.found += 1
        return {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": name, "arguments": written},
        }
