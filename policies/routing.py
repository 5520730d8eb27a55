"""Where a model name may run: exact names first, then the most specific pattern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True, slots=True)
class Target:
    """One place to try: a backend, and the model name to ask it for (None: the name the client used)."""

    backend: str
    model: str | None = None


def candidates(model: str, routes: Mapping[str, Sequence[Target]]) -> Sequence[Target]:
    """The targets for a model name in order; empty if the name is unknown.

    An exact name wins over a pattern, and of several patterns (`gpt-*`) the one with the longest literal start.
    """
    if model in routes:
        return routes[model]
    patterns = [name for name in routes if "*" in name and fnmatchcase(model, name)]
    if not patterns:
        return ()
    return routes[max(patterns, key=lambda name: (len(name.partition("*")[0]), len(name)))]
