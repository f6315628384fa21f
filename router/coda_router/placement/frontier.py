"""Stage 3: only workers whose waiting requests the engine's own admission can all still see."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_engine.contract.interface import FRONTIER_REQUESTS
from coda_router.placement.observations import Narrowed, PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason


@dataclass(frozen=True, slots=True)
class BelowFrontier:
    """Leaves the workers at which fewer requests wait than one state-admission decision looks at.

    Holding back more would starve Tiered-Aging; sending more would only lengthen a queue whose order nobody
    can change any more, while it can still be placed elsewhere from here.

    Attributes:
        frontier_requests: Waiting requests from which a worker takes no more; > 0.
    """

    frontier_requests: int = FRONTIER_REQUESTS

    def narrow(self, request: PlacementRequest, candidates: Sequence[WorkerView]) -> Narrowed:
        """Return the workers with room in their frontier; a worker without telemetry always has."""
        below = [w for w in candidates if not w.has_telemetry or w.waiting_requests < self.frontier_requests]
        if not below:
            return Narrowed((), PlacementReason.ALL_AT_FRONTIER)
        if len(below) < len(candidates) and request.home and all(w.name != request.home for w in below):
            return Narrowed(below, PlacementReason.HOME_AT_FRONTIER)
        return Narrowed(below, PlacementReason.BELOW_FRONTIER)
