"""Stage 7: among equally loaded workers, the one whose decoding contexts are most like the request's."""

from dataclasses import dataclass

from coda_router.placement.candidates import Candidates
from coda_router.placement.decoders import log2_tokens
from coda_router.placement.load import least_loaded
from coda_router.placement.observations import PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed

_ROUNDING = 1e-9
"""More than what rounding can make of two ways to compute one distance."""


@dataclass(frozen=True, slots=True)
class ContextDistance:
    """Decides by eq. 8; without telemetry or decoders it keeps the parent policy's minimum load."""

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the workers of the smallest distance, of them the least loaded."""
        if candidates.silent:
            return Narrowed(least_loaded(candidates), PlacementReason.NO_TELEMETRY, is_final=True)
        if not any(w.decode_contexts.tokens for w in candidates):
            return Narrowed(least_loaded(candidates), PlacementReason.NO_DECODERS, is_final=True)
        nearest = candidates.only(_nearest(candidates, log2_tokens(request.context_tokens)))
        if len(nearest) > 1:
            nearest = least_loaded(nearest)
        return Narrowed(nearest, PlacementReason.CONTEXT_DISTANCE, is_final=True)


def _nearest(candidates: Candidates, arriving_log2: float) -> list[WorkerView]:
    """Return the workers at the smallest distance.

    No distance is below that to the population's mean, nor below the population's own least: most workers of a
    large fleet need no closer look.
    """
    at_least = [
        far if (far := abs(mean_log2 - arriving_log2) * weight) > least else least
        for w in candidates
        for mean_log2, weight, least in (w.decode_contexts.bounds,)
    ]
    best = candidates[at_least.index(min(at_least))].decode_contexts.distance_to(arriving_log2) + _ROUNDING
    looked_at = [
        (w.decode_contexts.distance_to(arriving_log2), w)
        for w, least in zip(candidates, at_least, strict=True)
        if least <= best
    ]
    nearest = min([distance for distance, _ in looked_at])
    return [w for distance, w in looked_at if distance == nearest]
