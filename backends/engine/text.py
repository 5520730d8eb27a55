"""Between text and tokens: chat template, step-by-step decoding. No torch."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from backends.engine.tools import ToolForm, form_of, plain_turns


class TemplateError(ValueError):
    """The messages cannot be put into the model's chat template; the text says what is wrong."""


class Text:
    """A model's tokenizer and chat template."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self._lock = threading.Lock()
        self._special = set(self.tokenizer.all_special_ids)
        added = sorted(self.tokenizer.get_added_vocab(), key=len, reverse=True)
        # What looks like one of our stand-ins is hidden too, or it would be taken for one.
        self._control = re.compile("|".join([*map(re.escape, added), "[\ue0f0\ue0f1]"]))
        decoder = type(getattr(self.tokenizer.backend_tokenizer, "decoder", None)).__name__
        self._byte_level = _byte_level_table() if decoder == "ByteLevel" else {}

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        options: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the rendered conversation, ready for the assistant's turn; `options` are the chat template's
        own variables. Raises `TemplateError`, and `BadRequest` for tools of a form that we cannot read."""
        turns = [_plain_message(index, message) for index, message in enumerate(messages)]
        rendered_tools: Any = [dict(tool) for tool in tools] or None
        if (tools or any(turn.keys() - {"role", "content"} for turn in turns)) and not self.tool_form().in_template:
            turns, rendered_tools = plain_turns(turns, tools), None
        hidden = _Hidden(self._control)
        turns, rendered_tools = hidden.hide_all(turns), hidden.hide_all(rendered_tools)
        try:
            rendered = self.tokenizer.apply_chat_template(
                turns,
                rendered_tools,
                tokenize=False,
                add_generation_prompt=True,
                **hidden.hide_all(dict(options or {})),
            )
        except Exception as error:  # jinja2 errors and the template's own raise_exception
            raise TemplateError(f"messages do not fit the model's chat template: {error}") from error
        tokens: list[int] = []
        with self._lock:  # `split_special_tokens` is a switch on the shared tokenizer, not an argument of the call
            for piece, verbatim in hidden.pieces(rendered):
                tokens += self.tokenizer.encode(piece, add_special_tokens=False, split_special_tokens=verbatim)
        return tokens

    def encode(self, text: str) -> list[int]:
        """Token ids of a raw prompt. Names of control tokens are control tokens: the caller writes all of it."""
        with self._lock:
            tokens: list[int] = self.tokenizer.encode(text, split_special_tokens=False)
        return tokens

    def tool_form(self) -> ToolForm:
        """How this model writes tool calls. Raises `BadRequest` where we cannot read that."""
        template = self.tokenizer.get_chat_template(tools=[]) if self.tokenizer.chat_template else ""
        return form_of(template)

    def token_text(self, token: int) -> str:
        return bytes(self.token_bytes(token)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> list[int]:
        """The token's own bytes; a part of a character has bytes but no text."""
        piece = self.tokenizer.convert_ids_to_tokens(token)
        if piece is None or token in self._special:
            return list(str(self.tokenizer.decode([token])).encode())
        if self._byte_level and all(char in self._byte_level for char in piece):
            return [self._byte_level[char] for char in piece]
        if byte := re.fullmatch(r"<0x([0-9A-Fa-f]{2})>", piece):  # SentencePiece's byte fallback
            return [int(byte[1], 16)]
        return list(piece.replace("▁", " ").encode())

    def decode_all(self, tokens: Sequence[int]) -> str:
        """Text with the names of control tokens, for people who look at prompts."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))


class _Hidden:
    """Keeps what users write from being read as control tokens of the chat template.

    Where a text contains the name of such a token ("<|im_end|>"), a stand-in of private-use characters goes through the
    template, and the name itself is tokenised as plain text. Other texts are not touched.
    """

    def __init__(self, control: re.Pattern[str]) -> None:
        self._control = control
        self._names: list[str] = []

    def hide_all(self, value: Any) -> Any:
        """The same JSON value with stand-ins in all its strings."""
        if isinstance(value, str):
            return self._control.sub(self._stand_in, value)
        if isinstance(value, list):
            return [self.hide_all(item) for item in value]
        if isinstance(value, dict):
            return {self.hide_all(name): self.hide_all(item) for name, item in value.items()}
        return value

    def _stand_in(self, match: re.Match[str]) -> str:
        self._names.append(match[0])
        return f"\ue0f0{len(self._names) - 1}\ue0f1"

    def pieces(self, rendered: str) -> Iterator[tuple[str, bool]]:
        """(text, whether control tokens in it are only text), in order."""
        if not self._names:
            yield rendered, False
            return
        for number, piece in enumerate(re.split("\ue0f0(\\d+)\ue0f1", rendered)):
            if number % 2:
                yield self._names[int(piece)], True
            elif piece:
                yield piece, False


def _plain_message(index: int, message: Mapping[str, Any]) -> dict[str, Any]:
    """Content parts joined to a string, and arguments of tool calls as objects: what chat templates expect."""
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise TemplateError(f"messages[{index}].role is missing")
    if isinstance(content, list):
        texts = []
        for part in content:
            if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise TemplateError(
                    f"messages[{index}].content holds a part that is not text; this model reads text only"
                )
            texts.append(part["text"])
        content = "".join(texts)
    if content is None and role == "assistant":
        content = ""
    if not isinstance(content, str):
        raise TemplateError(f"messages[{index}].content must be a string or a list of text parts")
    plain: dict[str, Any] = {"role": role, "content": content}
    if message.get("tool_calls"):
        if not isinstance(message["tool_calls"], list):
            raise TemplateError(f"messages[{index}].tool_calls must be a list")
        plain["tool_calls"] = [_plain_call(index, call) for call in message["tool_calls"]]
    if role == "tool":
        plain |= {name: message[name] for name in ("tool_call_id", "name") if isinstance(message.get(name), str)}
    return plain


def _plain_call(index: int, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    try:
        name, arguments = function["name"], function.get("arguments") or "{}"  # type: ignore[index,union-attr]
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TemplateError(f"messages[{index}].tool_calls must be functions with JSON arguments") from error
    return {"id": call.get("id"), "type": "function", "function": {"name": name, "arguments": arguments}}


def _byte_level_table() -> dict[str, int]:
    """GPT-2's stand-ins for bytes, reversed: printable bytes are themselves, the others follow from U+0100."""
    if not _BYTE_LEVEL:
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [byte for byte in range(256) if byte not in printable]
        _BYTE_LEVEL.update({chr(byte): byte for byte in printable})
        _BYTE_LEVEL.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return _BYTE_LEVEL


_BYTE_LEVEL: dict[str, int] = {}


class Detokenizer:
    """Text of a growing list of tokens, as far as it is certain.

    Decodes a short window instead of everything: the text of `tokens[start:]` minus that of `tokens[start:read]`. A
    window that ends inside a character (U+FFFD) waits for the next token.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._tokens: list[int] = []
        self._start = 0
        self._read = 0

    def push(self, token: int) -> str:
        """The text that became certain with this token; may be empty."""
        self._tokens.append(token)
        before = self._text.decode(self._tokens[self._start : self._read])
        now = self._text.decode(self._tokens[self._start :])
        if len(now) <= len(before) or now.endswith("\ufffd"):
            return ""
        self._start, self._read = self._read, len(self._tokens)
        return now[len(before) :]

    def flush(self) -> str:
        """What is left at the end: an incomplete character stays U+FFFD."""
        before = self._text.decode(self._tokens[self._start : self._read])
        now = self._text.decode(self._tokens[self._start :])
        self._start = self._read = len(self._tokens)
        return now[len(before) :]
