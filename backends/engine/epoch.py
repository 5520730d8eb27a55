"""A number that tells KV of before a reload from KV of after it, in every tier. No torch."""

from __future__ import annotations

import os
from pathlib import Path


class Epoch:
    """Kept in a file; 0 where there is none."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @classmethod
    def of(cls, data: Path, engine: str) -> Epoch:
        """That of an engine whose data folder is `data`."""
        return cls(data / "engines" / f"{engine}.epoch")

    def mark(self) -> int:
        """Changes whenever the number does; cheap to ask."""
        try:
            return self._path.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read(self) -> int:
        """The number now. Raises ValueError naming the file if it holds none."""
        try:
            text = self._path.read_text()
        except FileNotFoundError:
            return 0
        try:
            return int(text)
        except ValueError as error:
            raise ValueError(f"{self._path} should hold a number; delete it to begin at 0") from error

    def raise_by_one(self) -> None:
        """From the next start on, older KV is foreign."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_suffix(f".{os.getpid()}.tmp")
        scratch.write_text(str(self.read() + 1))
        scratch.rename(self._path)
