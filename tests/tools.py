"""Programs that Debian carries and some tests need."""

from __future__ import annotations

import os
import shutil

import pytest

_PACKAGES = {"chromium": "chromium", "prometheus": "prometheus", "promtool": "prometheus"}


def tool(name: str) -> str:
    """Where a program is. Skips the test without it; where all tests must run (HITHERTO_ALL_TESTS) it fails."""
    path = shutil.which(name)
    if path is not None:
        return path
    message = f"{name} is not installed; Debian's package {_PACKAGES[name]!r} has it"
    if os.environ.get("HITHERTO_ALL_TESTS"):
        pytest.fail(message)
    pytest.skip(message)
