"""How commands talk to a running gateway."""

from __future__ import annotations

from typing import Any

import httpx

from gateway.settings_file import ConfigError


def ask(method: str, url: str, path: str, timeout: float, body: object = None) -> Any:
    """What the gateway at `url` says. Raises `ConfigError` with its own words where it refuses."""
    try:
        reply = httpx.request(method, f"{url.rstrip('/')}{path}", timeout=timeout, trust_env=False, json=body)
    except httpx.HTTPError as error:
        raise ConfigError(f"no gateway answers at {url}: {error}") from error
    try:
        answer = reply.json()
        reply.raise_for_status()
    except (httpx.HTTPError, ValueError) as error:
        raise ConfigError(f"{url}{path}: {_words(reply) or error}") from error
    return answer


def _words(reply: httpx.Response) -> str:
    try:
        said = reply.json()
    except ValueError:
        return ""
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", ""))
    return str(said.get("detail", "")) if isinstance(said, dict) else ""
