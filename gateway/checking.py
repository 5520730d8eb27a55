"""`hitherto check`: which kind of file it is, and whether it is right."""

from __future__ import annotations

from pathlib import Path

from gateway import config, tenants
from gateway.settings_file import ConfigError, parse, read
from gateway.tenants import Surroundings


def check_file(path: Path, against: Path | None) -> str:
    """What was checked. `against`: the configuration whose models and backends tenants may name. Raises `ConfigError`
    that tells everything that is wrong."""
    if path.is_dir():
        found = tenants.load(path, _surroundings(path, against))
        return f"fine ({len(found)} tenants)"
    values = parse(read(path), str(path))
    if "tenant" not in values:
        settings = config.load(path)
        settings.check_exposure()
        if settings.tenants is not None:
            return f"fine, with {len(tenants.load(settings.tenants, settings.surroundings()))} tenants"
        return "fine"
    file = tenants.load_file(path, _surroundings(path.parent, against))
    return f"fine (tenant {file.config.tenant}, {len(file.config.keys)} keys)"


def _surroundings(folder: Path, against: Path | None) -> Surroundings:
    """What the configuration beside or above a folder of tenants has."""
    for path in (
        [against] if against is not None else [folder / "hitherto.yaml", folder.absolute().parent / "hitherto.yaml"]
    ):
        if path.is_file() or path == against:
            return config.load(path).surroundings()
    raise ConfigError(f"{folder}: no hitherto.yaml beside or above it to check tenants against; give one with --config")
