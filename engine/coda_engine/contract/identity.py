"""Who a request is from: the signed value that the router hands to the engine in ``X-Session-ID``.

vLLM copies that header to the request's ``session_id`` for every protocol, while headers of our own
reach no field. The engine takes a value as it is only with a valid signature; anything else is an
untrusted client of its own salt and the lowest tier, whatever the request's body claims.
"""

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import dataclass
from enum import StrEnum

from coda_engine.contract.errors import IdentityError

SESSION_HEADER = "X-Session-ID"
PRIORITY_HEADER = "X-Vllm-Priority"
LOWEST_TIER = 1_000
MAX_READY_AGE_MS = 3_600_000.0

_PREFIX = "coda1"
_SIGNATURE_BYTES = 16
_MAX_VALUE_CHARS = 4_096


class Isolation(StrEnum):
    """Whether tenants may share KV of equal prefixes (and so see each other's timing)."""

    TENANT = "Tenant"
    SHARED = "Shared"


@dataclass(frozen=True, slots=True)
class Identity:
    """One request's identity, as the router knows it.

    Attributes:
        tenant: Owner of the API key; ``""`` when the router runs without keys.
        session: The client's session, or a hash of the conversation's opening.
        parent: Session that spawned this one (sub-agents); ``""`` for none.
        router_id: Router process that sent the request.
        attempt: 0 for the first engine tried, 1 after a silent retry.
        tier: Service tier; 0 is the most urgent.
        ready_age_ms: How long the request has been logically ready, milliseconds (the paper's w_i; it
            survives router queueing, retries and migration).
    """

    tenant: str
    session: str
    parent: str = ""
    router_id: str = ""
    attempt: int = 0
    tier: int = 0
    ready_age_ms: float = 0.0


def pack(identity: Identity, secret: bytes) -> str:
    """Return the header value for ``identity``, signed with the cluster's secret (ASCII)."""
    fields = {name: getattr(identity, name) for name in Identity.__slots__}
    body = json.dumps(fields, separators=(",", ":")).encode()
    return ".".join((_PREFIX, _encode(body), _encode(_sign(body, secret))))


def unpack(value: str, secret: bytes) -> Identity:
    """Return the identity in a header value.

    Raises:
        IdentityError: Not a value of this version, altered, or signed with another secret.
    """
    parts = value.split(".")
    if len(value) > _MAX_VALUE_CHARS or len(parts) != 3 or parts[0] != _PREFIX:
        raise IdentityError("not a coda1 identity value")
    body, signature = _decode(parts[1]), _decode(parts[2])
    if not hmac.compare_digest(signature, _sign(body, secret)):
        raise IdentityError("identity value is not signed with this cluster's secret")
    try:
        fields = json.loads(body)
        identity = Identity(**{name: fields[name] for name in Identity.__slots__ if name in fields})
    except (ValueError, TypeError, KeyError) as error:
        raise IdentityError(f"identity value cannot be read: {error}") from error
    return identity


def cache_salt(identity: Identity, secret: bytes, isolation: Isolation) -> str | None:
    """Return the salt of the tenant's KV blocks; None shares equal prefixes between tenants."""
    if isolation is Isolation.SHARED:
        return None
    return hmac.new(secret, b"salt\0" + identity.tenant.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()[
        :32
    ]


def untrusted_salt(claimed_session: str | None, secret: bytes) -> str:
    """Return a salt that no tenant has, the same for equal claims, so clients without a router still reuse."""
    claim = (claimed_session or "").encode("utf-8", "surrogatepass")
    return "u-" + hmac.new(secret, b"untrusted\0" + claim, hashlib.sha256).hexdigest()[:30]


def _sign(body: bytes, secret: bytes) -> bytes:
    return hmac.digest(secret, b"identity\0" + body, "sha256")[:_SIGNATURE_BYTES]


def _encode(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _decode(text: str) -> bytes:
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError) as error:
        raise IdentityError(f"identity value is not base64: {error}") from error
