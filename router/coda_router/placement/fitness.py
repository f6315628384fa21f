"""Stage 1: only workers that answer, take new requests and have not failed this request already."""

from dataclasses import dataclass

from coda_router.placement.candidates import NOBODY, Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class Fitness:
    """Leaves the workers that can be asked at all."""

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the healthy, not draining, not yet tried workers; ejected ones only if there are no others."""
        if not candidates:
            return Narrowed(NOBODY, PlacementReason.NO_WORKERS)
        if not request.tried and not candidates.unfit:
            return Narrowed(candidates, PlacementReason.ALL_FIT)
        fit = candidates.only([w for w in candidates if w.is_fit and w.name not in request.tried])
        if len(fit) == len(candidates):
            return Narrowed(candidates, PlacementReason.ALL_FIT)
        if fit:
            left_home = request.home is not None and not fit.has(request.home)
            return Narrowed(fit, PlacementReason.HOME_UNFIT if left_home else PlacementReason.SOME_UNFIT)
        untried = [w for w in candidates if w.name not in request.tried]
        ejected = Candidates([w for w in untried if w.is_ejected and w.is_healthy and not w.is_draining])
        if ejected:
            return Narrowed(ejected, PlacementReason.ALL_EJECTED)
        if all(not w.is_healthy for w in candidates):
            return Narrowed(NOBODY, PlacementReason.NONE_HEALTHY)
        if any(w.is_healthy and w.is_draining for w in candidates):
            return Narrowed(NOBODY, PlacementReason.ALL_DRAINING)
        return Narrowed(NOBODY, PlacementReason.ALL_TRIED)
