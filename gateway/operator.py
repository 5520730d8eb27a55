"""How commands talk to a running gateway."""

from __future__ import annotations

import os
from typing import Any

import httpx

from gateway.settings_file import ConfigError

KEY = "HITHERTO_ADMIN_KEY"
"""The environment variable with the key that commands show: the admin key, or for reports also a tenant's."""


def ask(method: str, url: str, path: str, timeout: float, body: object = None) -> Any:
    """What the gateway at `url` says. Raises `ConfigError` with its own words where it refuses."""
    reply = _reply(method, url, path, timeout, body)
    try:
        return reply.json()
    except ValueError as error:
        raise ConfigError(f"{url}{path}: {error}") from error


def text_of(url: str, path: str, timeout: float) -> str:
    """The same for what is no JSON."""
    return _reply("GET", url, path, timeout, None).text


def _reply(method: str, url: str, path: str, timeout: float, body: object) -> httpx.Response:
    key = os.environ.get(KEY, "")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    address = f"{url.rstrip('/')}{path}"
    try:
        reply = httpx.request(method, address, timeout=timeout, trust_env=False, json=body, headers=headers)
    except httpx.HTTPError as error:
        raise ConfigError(f"no gateway answers at {url}: {error}") from error
    if reply.is_error:
        hint = f" (its key is read from {KEY})" if reply.status_code == 401 else ""
        raise ConfigError(f"{url}{path}: {_words(reply) or reply.status_code}{hint}")
    return reply


def _words(reply: httpx.Response) -> str:
    try:
        said = reply.json()
    except ValueError:
        return ""
    error = said.get("error") if isinstance(said, dict) else None
    if isinstance(error, dict):
        return str(error.get("message", ""))
    detail = said.get("detail", "") if isinstance(said, dict) else ""
    if isinstance(detail, list):  # of what is wrong with a question
        return "; ".join(f"{'.'.join(map(str, one.get('loc', [])[1:]))}: {one.get('msg', '')}" for one in detail)
    return str(detail)
