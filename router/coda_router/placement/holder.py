"""The only stage for a request about a stored response: the engine that holds it, or nobody."""

from dataclasses import dataclass

from coda_router.placement.candidates import NOBODY, Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class AtHolder:
    """Decides for the worker that holds the response which a request continues, asks for or cancels.

    Load and frontier are not asked: nobody else can take the request, so holding it back would only delay it.

    Attributes:
        takes_draining: Whether a draining worker is asked too. It is for what it already has; new work on it
            would never let it end, and the client can go on elsewhere with its whole conversation.
    """

    takes_draining: bool

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the one worker that holds the response."""
        position = candidates.position(request.holder)
        if position is None or (candidates[position].is_draining and not self.takes_draining):
            return Narrowed(NOBODY, PlacementReason.RESPONSE_LOST)
        holder = candidates[position]
        if holder.name in request.tried:
            return Narrowed(NOBODY, PlacementReason.ALL_TRIED)
        if not holder.is_healthy:
            return Narrowed(NOBODY, PlacementReason.NONE_HEALTHY)
        return Narrowed(Candidates((holder,)), PlacementReason.HOLDS_RESPONSE, is_final=True)
