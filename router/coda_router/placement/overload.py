"""Stage 4: a session leaves its home when that is loaded beyond a multiple of the mean."""

from dataclasses import dataclass

from coda_router.placement.candidates import Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class WithinLoadBound:
    """Leaves the workers within the overload bound (the parent policy's load guard, paper section 5).

    Attributes:
        overload_bound: Multiple of the other workers' mean load beyond which a worker is overloaded; >= 1, so
            that the least loaded worker always remains. (Of the others: with two workers, neither can exceed
            twice the mean of both.)
        floor_requests: The mean counts as at least this much: while the others are idle, two requests at one
            worker are no reason to prepare a long context again elsewhere.
    """

    overload_bound: float
    floor_requests: float = 1.0

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the workers that are not overloaded; never none."""
        if len(candidates) == 1:
            return Narrowed(candidates, PlacementReason.WITHIN_BOUND)
        loads = candidates.loads
        most = self._most_requests(sum(loads), len(loads) - 1)
        if max(loads) <= most:
            return Narrowed(candidates, PlacementReason.WITHIN_BOUND)
        within = candidates.only([w for w, load in zip(candidates, loads, strict=True) if load <= most])
        left_home = candidates.has(request.home) and not within.has(request.home)
        return Narrowed(within, PlacementReason.HOME_OVERLOADED if left_home else PlacementReason.OVERLOADED_REMOVED)

    def _most_requests(self, total: int, others: int) -> float:
        """Return the largest load within the bound: ``load <= bound * (total - load) / others``, solved for it."""
        bound = self.overload_bound
        return max(bound * total / (others + bound), bound * self.floor_requests)
