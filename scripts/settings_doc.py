"""The tables of docs/policies.md, made from the settings' own classes: key, default, meaning.

python -m scripts.settings_doc          writes them into the page
python -m scripts.settings_doc --check  ends with 1 where the page is not current
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ByteSize
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from backends.config import AnthropicConfig, OpenAIConfig, Timeouts, Tls, VllmConfig
from backends.prompt_cache import PromptCacheConfig
from backends.protocol import parse_duration
from gateway.cache.config import SemanticConfig, TenantCacheConfig
from gateway.config import AdminConfig, ClientLimits, LogConfig, TlsConfig
from gateway.ledger import LedgerConfig
from gateway.routes import ModelConfig, RouteTimeouts, TargetConfig
from gateway.telemetry import TelemetryConfig
from gateway.templates import TemplateConfig
from gateway.tenants import KeyConfig, TenantConfig
from policies.breaker import BreakerConfig
from policies.budget import Budget
from policies.hedging import HedgeConfig
from policies.pricing import Price
from policies.rate_limit import Limits
from policies.redaction import Redaction
from policies.retry import RetryConfig

PAGE = Path(__file__).parents[1] / "docs/policies.md"
SECTIONS: dict[str, type[BaseModel]] = {
    "tenant": TenantConfig, "key": KeyConfig, "cache": TenantCacheConfig, "semantic": SemanticConfig,
    "limits": Limits, "budget": Budget, "price": Price, "template": TemplateConfig,
    "prompt-cache": PromptCacheConfig, "redact": Redaction, "model": ModelConfig, "target": TargetConfig,
    "retry": RetryConfig, "hedge": HedgeConfig, "route-timeout": RouteTimeouts, "breaker": BreakerConfig,
    "openai": OpenAIConfig, "anthropic": AnthropicConfig, "vllm": VllmConfig, "timeout": Timeouts, "tls": Tls,
    "admin": AdminConfig, "server-tls": TlsConfig, "clients": ClientLimits,
    "ledger": LedgerConfig, "otel": TelemetryConfig, "log": LogConfig,
}  # fmt: skip


def table(model: type[BaseModel]) -> str:
    """The keys of a section, those that it inherits included."""
    meanings = _meanings(model)
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, info in model.model_fields.items():
        if name == "kind":
            continue
        lines.append(f"| `{info.alias or name}` | {_default(info)} | {meanings.get(name, '')} |")
    return "\n".join(lines)


def _meanings(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings that stand below the fields."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if cls is BaseModel or not issubclass(cls, BaseModel):
            continue
        body = ast.parse(inspect.getsource(cls)).body[0]
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                assert isinstance(field.target, ast.Name)
                found[field.target.id] = re.sub(r"\s+", " ", str(text.value.value)).replace("|", "\\|")
    return found


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "(must be given)"
    value = info.default if info.default is not PydanticUndefined else info.default_factory()  # type: ignore[misc, call-arg]
    if isinstance(value, BaseModel):
        return "as below"
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable(separator='')}`".replace(".0", "")
    if isinstance(value, float) and "parse_duration" in f"{info.metadata}{info.annotation}":
        return f"`{_duration(value)}`"
    if isinstance(value, tuple | dict | frozenset):
        return f"`[{', '.join(map(str, value))}]`" if value else "none"
    return f"`{value}`"


def _duration(seconds: float) -> str:
    text = next(f"{seconds / size:g}{unit}" for unit, size in (("h", 3600), ("m", 60), ("s", 1), ("ms", 0.001))
                if seconds >= size or unit == "ms")  # fmt: skip
    assert parse_duration(text) == seconds
    return text if seconds else "0s"


def rendered(page: str) -> str:
    """The page with its tables made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- keys of {match[1]} -->\n{table(SECTIONS[match[1]])}\n<!-- end -->"

    return re.sub(r"<!-- keys of ([\w-]+) -->\n.*?<!-- end -->", fill, page, flags=re.S)


def main(arguments: list[Any]) -> int:
    old = PAGE.read_text()
    new = rendered(old)
    if arguments == ["--check"]:
        return int(old != new)
    PAGE.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
