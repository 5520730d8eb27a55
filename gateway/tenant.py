"""Who is asking, and what holds for them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from backends.prompt_cache import PromptCacheConfig
from gateway.templates import Templates
from policies import routing
from policies.budget import Budget
from policies.cacheability import CacheRules
from policies.rate_limit import Limit, Limits, Rates
from policies.redaction import Redaction
from policies.routing import Route

_NAME_MOST = 64
"""Longer names of users are remembered by their hash."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What a tenant's file decides, made ready for use; many tenants may share parts of it."""

    rules: CacheRules = CacheRules()
    models: tuple[str, ...] = ("*",)
    routes: Mapping[str, Route] = field(default_factory=dict)
    """The tenant's own; they come before the gateway's."""
    limits: Limits = Limits()
    budget: Budget | None = None
    templates: Templates = field(default_factory=Templates)
    prompt_cache: PromptCacheConfig = PromptCacheConfig()
    redaction: Redaction = Redaction()
    user_from: str = "body"
    relay: Literal["compute", "all"] = "compute"
    limited: bool = False
    """Whether there are limits or a budget."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who is billed and isolated. `credentials` are forwarded upstream (transparent mode only)."""

    name: str
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    policy: Policy = field(default_factory=Policy, repr=False)
    key: str = ""
    """Which of its keys was shown: the beginning of that key's hash."""

    def user(self, headers: Mapping[str, str], body: Mapping[str, Any]) -> str:
        """The end user that a request is for; empty if it does not say."""
        source = self.policy.user_from
        if source != "body":
            value: Any = headers.get(source.removeprefix("header:").lower())
        elif (value := body.get("user")) is None and isinstance(about := body.get("metadata"), dict):
            value = about.get("user_id")  # Anthropic's word
        if not isinstance(value, str) or len(value) <= _NAME_MOST:
            return value if isinstance(value, str) else ""
        return hashlib.blake2b(value.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()

    def limits(self, user: str, model: str) -> list[Limit]:
        """Every limit that a request meets."""
        limits = self.policy.limits
        found = _limits(self.name, limits)
        found += _limits(f"{self.name}|user|{user}", limits.per_user)
        entry = routing.match(model, limits.per_model)
        return found + (_limits(f"{self.name}|model|{entry}", limits.per_model[entry]) if entry is not None else [])


def _limits(subject: str, rates: Rates) -> list[Limit]:
    found = [Limit(subject, kind, limit, window) for kind, limit, window in rates.windows()]
    if rates.concurrency is not None:
        found.append(Limit(subject, "concurrency", rates.concurrency, 0.0))
    return found
