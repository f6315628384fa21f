"""Stage 2: only workers that serve the model."""

from dataclasses import dataclass

from coda_router.placement.candidates import NOBODY, Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class TakesModel:
    """Leaves the workers that serve the request's model under the name that the client used."""

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the workers that serve the model, or may (their models are not known yet)."""
        model = request.model
        if model is None or candidates.all_serve(model):
            return Narrowed(candidates, PlacementReason.MODEL_SERVED)
        serving = [w for w in candidates if model in w.models]
        # A worker whose models are unknown is only asked when nobody is known to serve the model.
        serving = serving or [w for w in candidates if not w.models]
        if not serving:
            return Narrowed(NOBODY, PlacementReason.MODEL_NOT_SERVED)
        return Narrowed(candidates.only(serving), PlacementReason.MODEL_SERVED)
