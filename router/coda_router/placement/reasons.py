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
    ALL_EJECTED = "AllEjected"
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
    HOME_TOO_SLOW = "HomeTooSlow"

    # Load and context.
    ONLY_CANDIDATE = "OnlyCandidate"
    LEAST_LOADED = "LeastLoaded"
    LOAD_BAND = "LoadBand"
    CONTEXT_DISTANCE = "ContextDistance"
    NO_TELEMETRY = "NoTelemetry"
    NO_DECODERS = "NoDecoders"
    LEAST_WORK = "LeastWork"
    ROUND_ROBIN = "RoundRobin"
    POWER_OF_TWO = "PowerOfTwo"

    # Consistent hashing.
    HASH_OWNER = "HashOwner"
    HASH_OWNER_FULL = "HashOwnerFull"

    # The engine that holds a stored response.
    HOLDS_RESPONSE = "HoldsResponse"
    RESPONSE_LOST = "ResponseLost"

    # The router's own queue, where no engine could take the request.
    QUEUE_FULL = "QueueFull"
    QUEUE_TIMEOUT = "QueueTimeout"
