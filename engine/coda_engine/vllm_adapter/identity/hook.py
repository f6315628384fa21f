"""Overrides what a request's body says about itself with what its signed identity value says.

The place is ``EngineCore.preprocess_add_request``: after it block hashes depend on the cache salt.
"""

import copy
import math
from dataclasses import dataclass

from vllm.v1.engine import EngineCoreRequest

from coda_engine.contract.errors import IdentityError
from coda_engine.contract.identity import (
    LOWEST_TIER,
    MAX_READY_AGE_MS,
    Identity,
    Isolation,
    cache_salt,
    unpack,
    untrusted_salt,
)
from coda_engine.contract.snapshot import session_key
from coda_engine.vllm_adapter.identity.table import IdentityTable, RequestIdentity

_OWNED_EXTRA_ARGS = frozenset({"kv_transfer_params", "ec_transfer_params", "session_id"})


@dataclass(frozen=True, slots=True)
class IdentityRules:
    """How identity values are judged.

    Attributes:
        secret: The cluster's secret; None = no router is trusted and session ids are taken as they are.
        isolation: Whether tenants share KV of equal prefixes.
    """

    secret: bytes | None
    isolation: Isolation

    def apply(self, request: EngineCoreRequest, table: IdentityTable) -> None:
        """Rewrite ``request`` in place and keep its identity in ``table``."""
        _strip_extra_args(request)
        if self.secret is None:
            _take_as_it_is(request, table)
            return
        try:
            identity = unpack(request.session_id or "", self.secret)
        except IdentityError:
            self.distrust(request, table)
            return
        request.session_id = session_key(identity.tenant, identity.session)
        request.cache_salt = cache_salt(identity, self.secret, self.isolation)
        request.priority = _tier(identity.tier)
        table.put(request.request_id, _kept(identity), trusted=True)

    def session_key(self, session_id: str) -> str:
        """Return the key of the session that an identity value names; "" when it is not to be believed."""
        if self.secret is None:
            return session_key("", session_id) if session_id else ""
        try:
            identity = unpack(session_id, self.secret)
        except IdentityError:
            return ""
        return session_key(identity.tenant, identity.session)

    def distrust(self, request: EngineCoreRequest, table: IdentityTable) -> None:
        """Give ``request`` a salt that no tenant has and the lowest tier; without a secret nobody has a salt."""
        if self.secret is not None:
            request.cache_salt = untrusted_salt(request.session_id, self.secret)
        request.session_id = None
        request.priority = LOWEST_TIER
        table.put(request.request_id, RequestIdentity(tier=LOWEST_TIER), trusted=False)


def _kept(identity: Identity) -> RequestIdentity:
    return RequestIdentity(
        session_key=session_key(identity.tenant, identity.session),
        router_id=identity.router_id,
        tier=_tier(identity.tier),
        ready_age_ms=_age(identity.ready_age_ms),
    )


def _take_as_it_is(request: EngineCoreRequest, table: IdentityTable) -> None:
    key = session_key("", request.session_id) if request.session_id else ""
    table.put(request.request_id, RequestIdentity(session_key=key, tier=_tier(request.priority)), trusted=True)


def _tier(tier: int) -> int:
    return min(max(int(tier), 0), LOWEST_TIER)


def _age(age_ms: float) -> float:
    return min(max(age_ms, 0.0), MAX_READY_AGE_MS) if math.isfinite(age_ms) else 0.0


def _strip_extra_args(request: EngineCoreRequest) -> None:
    """Remove what only Coda may set; the caller's parameters object stays as it is."""
    params = request.sampling_params
    if params is None or not params.extra_args:
        return
    kept = {
        name: value
        for name, value in params.extra_args.items()
        if name not in _OWNED_EXTRA_ARGS and not name.startswith("coda")
    }
    if len(kept) != len(params.extra_args):
        request.sampling_params = copy.copy(params)
        request.sampling_params.extra_args = kept or None
