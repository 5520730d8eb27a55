"""Printing results as Markdown, with the conditions that they were measured under."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def conditions(**extra: str) -> str:
    """Machine, versions and date in one line."""
    processor = platform.processor() or platform.machine()
    try:
        names = [
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ]
        processor = names[0] if names else processor
    except OSError:
        pass
    versions = []
    for package in ("torch", "transformers", "aiohttp", "uvicorn"):
        try:
            versions.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            pass
    facts = {"cores": str(os.cpu_count()), "processor": processor, "Python": sys.version.split()[0], **extra}
    date = datetime.now(UTC).strftime("%Y-%m-%d")
    return f"{date}; " + ", ".join(f"{name} {value}" for name, value in facts.items()) + "; " + ", ".join(versions)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; the first column is text, the others are figures."""
    widths = [max(len(row[column]) for row in [headings, *rows]) for column in range(len(headings))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in [headings, *rows]
    ]
    rule = (
        "|" + "|".join("-" * (width + 2) if not n else "-" * (width + 1) + ":" for n, width in enumerate(widths)) + "|"
    )
    return "\n".join([lines[0], rule, *lines[1:]])


def show(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str) -> None:
    """Print a Markdown table."""
    print(f"\n### {title}\n\n{table(headings, rows)}\n\n{note}")
