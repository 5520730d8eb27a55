"""`hitherto keys`: keys of tenants in their files, which keep their comments and their order."""

from __future__ import annotations

import fcntl
import getpass
import os
import secrets
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from gateway.config import Settings
from gateway.settings_file import ConfigError, nearest, read
from gateway.stores.contract import Audit
from gateway.stores.sqlite_ledger import SQLiteLedger
from gateway.tenants import File, TenantConfig, files_in, hash_key, load_file

PREFIX = "hk-"


def folder_of(settings: Settings) -> Path:
    """Where the tenants' files are. Raises `ConfigError`."""
    if settings.tenants is None:
        raise ConfigError("no folder of tenants is configured; add tenants: tenants/ to hitherto.yaml")
    return settings.tenants


def new(settings: Settings, tenant: str, name: str, lifetime: float | None) -> tuple[str, Path]:
    """A new key of a tenant, whose file is made if there is none: the key, which is not kept, and the file."""
    TenantConfig.model_validate({"tenant": tenant})
    folder = folder_of(settings)
    folder.mkdir(parents=True, exist_ok=True)
    with _alone(folder):
        return _added(settings, folder, tenant, name, lifetime)


def _added(settings: Settings, folder: Path, tenant: str, name: str, lifetime: float | None) -> tuple[str, Path]:
    file = _tenants(settings).get(tenant)
    path = file.path if file is not None else folder / f"{tenant}.yaml"
    if file is None and path.exists():
        load_file(path, settings.surroundings())  # which says what is wrong with it
        raise ConfigError(f"{path}: this file is of another tenant")
    key = PREFIX + secrets.token_urlsafe(32)
    entry: Any = hash_key(key)
    if name or lifetime is not None:
        entry = {"hash": entry, **({"name": name} if name else {})}
        if lifetime is not None:
            entry["expires"] = (datetime.now(UTC) + timedelta(seconds=lifetime)).replace(microsecond=0).isoformat()
    document: Any = _document(path) if file is not None else {"tenant": tenant}
    if not document.get("keys"):
        document["keys"] = []
    document["keys"].append(entry)
    _write(settings, path, document)
    _note(settings, "keys new", f"{tenant}: {hash_key(key)[7:19]}")
    return key, path


def revoke(settings: Settings, key_id: str) -> tuple[str, Path]:
    """Take a key out of its tenant's file; (tenant, file). Raises `ConfigError` unless exactly one begins so."""
    with _alone(folder_of(settings)):
        return _revoked(settings, key_id)


def _revoked(settings: Settings, key_id: str) -> tuple[str, Path]:
    files = _tenants(settings)
    found = [(file, key) for file in files.values() for key in file.config.keys if key.id.startswith(key_id)]
    if len(found) != 1:
        ids = [key.id for file in files.values() for key in file.config.keys]
        hint = nearest(key_id, ids) if not found else ""
        raise ConfigError(f"{len(found)} keys begin with {key_id!r}; hitherto keys list shows them{hint}")
    file, key = found[0]
    document = _document(file.path)
    places = [place for place, one in enumerate(document["keys"]) if key.hash in (one, _hash_of(one))]
    for place in reversed(places):
        del document["keys"][place]
    _write(settings, file.path, document)
    _note(settings, "keys revoke", f"{file.config.tenant}: {key_id}")
    return file.config.tenant, file.path


def listed(settings: Settings) -> list[tuple[str, str, str, str]]:
    """(tenant, id, name, expiry) of every key."""
    return [
        (name, key.id, key.name, key.expires.isoformat() if key.expires is not None else "")
        for name, file in sorted(_tenants(settings).items())
        for key in file.config.keys
    ]


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let nobody else change the files at the same time."""
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _hash_of(entry: Any) -> str:
    return str(entry.get("hash")) if isinstance(entry, dict) else str(entry)


def _tenants(settings: Settings) -> dict[str, File]:
    folder = folder_of(settings)
    found = {}
    for path in files_in(folder) if folder.exists() else ():
        try:
            file = load_file(path, settings.surroundings())
        except ConfigError as error:  # which must not keep anybody from revoking a key of another
            print(f"hitherto: {error}", file=sys.stderr)
            continue
        found[file.config.tenant] = file
    return found


def _document(path: Path) -> Any:
    return _yaml().load(read(path))


def _yaml() -> Any:
    from ruamel.yaml import YAML  # keeps comments, which PyYAML does not

    yaml = YAML()
    yaml.width = 4096
    yaml.preserve_quotes = True
    return yaml


def _write(settings: Settings, path: Path, document: Any) -> None:
    """The whole file or nothing, and only if it is valid; a running gateway sees it within a moment."""
    descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".new")
    aside = Path(scratch)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            _yaml().dump(document, file)
        load_file(path, settings.surroundings(), aside.read_text(encoding="utf-8"))
        like = path.stat() if path.exists() else path.parent.stat()
        aside.chmod(stat.S_IMODE(like.st_mode) if path.exists() else 0o640)
        if os.geteuid() == 0:  # a file that only root may read is one that the gateway cannot
            os.chown(aside, like.st_uid, like.st_gid)
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def _note(settings: Settings, action: str, detail: str) -> None:
    """Keep in the audit log of the gateway's data folder what was done; without a ledger there is none."""
    path = settings.data / "ledger.sqlite"
    if not settings.ledger or not path.exists():  # made here it might be somebody's whom the gateway is not
        return
    try:
        store = SQLiteLedger(path, settings.ledger.keep())
        store.note(Audit(time.time(), f"{getpass.getuser()} at the command line", action, detail))
        store.close()
    except Exception as error:  # what is done is done
        print(f"hitherto: it is done, but not in the audit log: {error}", file=sys.stderr)
