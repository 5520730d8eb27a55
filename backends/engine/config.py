"""The engine's settings, as they stand in `hitherto.yaml` under `backends:`. No torch."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from pydantic import BaseModel, ByteSize, ConfigDict, Field, field_validator, model_validator

from backends.protocol import Duration, Secret


class DiskConfig(BaseModel):
    """A tier in files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str
    """A folder; relative to the data folder."""
    size: ByteSize = Field(gt=0)


class RedisConfig(BaseModel):
    """A tier in Redis, shared by several engines."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: str
    """`redis://HOST:PORT/DB` or `rediss://…`; no password here."""
    password: Secret | None = None
    size: ByteSize = Field(gt=0)
    timeout: Duration = 0.5

    @field_validator("url")
    @classmethod
    def _no_secret(cls, value: str) -> str:
        if urlsplit(value).scheme not in ("redis", "rediss", "unix") or "@" in value:
            raise ValueError("a Redis URL looks like redis://HOST:6379/0; its password goes into `password: env:NAME`")
        return value


class KVConfig(BaseModel):
    """Memory for KV. `device` is reserved when the engine starts and never exceeded."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    device: ByteSize = Field(default=ByteSize(1 << 30), gt=0)
    ram: ByteSize | None = Field(default=None, gt=0)
    """A tier in the engine's memory, beside the device; of use with a GPU."""
    disk: DiskConfig | None = None
    redis: RedisConfig | None = None
    int8: bool = False
    """Keep KV in lower tiers as 8-bit integers: half the bytes, no longer exact; `hitherto verify` tells the effect."""
    ttl: Duration = 7 * 86400.0
    """Blocks in lower tiers that were stored longer ago are gone, and so are those on the device unused for so long."""
    deadline: Duration = 2.0
    """The longest that a request waits for lower tiers before it computes."""


class EngineConfig(BaseModel):
    """`kind: engine`: a Hugging Face model in a process of its own."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["engine"] = "engine"
    model: str
    """A folder, a `.gguf` file, `package:NAME/FILE` of an installed package, or a hub id."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """`auto`: bfloat16 where the processor computes it natively, else float32."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads; None leaves torch's choice, one per core."""
    block: Literal[4, 8, 16, 32, 64] = 16
    """Tokens per KV block, the unit of prefix reuse."""
    prefix_cache: bool = True
    verify_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of answers behind a reused prefix that are computed once more without it, in the background."""
    max_running: int = Field(default=32, ge=1)
    """Requests computed at once; more wait in the queue."""
    max_waiting: int = Field(default=256, ge=1)
    """Requests waiting; more get 503."""
    step_tokens: int = Field(default=512, ge=32)
    """Tokens per forward pass: larger is faster for long prompts, smaller is smoother for those who read along."""
    kv: KVConfig = KVConfig()

    @model_validator(mode="after")
    def _exact(self) -> EngineConfig:
        if self.verify_share and self.kv.int8:
            raise ValueError("verify_share needs exact KV, which kv.int8 gives up; leave one of them out")
        return self
