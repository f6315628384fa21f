"""Stage 4: a session leaves its home when that is loaded beyond a multiple of the mean."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_router.placement.load import comparable_loads
from coda_router.placement.observations import Narrowed, PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason


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

    def narrow(self, request: PlacementRequest, candidates: Sequence[WorkerView]) -> Narrowed:
        """Return the workers that are not overloaded; never none."""
        if len(candidates) == 1:
            return Narrowed(candidates, PlacementReason.WITHIN_BOUND)
        loads = comparable_loads(candidates)
        total, others = sum(loads), len(loads) - 1
        within = [
            w
            for w, load in zip(candidates, loads, strict=True)
            if load <= self.overload_bound * max((total - load) / others, self.floor_requests)
        ]
        if len(within) == len(candidates):
            return Narrowed(candidates, PlacementReason.WITHIN_BOUND)
        home = request.home
        left_home = any(w.name == home for w in candidates) and all(w.name != home for w in within)
        return Narrowed(within, PlacementReason.HOME_OVERLOADED if left_home else PlacementReason.OVERLOADED_REMOVED)
