"""Stage 3: only workers whose waiting requests the engine's own admission can all still see."""

from dataclasses import dataclass

from coda_engine.contract.interface import FRONTIER_REQUESTS
from coda_router.placement.candidates import NOBODY, Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class BelowFrontier:
    """Leaves the workers at which fewer requests wait than one state-admission decision looks at.

    Holding back more would starve Tiered-Aging; sending more would only lengthen a queue whose order nobody
    can change any more, while it can still be placed elsewhere from here.

    Attributes:
        frontier_requests: Waiting requests from which a worker takes no more; > 0.
    """

    frontier_requests: int = FRONTIER_REQUESTS

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the workers with room in their frontier; a worker without telemetry always has."""
        if max(candidates.waiting) < self.frontier_requests:
            return Narrowed(candidates, PlacementReason.BELOW_FRONTIER)
        below = [w for w in candidates if not w.has_telemetry or w.waiting_requests < self.frontier_requests]
        if not below:
            return Narrowed(NOBODY, PlacementReason.ALL_AT_FRONTIER)
        remaining = candidates.only(below)
        left_home = len(below) < len(candidates) and request.home is not None and not remaining.has(request.home)
        return Narrowed(remaining, PlacementReason.HOME_AT_FRONTIER if left_home else PlacementReason.BELOW_FRONTIER)
