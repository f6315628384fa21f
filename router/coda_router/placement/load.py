"""Stage 6: minimum load, and how loads are made comparable."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_router.placement.observations import Narrowed, PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason


def comparable_loads(candidates: Sequence[WorkerView]) -> list[int]:
    """Return each worker's load, requests, in one measure for all.

    As soon as one of them has no telemetry, every load is what this router has in flight: comparing an
    engine's total with a router's part would send everything to the worker that nobody knows anything about.
    """
    if all(w.has_telemetry for w in candidates):
        return [w.load_requests for w in candidates]
    return [w.in_flight_requests for w in candidates]


@dataclass(frozen=True, slots=True)
class MinimumLoad:
    """Leaves the workers at the minimum load, or within a band above it.

    Attributes:
        band_requests: Requests above the minimum that still count as minimal; 1 before context distance
            (paper section 5), 0 for plain least-loaded.
    """

    band_requests: int = 0

    def narrow(self, request: PlacementRequest, candidates: Sequence[WorkerView]) -> Narrowed:
        """Return the least loaded workers."""
        if len(candidates) == 1:
            return Narrowed(candidates, PlacementReason.ONLY_CANDIDATE, is_final=True)
        loads = comparable_loads(candidates)
        limit = min(loads) + self.band_requests
        least = [w for w, load in zip(candidates, loads, strict=True) if load <= limit]
        if self.band_requests == 0 or len(least) == 1:
            return Narrowed(least, PlacementReason.LEAST_LOADED, is_final=True)
        return Narrowed(least, PlacementReason.LOAD_BAND)
