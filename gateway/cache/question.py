"""A request as the answer cache sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from backends.protocol import View
from policies.cacheability import CacheRules
from policies.controls import Controls


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
    redacted: Callable[[str], str | None] | None = None
    """What of a text may be stored; None: all of it."""

    def text(self) -> str | None:
        """The question's text as it may be stored."""
        asked = self.view.question
        return asked if asked is None or self.redacted is None else self.redacted(asked)

    @property
    def threshold(self) -> float:
        """The cosine that a stored question must reach: a caller may raise it, not lower it."""
        return max(self.rules.threshold, self.controls.threshold or 0.0)
