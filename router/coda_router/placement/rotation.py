"""The round-robin policy's only stage: everybody in turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_router.placement.observations import Narrowed, PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason


@dataclass(frozen=True, slots=True)
class Rotation:
    """Leaves every candidate; the chain's tie-break then takes them in turn."""

    def narrow(self, request: PlacementRequest, candidates: Sequence[WorkerView]) -> Narrowed:
        """Return all candidates, decided."""
        return Narrowed(candidates, PlacementReason.ROUND_ROBIN, is_final=True)
