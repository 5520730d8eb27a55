"""Who is asking: from the credential of a request to a tenant."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

CREDENTIAL_HEADERS = ("authorization", "x-api-key", "api-key")


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who is billed and isolated. `credentials` are forwarded upstream (transparent mode only)."""

    name: str
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)


OPEN = Tenant("open")


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
        credentials = {name: headers[name] for name in CREDENTIAL_HEADERS if headers.get(name)}
        if not credentials:
            return Tenant("anonymous")
        digest = hashlib.blake2b(repr(sorted(credentials.items())).encode(), digest_size=16, person=b"hitherto-tenant")
        return Tenant(f"key-{digest.hexdigest()}", credentials)
