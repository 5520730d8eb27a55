"""Who is asking: from the credential of a request to a tenant."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Protocol

from gateway.errors import UnknownKey
from gateway.reload import Registry
from gateway.tenant import Policy, Tenant
from gateway.tenants import is_expired

_CREDENTIAL = re.compile(r".*(auth|key|token|secret|cookie|session|account|subscription|credential|password).*")

_PORTKEY_WORDS = ("x-portkey-cache-", "x-portkey-trace-id", "x-portkey-metadata")
"""Its other headers are keys, or may hold some."""


@lru_cache(maxsize=1024)  # the same few names come with every request
def is_credential(header: str) -> bool:
    """Whether a header (lower case) may say who the client is: `authorization`, `x-api-key`, `cookie`, …"""
    if header.startswith(_PORTKEY_WORDS):  # "key" is part of that name
        return False
    return _CREDENTIAL.fullmatch(header) is not None and header != "idempotency-key"


def shown_key(headers: Mapping[str, str]) -> str:
    """The key that a client shows, as `Authorization: Bearer`, `x-api-key` or `api-key`; empty if none."""
    scheme, _, value = headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer" and value.strip():
        return value.strip()
    return headers.get("x-api-key", "") or headers.get("api-key", "")


class Auth(Protocol):
    """How tenants are told apart."""

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        """Whose request it is. Raises `UnknownKey`."""
        ...


class OpenAuth:
    """No tenants configured: everybody on loopback is the one open tenant, and no credential goes anywhere."""

    def __init__(self, policy: Policy) -> None:
        self.open = Tenant("open", policy=policy)

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        return self.open


class KeyAuth:
    """Tenants with keys of ours. No credential of theirs goes anywhere."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        key = shown_key(headers)
        if not key:
            raise UnknownKey("no API key was given; send one as Authorization: Bearer KEY or x-api-key: KEY")
        found = self._registry.tenants.find(key)
        if found is None:
            raise UnknownKey("this API key is not known here")
        tenant, entry = found
        if entry.expires is not None and is_expired(entry):
            raise UnknownKey(f"this API key expired at {entry.expires.isoformat()}")
        return tenant


class TransparentAuth:
    """The client's own credential is the tenant. It is forwarded, and kept only as a hash.

    The upstream judges the credential, but a stored answer never reaches it; so answers are found only by exactly the
    credential that paid for them, and a wrong key finds an empty cache.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        credentials = {name: value for name, value in headers.items() if is_credential(name) and value}
        if not credentials:
            return Tenant("anonymous", policy=self._policy)
        digest = hashlib.blake2b(repr(sorted(credentials.items())).encode(), digest_size=16, person=b"hitherto-tenant")
        ours = {"proxy-authorization"}  # for this hop only (RFC 9110 section 11.7.2)
        sent = {name: value for name, value in credentials.items() if name not in ours}
        return Tenant(f"key-{digest.hexdigest()}", sent, self._policy)


class AdminKey:
    """Who may administrate: whoever shows the key, or, where none is configured, whoever reaches loopback."""

    def __init__(self, key: str) -> None:
        self._digest = hashlib.sha256(key.encode()).digest() if key else b""

    @property
    def is_set(self) -> bool:
        return bool(self._digest)

    def admits(self, headers: Mapping[str, str]) -> bool:
        if not self._digest:
            return True
        shown = hashlib.sha256(shown_key(headers).encode("utf-8", "surrogatepass")).digest()
        return hmac.compare_digest(shown, self._digest)
