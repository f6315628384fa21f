"""What an engine tells routers, the operator and people about itself.

The scheduler publishes an :class:`EngineSnapshot` after each step, at most 20 times a second; the API
process serves it without touching the engine's thread. Session residency travels separately as
:class:`SessionDelta`. Readers treat everything as stale: a router adds what it dispatched since.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from pydantic import Field, ValidatorFunctionWrapHandler, field_validator

from coda_engine.contract.models import WireModel
from coda_engine.contract.reasons import Feature, Reason

SNAPSHOT_SCHEMA_VERSION = 1

_KNOWN_FEATURES = frozenset(Feature)


class Capability(WireModel):
    """Whether one feature runs, and why (not)."""

    enabled: bool
    reason: Reason
    detail: str = ""

    @field_validator("reason", mode="wrap")
    @classmethod
    def _known_reason(cls, value: Any, validate: ValidatorFunctionWrapHandler) -> Reason:
        try:
            return Reason(validate(value))
        except ValueError:
            return Reason.UNKNOWN


class Reservation(WireModel):
    """Freed KV blocks are kept for the oldest waiting request, which does not fit yet.

    Attributes:
        tier: Its tier.
        wait_ms: Time since its logical readiness, milliseconds.
        kv_blocks: Blocks that it still needs.
    """

    tier: int
    wait_ms: float
    kv_blocks: int


class StepCounters(WireModel):
    """Counts since the engine's start. Keys of the mappings are values of the enumeration that is named.

    Attributes:
        pure_decode: Steps in which every request decoded one token.
        mixed: Steps with both decode and prefill work.
        prefill: Steps with prefill work only.
        admissions: State-admission decisions by AdmissionReason.
        admissions_by_path: Admitted requests by PreparationPath.
        admitted_tokens: Their tokens by the PreparationPath that each took.
        reordered: Selections that put another request before the native head.
        refused_after_feasible: Requests predicted feasible that the allocator then refused (should stay 0).
        cohort_plans: Execution-admission plans by PlanReason (when observed).
        untrusted_identities: Requests whose identity value was missing or not signed by this cluster.
        reclaimed: Cached KV blocks that left HBM while reclaim was on, by VictimReason.
        shadow_pages: Pages of the CPU shadow by ShadowEvent.
        failed_restores: Restores that ended at a page that could not be used.
    """

    pure_decode: int = 0
    mixed: int = 0
    prefill: int = 0
    admissions: dict[str, int] = Field(default_factory=dict)
    admissions_by_path: dict[str, int] = Field(default_factory=dict)
    admitted_tokens: dict[str, int] = Field(default_factory=dict)
    reordered: int = 0
    refused_after_feasible: int = 0
    cohort_plans: dict[str, int] = Field(default_factory=dict)
    untrusted_identities: int = 0
    reclaimed: dict[str, int] = Field(default_factory=dict)
    shadow_pages: dict[str, int] = Field(default_factory=dict)
    failed_restores: int = 0


class EngineSnapshot(WireModel):
    """One engine's state at one moment.

    Attributes:
        schema_version: Version of this document's shape.
        instance_id: New at each engine start; a change means everything resident is gone.
        version: Grows by one with each publication of this instance.
        published_at_s: Unix time of the publication, seconds.
        started_at_s: Unix time at which this instance started, seconds.
        draining: The engine takes no new requests.
        served_models: Names under which requests may ask for the model.
        max_context_tokens: The model's context window as configured, tokens.
        max_running: Most requests that one step may run.
        capabilities: Feature to on/off with reason.
        settings_digest: Digest of the settings document in force.
        profile_digest: Digest of the profile in force; None without one.
        waiting_by_tier: Waiting requests by tier (0 is the most urgent).
        running_by_tier: Running requests by tier.
        requests_by_router: Waiting plus running requests by the router that sent them ("" = unknown).
        decode_context_tokens: Materialised context of each decoding request, tokens (eq. 8's C_w).
        pending_prefill_tokens: Prompt tokens of waiting and prefilling requests that have to be computed.
        oldest_ready_wait_ms: Longest time since logical readiness among waiting requests, milliseconds.
        kv_blocks_total: KV blocks that requests can use.
        kv_blocks_free: Of them free or evictable now.
        kv_block_tokens: Tokens in one block.
        head_demand_blocks_by_tier: Blocks that the first waiting request of each tier still needs.
        reservation: For whom freed blocks are kept; None: for nobody.
        shadow_bytes_used: Bytes of KV in the CPU shadow.
        shadow_bytes_capacity: Capacity of the CPU shadow, bytes; 0 without one.
        outstanding_restore_bytes: Bytes on their way from shadow to HBM.
        steps: Counters since start.
    """

    schema_version: int = SNAPSHOT_SCHEMA_VERSION
    instance_id: str
    version: int
    published_at_s: float
    started_at_s: float
    draining: bool = False
    served_models: list[str] = Field(default_factory=list)
    max_context_tokens: int = 0
    max_running: int = 0
    capabilities: dict[Feature, Capability] = Field(default_factory=dict)
    settings_digest: str = ""
    profile_digest: str | None = None
    waiting_by_tier: dict[int, int] = Field(default_factory=dict)
    running_by_tier: dict[int, int] = Field(default_factory=dict)
    requests_by_router: dict[str, int] = Field(default_factory=dict)
    decode_context_tokens: list[int] = Field(default_factory=list)
    pending_prefill_tokens: int = 0
    oldest_ready_wait_ms: float = 0.0
    kv_blocks_total: int = 0
    kv_blocks_free: int = 0
    kv_block_tokens: int = 0
    head_demand_blocks_by_tier: dict[int, int] = Field(default_factory=dict)
    reservation: Reservation | None = None
    shadow_bytes_used: int = 0
    shadow_bytes_capacity: int = 0
    outstanding_restore_bytes: int = 0
    steps: StepCounters = StepCounters()

    @field_validator("capabilities", mode="before")
    @classmethod
    def _known_features(cls, value: Any) -> Any:
        """Leave out features that only newer engines have."""
        if not isinstance(value, Mapping) or value.keys() <= _KNOWN_FEATURES:
            return value
        return {name: state for name, state in value.items() if name in _KNOWN_FEATURES}

    @property
    def waiting(self) -> int:
        """Requests waiting in all tiers."""
        return sum(self.waiting_by_tier.values())

    @property
    def running(self) -> int:
        """Requests running in all tiers."""
        return sum(self.running_by_tier.values())


class SessionResidency(WireModel):
    """How much of one session's KV is where.

    Attributes:
        key: :func:`session_key` of the session.
        hbm_tokens: Longest prefix resident in HBM, tokens.
        shadow_tokens: Longest prefix resident in HBM or the CPU shadow, tokens.
        last_use_s: Unix time at which a request of the session last finished or ran, seconds.
        tool: What the session waits for, as ``name:kind``; None: for no tool, or nobody said.
        tool_waiting_since_s: Unix time at which that wait began, seconds.
    """

    key: str
    hbm_tokens: int
    shadow_tokens: int = 0
    last_use_s: float
    tool: str | None = None
    tool_waiting_since_s: float | None = None


class SessionDelta(WireModel):
    """Changes of an engine's session table since a version.

    Attributes:
        instance_id: As in the snapshot; a reader that knows another one forgets everything first.
        since: The version that the delta starts from; 0 means that it is the full table.
        version: The version that the reader has after applying the delta.
        sessions: New or changed rows.
        removed: Keys of sessions with nothing resident any more.
    """

    instance_id: str
    since: int
    version: int
    sessions: list[SessionResidency] = Field(default_factory=list)
    removed: list[str] = Field(default_factory=list)


def session_key(tenant: str, session: str) -> str:
    """Return the hashed name of a tenant's session, 32 hex digits; never reveals either."""
    digest = hashlib.blake2b(digest_size=16)
    for part in (tenant, session):
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(4, "big"))
        digest.update(encoded)
    return digest.hexdigest()
