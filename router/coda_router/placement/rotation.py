"""The stages that take workers in turn: every request, or every new session."""

from dataclasses import dataclass

from coda_router.placement.candidates import Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class Rotation:
    """Leaves every candidate; the chain's tie-break then takes them in turn."""

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return all candidates, decided."""
        return Narrowed(candidates, PlacementReason.ROUND_ROBIN, is_final=True)


@dataclass(frozen=True, slots=True)
class SessionRotation:
    """Decides for the worker whose turn it is to get a session without a home.

    Not the chain's tie-break: that counts all requests, and where new sessions come at a regular beat among
    them, only some of the workers would ever have their turn.
    """

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the one worker whose turn it is."""
        chosen = candidates[request.newcomers % len(candidates)]
        return Narrowed(Candidates((chosen,)), PlacementReason.ROUND_ROBIN, is_final=True)
