"""What the providers say of tokens, each in its own words, in one form. `prompt` always includes what was cached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from backends.protocol import Usage

_MOST = 1 << 40
"""More tokens than any answer has; numbers are what others say."""


def read(usage: object) -> Usage | None:
    """OpenAI (chat and responses), Anthropic, Gemini and DeepSeek; None if it is none of them."""
    if not isinstance(usage, dict):
        return None
    if "promptTokenCount" in usage:
        return _gemini(usage)
    gateway = "prompt_tokens" in usage  # one that adds Anthropic's fields to OpenAI's, whose prompt has them in it
    if not gateway and ("cache_read_input_tokens" in usage or "cache_creation_input_tokens" in usage):
        return _anthropic(usage)
    prompt = _first(usage, "prompt_tokens", "input_tokens")
    completion, total = _first(usage, "completion_tokens", "output_tokens"), _first(usage, "total_tokens")
    if prompt is None or (completion is None and total is None):
        return None
    # Embeddings tell no completion; some providers leave what was thought out of it, but not out of the total.
    completion = max(completion or 0, (total or 0) - prompt)
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    if not isinstance(details, dict):
        details = {}
    cached = _first(details, "cached_tokens")
    if cached is None:
        cached = _first(usage, "prompt_cache_hit_tokens", "cache_read_input_tokens")  # DeepSeek; LiteLLM
    tiers = _mapping(details, "cached_by_tier") if "cached_by_tier" in details else {}
    sources = {str(name): n for name, n in tiers.items() if isinstance(n, int)}
    written = _first(details, "cache_write_tokens", "cache_creation_tokens")
    if written is None:
        written = _first(usage, "cache_creation_input_tokens")
    return Usage(prompt, completion, cached, sources, written)


def _anthropic(usage: Mapping[str, Any]) -> Usage | None:
    """`input_tokens` leaves out what was read from the cache and what was written to it."""
    fresh, completion = _first(usage, "input_tokens"), _first(usage, "output_tokens")
    if fresh is None:
        return None
    cached = _first(usage, "cache_read_input_tokens") or 0
    written = _first(usage, "cache_creation_input_tokens") or 0
    hour = _first(_mapping(usage, "cache_creation"), "ephemeral_1h_input_tokens") or 0
    return Usage(fresh + cached + written, completion or 0, cached, {}, written, hour)


def _gemini(usage: Mapping[str, Any]) -> Usage:
    """`thoughtsTokenCount` is billed as output and not in `candidatesTokenCount`."""
    completion = (_first(usage, "candidatesTokenCount") or 0) + (_first(usage, "thoughtsTokenCount") or 0)
    prompt = (_first(usage, "promptTokenCount") or 0) + (_first(usage, "toolUsePromptTokenCount") or 0)
    return Usage(prompt, completion, _first(usage, "cachedContentTokenCount") or 0)


def merged(earlier: Mapping[str, Any], later: Mapping[str, Any]) -> dict[str, Any]:
    """The usage of a stream that tells it in several events (Anthropic): later numbers replace earlier ones."""
    return {**earlier, **{name: value for name, value in later.items() if value is not None}}


def _first(values: Mapping[str, Any], *names: str) -> int | None:
    for name in names:
        value = values.get(name)
        if type(value) is int:
            return value if 0 <= value <= _MOST else 0 if value < 0 else _MOST
    return None


def _mapping(values: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = values.get(name)
    return value if isinstance(value, dict) else {}
