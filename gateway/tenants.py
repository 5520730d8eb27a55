"""The tenants of a folder, one YAML file each: read, checked, and found by the key that a client shows."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import AwareDatetime, Field, ValidationInfo, field_validator, model_validator

from backends.prompt_cache import PromptCacheConfig
from backends.protocol import Section
from gateway.cache.config import SemanticConfig, TenantCacheConfig, overlaid
from gateway.routes import ModelConfig, check_targets, resolve
from gateway.settings_file import ConfigError, nearest, parse, read, validated
from gateway.templates import TemplateConfig, Templates, with_files_beside
from gateway.tenant import Policy, Tenant
from policies import routing
from policies.budget import Budget, Downgrade
from policies.rate_limit import Limits
from policies.redaction import Redaction
from policies.routing import Route

_HASH = re.compile(r"sha256:[0-9a-f]{64}")
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"


class KeyConfig(Section):
    """One key of a tenant: never itself, only its hash."""

    hash: str
    """`sha256:` and the 64 hexadecimal digits of the key's SHA-256."""
    name: str = ""
    """What it is for."""
    expires: AwareDatetime | None = None
    """From then on it is refused; a time with its zone, like 2027-01-01T00:00:00Z."""

    @field_validator("hash")
    @classmethod
    def _hashed(cls, value: str) -> str:
        if not _HASH.fullmatch(value):
            raise ValueError(
                "a key is given by its hash, sha256: and 64 hexadecimal digits; hitherto keys new makes one"
            )
        return value

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"hash": value} if isinstance(value, str) else value

    @property
    def id(self) -> str:
        """What a key is called in lists and logs: the beginning of its hash."""
        return self.hash.removeprefix("sha256:")[:12]


@dataclass(frozen=True)
class Surroundings:
    """What the gateway's own configuration has that a tenant's file may name or inherit."""

    backends: frozenset[str] = frozenset()
    routes: Mapping[str, Route] = field(default_factory=dict)
    cache: TenantCacheConfig = TenantCacheConfig()
    limits: Limits = Limits()
    budget: Budget | None = None
    prompt_cache: PromptCacheConfig = PromptCacheConfig()
    redact: Redaction = Redaction()
    user_from: str = "body"
    templates: Mapping[str, TemplateConfig] = field(default_factory=dict)


class TenantConfig(Section):
    """A tenant's file. What it does not say is as in the gateway's configuration."""

    tenant: str = Field(pattern=NAME)
    """Its name: letters, digits, `.`, `_` and `-`."""
    keys: tuple[KeyConfig, ...] = ()
    """Its keys, each a hash or a mapping (below)."""
    models: tuple[str, ...] = ("*",)
    """Names and patterns of the models that it may ask for."""
    routes: dict[str, ModelConfig] = {}
    """Models that run elsewhere for this tenant, or that only it has."""
    cache: TenantCacheConfig | None = None
    """Key by key in place of the gateway's `cache:`."""
    limits: Limits | None = None
    """As a whole in place of the gateway's `limits:`."""
    budget: Budget | None = None
    """As a whole in place of the gateway's `budget:`."""
    templates: dict[str, TemplateConfig] = {}
    """System prompts that clients call by name, besides the gateway's."""
    prompt_cache: PromptCacheConfig | None = None
    """`off`, `report`, `on`, or a mapping (below); in place of the gateway's."""
    redact: Redaction | None = None
    """Besides what the gateway's `redact:` asks for."""
    user_from: str | None = Field(default=None, pattern=r"^(body|header:[A-Za-z0-9-]+)$")
    """Where the end user's name stands: `body` (the field `user`) or `header:NAME`."""

    relay: Literal["compute", "all"] = "compute"
    """Which paths are passed on that the gateway knows nothing of: those that only compute, or also those that keep
    things at the provider (files, batches …), where tenants share an account."""

    @model_validator(mode="after")
    def _fits(self, info: ValidationInfo) -> TenantConfig:
        around = (info.context or {}).get("around")
        if around is None:
            return self
        check_targets(self.routes, around.backends, around.routes, "routes")
        names = (*around.routes, *self.routes)
        for model in self.models:
            known = any(routing.allows([name], model) or routing.allows([model], name) for name in names)
            if not known:
                raise ValueError(f"models: nothing is routed that {model!r} names{nearest(model, names)}")
        when = self.budget.when_spent if self.budget is not None else None
        if isinstance(when, Downgrade) and routing.match(when.downgrade, names) is None:
            raise ValueError(
                f"budget: there is no model {when.downgrade!r} to go down to{nearest(when.downgrade, names)}"
            )
        if self.cache is not None and isinstance(self.cache.semantic, SemanticConfig):
            if around.cache.semantic is False and "semantic" in self.cache.model_fields_set:
                raise ValueError("cache.semantic: the gateway's own cache.semantic is off")
            if "deadline" in self.cache.semantic.model_fields_set:
                raise ValueError("cache.semantic.deadline: the deadline is the gateway's; it stands in hitherto.yaml")
        return self

    def policy(self, around: Surroundings) -> Policy:
        """What holds for this tenant."""
        cache = around.cache if self.cache is None else overlaid(around.cache, self.cache)
        limits, budget = self.limits or around.limits, self.budget or around.budget
        redaction = around.redact if self.redact is None else around.redact.and_also(self.redact)
        models = self.models
        if budget is not None and isinstance(budget.when_spent, Downgrade) and models != ("*",):
            models = (*models, budget.when_spent.downgrade)
        return Policy(
            # Without the text of a stored question nothing can be compared with it but for being the same.
            rules=cache.rules() if redaction.text else replace(cache.rules(), semantic=False),
            models=models,
            routes=resolve(self.routes, around.routes),
            limits=limits,
            budget=budget,
            templates=Templates.declared({**around.templates, **self.templates}),
            prompt_cache=self.prompt_cache or around.prompt_cache,
            redaction=redaction,
            user_from=self.user_from or around.user_from,
            relay=self.relay,
            limited=budget is not None or limits != Limits(),
        )


def hash_key(key: str) -> str:
    """As it stands in a file."""
    return f"sha256:{hashlib.sha256(key.encode('utf-8', 'surrogatepass')).hexdigest()}"


@dataclass(frozen=True)
class File:
    """A tenant's file as it was read; `mark` changes with its content."""

    path: Path
    beside: tuple[Path, ...]
    """The templates' files."""
    mark: tuple[object, ...]
    config: TenantConfig
    tenant: Tenant
    """By itself; whoever shows a key gets a copy that says which."""


class Tenants:
    """All tenants of one reading: immutable, so that a request keeps the rules that it began with."""

    def __init__(self, files: Sequence[File]) -> None:
        """Raises `ConfigError` where two files claim the same name or key."""
        self.files = {file.path: file for file in files}
        self.by_name: dict[str, Tenant] = {}
        self._by_hash: dict[str, tuple[Tenant, KeyConfig]] = {}
        where: dict[str, Path] = {}
        for file in files:
            name = file.config.tenant
            if name in self.by_name:
                raise ConfigError(f"{file.path}: tenant: {name!r} is also in {where[name]}")
            self.by_name[name], where[name] = file.tenant, file.path
            for key in file.config.keys:
                if key.hash in self._by_hash:
                    other = self._by_hash[key.hash][0].name
                    raise ConfigError(f"{file.path}: keys: the key {key.id}… is also in {where[other]}")
                shown = Tenant(name, policy=file.tenant.policy, key=key.id)
                self._by_hash[key.hash] = (shown, key)

    def __len__(self) -> int:
        return len(self.by_name)

    def find(self, key: str) -> tuple[Tenant, KeyConfig] | None:
        """Whose key it is. It is hashed before anything is compared, so the time tells nothing of stored keys."""
        hashed = hash_key(key)
        found = self._by_hash.get(hashed)
        return found if found is not None and hmac.compare_digest(found[1].hash, hashed) else None


def is_expired(key: KeyConfig) -> bool:
    """Whether a key's time is up."""
    return key.expires is not None and key.expires <= datetime.now(UTC)


def files_in(folder: Path) -> list[Path]:
    """The tenants' files of a folder. Raises `ConfigError`."""
    try:
        return sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.name[0] != ".")
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from error


def load_file(path: Path, around: Surroundings, text: str | None = None) -> File:
    """One tenant. Raises `ConfigError`."""
    before = mark_of((path,))  # before it is read: what is written meanwhile is another mark
    text = read(path) if text is None else text
    values, beside = with_files_beside(path, parse(text, str(path)))
    mark = (*before, *mark_of(beside))
    config = validated(TenantConfig, values, str(path), text, around=around)
    tenant = Tenant(config.tenant, policy=config.policy(around))
    return File(path, tuple(beside), mark, config, tenant)


def mark_of(paths: Iterable[Path]) -> tuple[object, ...]:
    """What changes when one of the files does."""
    marks = list[object]()
    for path in paths:
        try:
            stat = path.expanduser().stat()
            marks.append((stat.st_mtime_ns, stat.st_size, stat.st_ino))
        except OSError:
            marks.append(None)
    return tuple(marks)


def load(folder: Path, around: Surroundings) -> Tenants:
    """All tenants of a folder. Raises `ConfigError` that tells everything that is wrong."""
    files, wrong = [], []
    for path in files_in(folder):
        try:
            files.append(load_file(path, around))
        except ConfigError as error:
            wrong.append(str(error))
    if wrong:
        raise ConfigError("\n".join(wrong))
    return Tenants(files)


def differences(old: TenantConfig, new: TenantConfig) -> Iterator[str]:
    """What changed between two readings of a file, a line each."""
    before, after = dict(_flat(old.model_dump(by_alias=True))), dict(_flat(new.model_dump(by_alias=True)))
    for key in sorted(before.keys() | after.keys()):
        if before.get(key) != after.get(key):
            yield f"{key}: {_shown(key, before.get(key))} → {_shown(key, after.get(key))}"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _flat(item, f"{path}.{name}" if path else str(name))
    else:
        yield path, value


def _shown(key: str, value: Any) -> str:
    if key == "keys":
        return "[" + ", ".join(KeyConfig.model_validate(item).id for item in value or ()) + "]"
    text = "–" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
