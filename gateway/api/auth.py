"""Who is asking: from the credential of a request to a tenant."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

_CREDENTIAL = re.compile(r".*(auth|key|token|secret|cookie|session|account|subscription|credential|password).*")

_PORTKEY_WORDS = ("x-portkey-cache-", "x-portkey-trace-id", "x-portkey-metadata")
"""Its other headers are keys, or may hold some."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who is billed and isolated. `credentials` are forwarded upstream (transparent mode only)."""

    name: str
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)


OPEN = Tenant("open")


@lru_cache(maxsize=1024)  # the same few names come with every request
def is_credential(header: str) -> bool:
    """Whether a header (lower case) may say who the client is: `authorization`, `x-api-key`, `cookie`, …"""
    if header.startswith(_PORTKEY_WORDS):  # "key" is part of that name
        return False
    return _CREDENTIAL.fullmatch(header) is not None and header != "idempotency-key"


class OpenAuth:
    """No tenants configured: everybody on loopback is the one open tenant, and no credential goes anywhere."""

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        return OPEN


class TransparentAuth:
    """The client's own credential is the tenant. It is forwarded, and kept only as a hash.

    The upstream judges the credential, but a stored answer never reaches it; so answers are found only by exactly the
    credential that paid for them, and a wrong key finds an empty cache.
    """

    def tenant(self, headers: Mapping[str, str]) -> Tenant:
        credentials = {name: value for name, value in headers.items() if is_credential(name) and value}
        if not credentials:
            return Tenant("anonymous")
        digest = hashlib.blake2b(repr(sorted(credentials.items())).encode(), digest_size=16, person=b"hitherto-tenant")
        ours = {"proxy-authorization"}  # for this hop only (RFC 9110 section 11.7.2)
        sent = {name: value for name, value in credentials.items() if name not in ours}
        return Tenant(f"key-{digest.hexdigest()}", sent)
