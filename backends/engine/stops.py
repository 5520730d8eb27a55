"""Stop strings over a text that grows piece by piece. No torch."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back text that could be the beginning of a stop string, and cuts at the first one found."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.found = False

    def push(self, piece: str) -> str:
        """What may be shown now. After `found`, everything later is dropped."""
        if self.found:
            return ""
        text = self._held + piece
        hits = [position for stop in self._stops if (position := text.find(stop)) >= 0]
        if hits:
            self.found, self._held = True, ""
            return text[: min(hits)]
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :] if keep else ""
        return text[: len(text) - keep] if keep else text

    def flush(self) -> str:
        held, self._held = self._held, ""
        return "" if self.found else held


def overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
