"""Why a decision was taken or a feature is off: one value for log field, metric label and condition."""

from enum import StrEnum


class Feature(StrEnum):
    """A part of Coda's engine that can be on or off by itself (the capability vector's keys)."""

    SNAPSHOT = "Snapshot"
    IDENTITY = "Identity"
    LIVE_SETTINGS = "LiveSettings"
    STATE_ADMISSION = "StateAdmission"
    EXECUTION_ADMISSION = "ExecutionAdmission"
    KV_SHADOW = "KVShadow"
    RECLAIM = "Reclaim"
    TRACE_ATTRIBUTES = "TraceAttributes"


class Reason(StrEnum):
    """Why a feature is on or off, or a profile was taken or refused.

    Attributes:
        UNKNOWN: A newer engine gave a reason that this reader does not know; the detail has it.
    """

    ENABLED = "Enabled"
    DISABLED_BY_SETTINGS = "DisabledBySettings"
    OBSERVING = "Observing"
    NOT_AVAILABLE = "NotAvailable"
    NO_PROFILE = "NoProfile"
    PROFILE_MISMATCH = "ProfileMismatch"
    PROFILE_UNREADABLE = "ProfileUnreadable"
    PROFILE_NOT_VALIDATED = "ProfileNotValidated"
    PROFILE_NEEDS_REVALIDATION = "ProfileNeedsRevalidation"
    UNSUPPORTED_VLLM_VERSION = "UnsupportedVLLMVersion"
    CHANGED_VLLM_INTERNALS = "ChangedVLLMInternals"
    UNSUPPORTED_CONFIGURATION = "UnsupportedConfiguration"
    SHADOW_NO_SPACE = "ShadowNoSpace"
    SHADOW_UNSAFE = "ShadowUnsafe"
    SHADOW_UNUSABLE = "ShadowUnusable"
    NO_CLUSTER_SECRET = "NoClusterSecret"  # noqa: S105 - a reason, not a secret
    INTERNAL_ERROR = "InternalError"
    UNKNOWN = "Unknown"


class AdmissionReason(StrEnum):
    """Why state admission put this request first (paper section 4.2, eq. 4, and the other orders)."""

    LOWEST_AGED_COST = "LowestAgedCost"
    MAX_WAIT_REACHED = "MaxWaitReached"
    CHEAPEST_ON_TIME = "CheapestOnTime"
    RESERVED_FOR_OLDEST = "ReservedForOldest"
    FEWEST_BLOCKS = "FewestBlocks"
    LOWEST_COST = "LowestCost"
    SHORTEST_JOB = "ShortestJob"
    ONLY_CANDIDATE = "OnlyCandidate"
    READY_ORDER = "ReadyOrder"
    NOTHING_FEASIBLE = "NothingFeasible"
    NOTHING_WAITING = "NothingWaiting"
    FEATURE_OFF = "FeatureOff"


class PlanReason(StrEnum):
    """Why execution admission kept the complete population or split it (paper section 4.3)."""

    COHORTS = "Cohorts"
    TOO_FEW_REQUESTS = "TooFewRequests"
    TOO_UNIFORM = "TooUniform"
    NO_BALANCED_CUT = "NoBalancedCut"
    NO_ATTENTION_PROFILE = "NoAttentionProfile"
    OUT_OF_DOMAIN = "OutOfDomain"
    GAIN_TOO_SMALL = "GainTooSmall"


class VictimReason(StrEnum):
    """Why a cached KV block left HBM when it did (paper section 6): chosen, or in native order because ...

    Attributes:
        PREDICTED_IDLE: The policy chose it.
        SHARED: It belongs to several sessions, or to none that is known.
        SESSION_ACTIVE: Its session has a request in the engine.
        NO_PREDICTION: Nobody said what its session waits for.
        NOT_PUBLISHED: The CPU shadow does not hold it.
        NOT_LOOKED_AT: It lay outside the window, or the last look had been too recent.
    """

    PREDICTED_IDLE = "PredictedIdle"
    SHARED = "Shared"
    SESSION_ACTIVE = "SessionActive"
    NO_PREDICTION = "NoPrediction"
    NOT_PUBLISHED = "NotPublished"
    NOT_LOOKED_AT = "NotLookedAt"


class PreparationPath(StrEnum):
    """Where a request's KV state came from for the most part (paper section 3.1).

    Attributes:
        HBM: It was there.
        SHADOW: It was restored from the CPU shadow.
        RECOMPUTE: It was computed.
    """

    HBM = "HBM"
    SHADOW = "Shadow"
    RECOMPUTE = "Recompute"

    @classmethod
    def of(cls, hbm_tokens: int, shadow_tokens: int, computed_tokens: int) -> "PreparationPath":
        """Return the tier that gave most of the tokens; of equal shares the dearer one's."""
        shares = ((computed_tokens, cls.RECOMPUTE), (shadow_tokens, cls.SHADOW), (hbm_tokens, cls.HBM))
        return max(shares, key=lambda share: share[0])[1]


class ShadowEvent(StrEnum):
    """What became of a page of the CPU shadow (the pages of all ranks of one KV block count once).

    Attributes:
        PUBLISHED: Written by this engine and readable by all.
        RESTORED: Copied into HBM.
        EVICTED: Made room for another page of this engine.
        POISONED: Corrupt or unreadable, never served again.
        VANISHED: A restore found it gone between look-up and pinning.
        UNWRITTEN: Reserved and given back, because the copy failed or its request was gone.
        NO_SPACE: Not published, because nothing could be evicted or the index was locked.
        LOST: Its reservation was gone when it was to be published.
        RECLAIMED: Reserved by a process that died.
        DAMAGED: Its record in the index was damaged.
    """

    PUBLISHED = "Published"
    RESTORED = "Restored"
    EVICTED = "Evicted"
    POISONED = "Poisoned"
    VANISHED = "Vanished"
    UNWRITTEN = "Unwritten"
    NO_SPACE = "NoSpace"
    LOST = "Lost"
    RECLAIMED = "Reclaimed"
    DAMAGED = "Damaged"
