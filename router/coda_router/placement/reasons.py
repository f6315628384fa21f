"""Why a request was placed where it was: one value for the decision log, the metric label and a test's eye."""

from enum import StrEnum


class PlacementReason(StrEnum):
    """What one stage of the chain found (paper section 5)."""

    # Fitness: which workers can be asked at all.
    ALL_FIT = "AllFit"
    SOME_UNFIT = "SomeUnfit"
    HOME_UNFIT = "HomeUnfit"
    NO_WORKERS = "NoWorkers"
    NONE_HEALTHY = "NoneHealthy"
    ALL_DRAINING = "AllDraining"
    ALL_TRIED = "AllTried"

    # Model.
    MODEL_SERVED = "ModelServed"
    MODEL_NOT_SERVED = "ModelNotServed"

    # Frontier: workers where fewer wait than state admission looks at.
    BELOW_FRONTIER = "BelowFrontier"
    HOME_AT_FRONTIER = "HomeAtFrontier"
    ALL_AT_FRONTIER = "AllAtFrontier"

    # Overload.
    WITHIN_BOUND = "WithinBound"
    OVERLOADED_REMOVED = "OverloadedRemoved"
    HOME_OVERLOADED = "HomeOverloaded"

    # KV affinity.
    KV_RESIDENT = "KVResident"
    RECENT_PLACEMENT = "RecentPlacement"
    NEW_SESSION = "NewSession"
    HOME_LOST = "HomeLost"
    HIT_TOO_SMALL = "HitTooSmall"

    # Load and context.
    ONLY_CANDIDATE = "OnlyCandidate"
    LEAST_LOADED = "LeastLoaded"
    LOAD_BAND = "LoadBand"
    CONTEXT_DISTANCE = "ContextDistance"
    NO_TELEMETRY = "NoTelemetry"
    NO_DECODERS = "NoDecoders"
    ROUND_ROBIN = "RoundRobin"
