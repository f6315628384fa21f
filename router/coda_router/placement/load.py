"""Stage 6: minimum load."""

from dataclasses import dataclass

from coda_router.placement.candidates import Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


def least_loaded(candidates: Candidates, band_requests: int = 0) -> Candidates:
    """Return the workers whose load is the minimum, or at most ``band_requests`` above it."""
    loads = candidates.loads
    limit = min(loads) + band_requests
    if max(loads) <= limit:
        return candidates
    return candidates.only([w for w, load in zip(candidates, loads, strict=True) if load <= limit])


@dataclass(frozen=True, slots=True)
class MinimumLoad:
    """Leaves the workers at the minimum load, or within a band above it.

    Attributes:
        band_requests: Requests above the minimum that still count as minimal; 1 before context distance
            (paper section 5), 0 for plain least-loaded.
    """

    band_requests: int = 0

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the least loaded workers."""
        if len(candidates) == 1:
            return Narrowed(candidates, PlacementReason.ONLY_CANDIDATE, is_final=True)
        least = least_loaded(candidates, self.band_requests)
        if self.band_requests == 0 or len(least) == 1:
            return Narrowed(least, PlacementReason.LEAST_LOADED, is_final=True)
        return Narrowed(least, PlacementReason.LOAD_BAND)
