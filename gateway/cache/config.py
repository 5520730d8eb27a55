"""The `cache:` section, of the gateway and of a tenant."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ByteSize, Field, field_validator

from backends.protocol import Duration, Section
from gateway.settings_file import nearest
from policies import volatility
from policies.cacheability import CacheRules, Judge, Sampling

LOOKUP_DEADLINE = 0.050


def _share(value: object) -> object:
    """`"2%"` → 0.02; numbers are shares already."""
    if isinstance(value, str) and (match := re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%\s*", value)):
        return float(match[1]) / 100
    if isinstance(value, str | bool):
        raise ValueError(f"a share is a number from 0 to 1 or a percentage like 2%, not {value!r}")
    return value


Share = Annotated[float, BeforeValidator(_share)]
"""A number from 0 to 1, written in config files as such or in per cent."""


class JudgeConfig(Section):
    """A model that judges, and how often it may be asked."""

    model: str
    """Its name as clients would ask for it."""
    decides: Literal["audits", "hits"] = "audits"
    """`hits`: it also has the last word on every semantic hit, in the verifier's place; give `deadline` enough time."""
    per_day: int = Field(default=1000, ge=1)
    """So often it is asked in a day; then rules alone decide, and hits are refused."""

    def judge(self) -> Judge:
        return Judge(self.model, self.decides == "hits", self.per_day)


class SemanticConfig(Section):
    """Answers to the same question in other words."""

    mode: Literal["serve", "shadow"] = "serve"
    """`shadow`: semantic hits are not served but counted, and compared with the fresh answers (`hitherto cache
    risk`)."""
    max_wrong_rate: Share = Field(default=0.03, gt=0.0, le=0.5)
    """The share of semantic hits that may be wrong, like 1%: what is served is chosen so that it is kept."""
    threshold: float | None = Field(default=None, ge=0.0, le=1.0)
    """The cosine that a stored question must reach beside that; by default 0.5 where a verifier decides, 0.85
    without."""
    audit: Share = Field(default=0.02, ge=0.0, le=1.0)
    """The share of semantic hits that are computed as well, in the background, to see whether they were right."""
    history: Literal["exact", "standalone"] = "exact"
    """`standalone`: a last turn that means the same whatever was said before may meet an answer from another
    conversation."""
    judge: JudgeConfig | None = None
    """A model that is asked where rules cannot tell whether two answers are the same."""
    alias_margin: float = Field(default=0.10, ge=0.0, le=1.0)
    """Without a verifier: a question this little below the threshold becomes an alias if its fresh answer is the
    neighbour's."""
    share_in_flight: bool = False
    """Whether a question may share the answer that a nearly identical one is getting just now."""
    deadline: Duration = Field(default=LOOKUP_DEADLINE, gt=0)
    """A lookup that takes longer lets the request go on as a miss. The gateway's; not a tenant's."""


class BucketsConfig(Section):
    """Several answers to a request that wants variety, served in turn."""

    buckets: int = Field(ge=1, le=100)


class TenantCacheConfig(Section):
    """The answer cache, as far as each tenant may have it its own way."""

    exact: bool = True
    """The whole answer cache."""
    semantic: SemanticConfig | Literal[False] = SemanticConfig()
    """Answers to the same question in other words; `false` turns them off."""
    ttl: Duration = 86400.0
    """An answer's life, counted from storing."""
    sampling: Sampling | BucketsConfig = "reuse"
    """For requests with temperature above 0 or none: `reuse`, `exact-only`, `never`, or `{buckets: N}`."""
    stale_if_error: Duration = 0.0
    """How long after its time an answer still serves when no backend gives one."""
    stale_while_revalidate: Duration = 0.0
    """How long after its time an answer still serves while a fresh one is computed."""
    volatile: dict[str, Duration] = {}
    """Class of volatile questions → how long their answers are reused; what is not named keeps its default."""
    per_user: bool = False
    """Whether answers are kept apart by end user, too."""

    @field_validator("volatile")
    @classmethod
    def _known_classes(cls, value: dict[str, float]) -> dict[str, float]:
        for name in value:
            if name not in volatility.DEFAULTS:
                known = ", ".join(volatility.DEFAULTS)
                raise ValueError(f"there is no class {name!r} (known: {known}){nearest(name, volatility.DEFAULTS)}")
        return value

    @field_validator("semantic", mode="before")
    @classmethod
    def _switch(cls, value: object) -> object:
        if value == "shadow":
            return SemanticConfig(mode="shadow")
        return SemanticConfig() if value is True else value

    def rules(self) -> CacheRules:
        semantic, off = self.semantic or SemanticConfig(), self.semantic is False
        return CacheRules(
            exact=self.exact,
            semantic=not off,
            threshold=semantic.threshold,
            max_wrong_rate=semantic.max_wrong_rate,
            shadow=semantic.mode == "shadow",
            audit=semantic.audit,
            judge=semantic.judge.judge() if semantic.judge is not None else None,
            drops_history=semantic.history == "standalone",
            ttl=self.ttl,
            sampling="reuse" if isinstance(self.sampling, BucketsConfig) else self.sampling,
            buckets=self.sampling.buckets if isinstance(self.sampling, BucketsConfig) else 1,
            stale_if_error=self.stale_if_error,
            stale_while_revalidate=self.stale_while_revalidate,
            volatile={**volatility.DEFAULTS, **self.volatile},
            grey=semantic.alias_margin,
            share_near=semantic.share_in_flight and not off,
            per_user=self.per_user,
        )


class CacheConfig(TenantCacheConfig):
    """The answer cache of the gateway; what a tenant's file does not say is as it is here."""

    size: ByteSize = Field(default=ByteSize(2 << 30), gt=0)


def overlaid(base: TenantCacheConfig, own: TenantCacheConfig) -> TenantCacheConfig:
    """The gateway's section with what a tenant's file sets in its place."""
    changes: dict[str, Any] = {name: getattr(own, name) for name in own.model_fields_set}
    if isinstance(own.semantic, SemanticConfig) and isinstance(base.semantic, SemanticConfig):
        set_here = {name: getattr(own.semantic, name) for name in own.semantic.model_fields_set}
        changes["semantic"] = base.semantic.model_copy(update=set_here)
    if own.volatile:
        changes["volatile"] = {**base.volatile, **own.volatile}
    return base.model_copy(update=changes)
