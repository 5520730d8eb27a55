"""What an output must look like: JSON, a JSON schema, tool calls. Grammars are compiled off the engine's thread.

A grammar is written in llguidance's dialect of Lark, whose `%json` takes a JSON schema in place.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from backends.engine.request import BadRequest
from backends.engine.tools import ToolForm

# Unlimited blanks between the parts of an object are where small models get lost until the length limit.
_BLANKS = {"x-guidance": {"whitespace_pattern": r"[\x20\x0A]{0,12}"}}
_KEPT = 64


def json_grammar(schema: Mapping[str, Any]) -> str:
    """One JSON value that fits `schema`."""
    return f"start: %json {json.dumps({**_BLANKS, **schema})}\n"


def calls_grammar(
    form: ToolForm, schemas: Mapping[str, Mapping[str, Any]], several: bool, otherwise: Mapping[str, Any] | None
) -> str:
    """Calls of functions, as `form` writes them, with arguments of their schemas; or one value of `otherwise`.

    Each function's arguments are a rule of their own, since `$ref` in a schema counts from that schema's root.
    """
    lines = ["start: calls" if otherwise is None else "start: calls | value"]
    lines.append('calls: call ("\\n" call)*' if several and form.begin else "calls: call")
    lines.append("call: " + " | ".join(f"call{number}" for number in range(len(schemas))))
    for number, (name, schema) in enumerate(schemas.items()):
        before = (f"{form.begin}\n" if form.begin else "") + f'{{"name": {json.dumps(name)}, "{form.arguments}": '
        after = "}" + (f"\n{form.end}" if form.end else "")
        lines.append(f"call{number}: {json.dumps(before)} arguments{number} {json.dumps(after)}")
        lines.append(f"arguments{number}: %json {json.dumps({**_BLANKS, **schema})}")
    if otherwise is not None:
        lines.append(f"value: %json {json.dumps({**_BLANKS, **otherwise})}")
    return "\n".join([*lines, ""])


class Grammars:
    """Compiles grammars for one tokenizer, and keeps the latest; thread-safe. `vocabulary`: rows of the logits."""

    def __init__(self, tokenizer: Any, eos: Sequence[int]) -> None:
        from llguidance import hf

        known = [token for token in eos if token < len(tokenizer)]
        self._tokenizer = hf.from_tokenizer(tokenizer, eos_token=known or None)
        self._eos = frozenset(known)
        self._lock = threading.Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()

    def constraint(self, grammar: str, param: str) -> GrammarConstraint:
        """A fresh state machine. Raises `BadRequest` naming `param` where the grammar or schema is none."""
        with self._lock:
            matcher = self._compiled.get(grammar)
            if matcher is not None:
                self._compiled.move_to_end(grammar)
        if matcher is None:
            matcher = self._compile(grammar, param)
            with self._lock:
                self._compiled[grammar] = matcher
                while len(self._compiled) > _KEPT:
                    self._compiled.popitem(last=False)
        return GrammarConstraint(matcher.deep_copy(), self._eos)

    def _compile(self, grammar: str, param: str) -> Any:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
        if matcher.is_error():
            raise BadRequest(f"{param}: {matcher.get_error().splitlines()[0]}", param)
        return matcher


class GrammarConstraint:
    """A `Constraint` that follows a grammar."""

    def __init__(self, matcher: Any, eos: frozenset[int]) -> None:
        self._matcher, self._eos = matcher, eos

    def mask(self, vocabulary: int) -> Any:
        """Bools `[vocabulary]` (numpy). Raises ValueError when the grammar has become too complex to follow."""
        import numpy as np

        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            raise ValueError(f"the output's grammar cannot be followed: {self._matcher.get_error()}")
        allowed = np.zeros(vocabulary, dtype=bool)
        known = np.unpackbits(bits, bitorder="little")[:vocabulary]
        allowed[: len(known)] = known
        return allowed

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            raise ValueError(f"the output's grammar cannot be followed: {self._matcher.get_error()}")
