"""Stage 2: only workers that serve the model."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_router.placement.observations import Narrowed, PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason


@dataclass(frozen=True, slots=True)
class TakesModel:
    """Leaves the workers that serve the request's model under the name that the client used."""

    def narrow(self, request: PlacementRequest, candidates: Sequence[WorkerView]) -> Narrowed:
        """Return the workers that serve the model, or may (their models are not known yet)."""
        if request.model is None:
            return Narrowed(candidates, PlacementReason.MODEL_SERVED)
        serving = [w for w in candidates if request.model in w.models]
        # A worker whose models are unknown is only asked when nobody is known to serve the model.
        serving = serving or [w for w in candidates if not w.models]
        return Narrowed(serving, PlacementReason.MODEL_SERVED if serving else PlacementReason.MODEL_NOT_SERVED)
