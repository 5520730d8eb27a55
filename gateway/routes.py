"""The `models:` section: names that clients ask for → where they may run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field, model_validator

from backends.protocol import Duration, Section
from gateway.settings_file import nearest
from policies import routing
from policies.hedging import HedgeConfig
from policies.retry import RetryConfig
from policies.routing import Capability, Choice, Route, Target


class TargetConfig(Section):
    """One place to try; a bare name is a backend that is asked for the model by the client's name for it."""

    backend: str
    """One of `backends:`."""
    model: str | None = None
    """The model's name there, where it is another."""
    weight: float | None = Field(default=None, ge=0)
    """Targets with weights are equals that share the load, 0: only when nothing else is left; those without are
    fallbacks, in order."""
    context: int | None = Field(default=None, ge=1)
    """The most tokens of prompt and answer together; longer requests go elsewhere."""
    lacks: frozenset[Capability] = frozenset()
    """What it cannot do; requests that need it go elsewhere."""

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        return {"backend": value} if isinstance(value, str) else value


class RouteTimeouts(Section):
    """How long a model's requests may take."""

    first_byte: Duration | None = Field(default=None, gt=0)
    """Of one try, until the first byte of its answer; then the next is tried."""
    total: Duration | None = Field(default=None, gt=0)
    """Of all tries, until the last byte."""


class ModelConfig(Section):
    """Where a model name may run, in order; a bare name is another name for that model."""

    alias: str | None = None
    """Another model that this is another name of; `name: other` is short for it."""
    attempts: tuple[TargetConfig, ...] = Field(default=(), alias="try")
    """Backends in order, by name or as targets (below)."""
    choose: Choice = "sticky"
    """Among targets with weights: `sticky` by conversation, `weighted` at random, or `fastest` first byte."""
    retry: RetryConfig = RetryConfig()
    """What is done about failures."""
    hedge: HedgeConfig | None = None
    """A second try beside the first when that is slow: `p95`, a duration, or `{after, extra}`."""
    timeout: RouteTimeouts = RouteTimeouts()
    """How long its requests may take."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"alias": value}
        if isinstance(value, dict) and isinstance(value.get("hedge"), str):
            return {**value, "hedge": {"after": value["hedge"]}}
        return value

    @model_validator(mode="after")
    def _one_of_both(self) -> ModelConfig:
        if (self.alias is None) == (not self.attempts):
            raise ValueError("a model has either try, with at least one backend, or alias")
        own = (
            getattr(self, name) != field.default for name, field in type(self).model_fields.items() if name != "alias"
        )
        if self.alias is not None and any(own):
            raise ValueError("an alias is tried as the model that it names; it has no settings of its own")
        return self

    def route(self) -> Route:
        targets = tuple(Target(one.backend, one.model, one.weight, one.context, one.lacks) for one in self.attempts)
        return Route(targets, self.choose, self.retry, self.hedge, self.timeout.first_byte, self.timeout.total)


def check_targets(models: Mapping[str, ModelConfig], backends: Iterable[str], names: Iterable[str], key: str) -> None:
    """Refuse backends and aliased models that do not exist. Raises ValueError."""
    known, every = frozenset(backends), (*names, *models)
    for name, entry in models.items():
        for target in entry.attempts:
            if target.backend not in known:
                listed = ", ".join(sorted(known)) or "none"
                hint = nearest(target.backend, known)
                raise ValueError(f"{key}.{name}: there is no backend {target.backend!r} (known: {listed}){hint}")
        seen, at = [name], entry.alias
        while at is not None:
            if at in seen:
                raise ValueError(f"{key}.{name}: the aliases go in a circle: {' → '.join([*seen, at])}")
            seen.append(at)
            if routing.match(at, every) is None:
                raise ValueError(f"{key}.{name}: there is no model {at!r}{nearest(at, every)}")
            at = models[at].alias if at in models else None


def resolve(models: Mapping[str, ModelConfig], inherited: Mapping[str, Route] | None = None) -> dict[str, Route]:
    """The routes by name, aliases as copies of what they name; `inherited` ones may be named, too."""
    routes = {name: entry.route() for name, entry in models.items() if entry.alias is None}
    known = {**(inherited or {}), **routes}
    for name, entry in models.items():
        end = entry.alias
        while end is not None and end in models and models[end].alias is not None:
            end = models[end].alias
        if end is not None and (found := routing.match(end, known)) is not None:
            targets = tuple(replace(one, model=one.model or end) for one in known[found].targets)
            routes[name] = replace(known[found], targets=targets)
    return routes
