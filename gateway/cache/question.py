"""A request as the answer cache sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace

from backends.protocol import View
from policies.cacheability import CacheRules
from policies.context import stands_alone
from policies.controls import Controls


def without_history(view: View) -> View:
    """The same request without the turns before its question, if the question stands alone."""
    messages = view.scope_fields.get("messages")
    if view.question is None or not isinstance(messages, list):
        return view
    try:
        if not stands_alone(view.question, messages[:-1]):
            return view
    except ImportError:  # the word lists come with hitherto[semantic]
        return view
    kept = [message for message in messages[:-1] if message.get("role") in ("system", "developer")]
    return replace(view, scope_fields={**view.scope_fields, "messages": [*kept, messages[-1]]})


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, under which key and in which scope, by whom, and by which rules."""

    key: bytes
    scope: bytes
    tenant: str
    view: View
    controls: Controls
    rules: CacheRules
    user: str = ""
    """The end user that it is for, where that is told."""
    consult: Callable[[str, str], Awaitable[str]] | None = field(default=None, compare=False, repr=False)
    """Asks a model (its name, a prompt) in the tenant's name."""
    redacted: Callable[[str], str | None] | None = None
    """What of a text may be stored; None: all of it."""

    def text(self) -> str | None:
        """The question's text as it may be stored."""
        asked = self.view.question
        return asked if asked is None or self.redacted is None else self.redacted(asked)

    def threshold(self, least: float) -> float:
        """The cosine that a stored question must reach, `least` where the rules do not say: a caller may raise it, not
        lower it."""
        ruled = self.rules.threshold
        return max(least if ruled is None else ruled, self.controls.threshold or 0.0)
