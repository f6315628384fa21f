"""Stage 1: only workers that answer, take new requests and have not failed this request already."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_router.placement.observations import Narrowed, PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason


@dataclass(frozen=True, slots=True)
class Fitness:
    """Leaves the workers that can be asked at all."""

    def narrow(self, request: PlacementRequest, candidates: Sequence[WorkerView]) -> Narrowed:
        """Return the healthy, not draining, not yet tried workers."""
        if not candidates:
            return Narrowed((), PlacementReason.NO_WORKERS)
        fit = [w for w in candidates if w.is_healthy and not w.is_draining and w.name not in request.tried]
        if len(fit) == len(candidates):
            return Narrowed(fit, PlacementReason.ALL_FIT)
        if fit:
            left_home = request.home is not None and all(w.name != request.home for w in fit)
            return Narrowed(fit, PlacementReason.HOME_UNFIT if left_home else PlacementReason.SOME_UNFIT)
        if all(not w.is_healthy for w in candidates):
            return Narrowed((), PlacementReason.NONE_HEALTHY)
        if any(w.is_healthy and w.is_draining for w in candidates):
            return Narrowed((), PlacementReason.ALL_DRAINING)
        return Narrowed((), PlacementReason.ALL_TRIED)
