"""Tenants' files while the gateway runs: read again when they change, checked aside, and swapped in one step.

A file that cannot be used leaves what was last good of it in force, and says so until it is mended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

from watchfiles import awatch

from gateway.config import Settings
from gateway.metrics import Metrics
from gateway.settings_file import ConfigError
from gateway.tenants import File, Tenants, differences, files_in, load, load_file, mark_of

log = logging.getLogger("hitherto.tenants")

LOOK_SECONDS = 10.0
"""Files are looked at so often even if nobody tells of a change: not every file system does."""


class Registry:
    """The tenants that hold now. `tenants` is replaced as a whole; `wrong` tells what is not in force, by file."""

    def __init__(self, settings: Settings, metrics: Metrics, patient: bool = False) -> None:
        """Raises `ConfigError`: what is broken at the start was never good. `patient`: this process takes the place of
        one that has ended, and starts with what is right."""
        assert settings.tenants is not None
        self._folder, self._around, self._metrics = settings.tenants, settings.surroundings(), metrics
        self.tenants = Tenants([]) if patient else load(self._folder, self._around)
        self.wrong: dict[str, str] = {}
        if patient:
            fresh, self.wrong, _ = self._read()
            self.tenants = fresh or self.tenants
        self.noted: Callable[[str], Awaitable[None]] | None = None
        """Told what has changed."""
        self._lock = asyncio.Lock()
        self._task: asyncio.Task[None] | None = None

    async def open(self) -> None:
        self._task = asyncio.create_task(self._follow(), name="tenants' files")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def reload(self) -> list[str]:
        """Read what has changed: a line for each difference that is in force now."""
        async with self._lock:
            fresh, wrong, changes = await asyncio.to_thread(self._read)
            for where, text in wrong.items():
                if self.wrong.get(where) != text:
                    log.error("%s; what was there before stays in force", text)
            for where in self.wrong.keys() - wrong.keys():
                log.info("%s is in force again", where)
            self.wrong = wrong
            self._metrics.config_reload_failed.set(len(wrong))
            if fresh is not None:
                self.tenants = fresh
            for line in changes:
                log.info("tenants: %s", line)
            if changes and self.noted is not None:
                await self.noted("; ".join(changes)[:2000])
            return changes

    def _read(self) -> tuple[Tenants | None, dict[str, str], list[str]]:
        before = self.tenants
        try:
            paths = files_in(self._folder)
        except ConfigError as error:  # the folder is away: nobody loses a tenant for that
            return None, {str(self._folder): str(error)}, []
        wrong: dict[str, str] = {}
        files = [file for path in paths if (file := self._file(path, before.files.get(path), wrong)) is not None]
        # Of several that claim the same name or key, the one that has it keeps it.
        files.sort(key=lambda file: before.files.get(file.path) is not file)
        while True:
            try:
                fresh = Tenants(files)
                return fresh, wrong, _changes(before, fresh)
            except ConfigError as error:
                bad = next(file for file in files if str(error).startswith(f"{file.path}: "))
                wrong[str(bad.path)] = str(error)
                files.remove(bad)
                if (old := before.files.get(bad.path)) is not None and old is not bad:
                    files.insert(0, old)

    def _file(self, path: Path, old: File | None, wrong: dict[str, str]) -> File | None:
        if old is not None and old.mark == mark_of((path, *old.beside)):
            return old
        try:
            return load_file(path, self._around)
        except ConfigError as error:
            wrong[str(path)] = str(error)
        except Exception as error:  # one file must not stop the others
            log.exception("%s cannot be read", path)
            wrong[str(path)] = f"{path}: {type(error).__name__}: {error}"
        return old

    async def _follow(self) -> None:
        async for _ in _looks(self._folder):
            try:
                await self.reload()
            except Exception:
                log.exception("the tenants' files could not be read again; what was there before stays in force")


async def _looks(folder: Path) -> AsyncIterator[None]:
    """Whenever something in the folder changes, and every few seconds besides."""
    while True:
        try:
            async for _ in awatch(folder, rust_timeout=int(LOOK_SECONDS * 1000), yield_on_timeout=True, debounce=400):
                yield
        except (OSError, RuntimeError):  # no folder, or no more watches
            await asyncio.sleep(LOOK_SECONDS)
            yield


def _changes(before: Tenants, after: Tenants) -> list[str]:
    old = {file.config.tenant: file for file in before.files.values()}
    new = {file.config.tenant: file for file in after.files.values()}
    lines = [f"{name}: new" for name in sorted(new.keys() - old.keys())]
    lines += [f"{name}: gone" for name in sorted(old.keys() - new.keys())]
    for name in sorted(old.keys() & new.keys()):
        if old[name] is not new[name]:
            lines += [f"{name}: {line}" for line in differences(old[name].config, new[name].config)]
    return lines
