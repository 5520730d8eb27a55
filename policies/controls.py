"""What a caller may ask of the answer cache. It can only tighten: less reading, less writing, fresher, more similar."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Controls:
    """What one request asks of the cache. It can only tighten: less reading, less writing, fresher, more similar."""

    no_cache: bool = False
    no_store: bool = False
    only_if_cached: bool = False
    max_age: float | None = None
    ttl: float | None = None
    threshold: float | None = None
    namespace: str = ""
    exact_only: bool = False
    tags: tuple[str, ...] = ()


class MalformedControl(ValueError):
    """A control header that cannot be understood; the text names it."""


MAX_TAGS = 32
_TAG = re.compile(r"[\x21-\x2b\x2d-\x7e]{1,128}")
_LITELLM = frozenset({"ttl", "s-maxage", "s-max-age", "no-cache", "no-store", "namespace", "use-cache"})


def is_litellm_control(value: object) -> bool:
    """Whether the `cache` field of a body is LiteLLM's request control: ours to obey, nothing for the backend."""
    return isinstance(value, dict) and bool(value) and _LITELLM.issuperset(value)


def parse_controls(headers: Mapping[str, str], cache: object = None) -> Controls:
    """What a request says by its headers (lower-case names), and by the `cache` field of its body.

    `Cache-Control` (RFC 9111 section 5.2.1), `x-hitherto-*`, Portkey's `x-portkey-cache-*` and `x-portkey-config`,
    LiteLLM's `cache: {…}`. Where several speak, the strictest holds. Raises `MalformedControl`.
    """
    found = [_own(headers)]
    if any(name.startswith("x-portkey-") for name in headers):
        found.append(_portkey(headers))
    if is_litellm_control(cache):
        assert isinstance(cache, dict)
        found.append(_litellm(cache))
    return found[0] if len(found) == 1 else _strictest(found)


def _strictest(controls: list[Controls]) -> Controls:
    def least(values: list[float | None]) -> float | None:
        return min((value for value in values if value is not None), default=None)

    return Controls(
        no_cache=any(c.no_cache for c in controls),
        no_store=any(c.no_store for c in controls),
        only_if_cached=any(c.only_if_cached for c in controls),
        max_age=least([c.max_age for c in controls]),
        ttl=least([c.ttl for c in controls]),
        threshold=max((c.threshold for c in controls if c.threshold is not None), default=None),
        namespace="\n".join(c.namespace for c in controls if c.namespace),
        exact_only=any(c.exact_only for c in controls),
        tags=tuple(dict.fromkeys(tag for c in controls for tag in c.tags)),
    )


def _portkey(headers: Mapping[str, str]) -> Controls:
    mode, ttl = "", None
    if headers.get("x-portkey-config", "").lstrip().startswith("{"):
        try:
            cache = json.loads(headers["x-portkey-config"]).get("cache")
        except ValueError as error:
            raise MalformedControl(f"x-portkey-config is not JSON: {error}") from error
        if isinstance(cache, dict):
            mode, ttl = str(cache.get("mode", "")), _seconds("x-portkey-config: cache.max_age", cache.get("max_age"))
    return Controls(
        no_cache=headers.get("x-portkey-cache-force-refresh", "").lower() == "true",
        namespace=headers.get("x-portkey-cache-namespace", ""),
        exact_only=mode == "simple",
        ttl=ttl,
    )


def _litellm(cache: dict[str, Any]) -> Controls:
    freshest = cache.get("s-maxage", cache.get("s-max-age"))
    return Controls(
        no_cache=_flag("no-cache", cache),
        no_store=_flag("no-store", cache),
        max_age=_seconds("cache.s-maxage", freshest),
        ttl=_seconds("cache.ttl", cache.get("ttl")),
        namespace=str(cache.get("namespace") or ""),
    )


def _flag(name: str, cache: Mapping[str, Any]) -> bool:
    value = cache.get(name, False)
    if value in (True, "true", "True"):
        return True
    if value in (False, None, "false", "False"):
        return False
    raise MalformedControl(f"cache.{name} must be true or false, not {value!r}")


def _seconds(name: str, value: object) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e12:
        raise MalformedControl(f"{name} needs a number of seconds, not {value!r}")
    return float(value)


def _own(headers: Mapping[str, str]) -> Controls:
    directives: dict[str, str] = {}
    if "cache-control" in headers:
        for item in headers["cache-control"].lower().split(","):
            name, _, value = item.strip().partition("=")
            directives[name] = value.strip('"')
    max_age = None
    if "max-age" in directives:
        if not re.fullmatch("[0-9]{1,12}", directives["max-age"]):
            raise MalformedControl(f"cache-control: max-age needs whole seconds, not {directives['max-age']!r}")
        max_age = float(directives["max-age"])
    return Controls(
        no_cache="no-cache" in directives,
        no_store="no-store" in directives,
        only_if_cached="only-if-cached" in directives,
        max_age=max_age,
        ttl=_number(headers, "x-hitherto-ttl", 0, float("inf"), "s"),
        threshold=_number(headers, "x-hitherto-threshold", 0, 1),
        namespace=headers.get("x-hitherto-namespace", ""),
        tags=_tags(headers["x-hitherto-tags"]) if "x-hitherto-tags" in headers else (),
    )


def _tags(text: str) -> tuple[str, ...]:
    tags = tuple(dict.fromkeys(tag.strip() for tag in text.split(",") if tag.strip()))
    if len(tags) > MAX_TAGS or not all(_TAG.fullmatch(tag) for tag in tags):
        raise MalformedControl(
            f"x-hitherto-tags takes up to {MAX_TAGS} words of up to 128 characters, with commas between"
        )
    return tags


def _number(headers: Mapping[str, str], name: str, low: float, high: float, unit: str = "") -> float | None:
    if name not in headers:
        return None
    text = headers[name].strip()
    if not re.fullmatch(r"[0-9]{1,12}(\.[0-9]+)?" + (f"{unit}?" if unit else ""), text):
        raise MalformedControl(f"{name} needs a number, not {text!r}")
    value = float(text.removesuffix(unit) if unit else text)
    if not low <= value <= high:
        raise MalformedControl(f"{name} must be between {low:g} and {high:g}, not {text}")
    return value
