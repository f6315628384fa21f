"""Stage 5: a session goes where most of its KV is."""

from dataclasses import dataclass

from coda_router.placement.candidates import Candidates
from coda_router.placement.home import home_of
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class KVAffinity:
    """Decides for the worker with the largest actual local prefix (paper section 5).

    What engines report comes first. Where they report nothing (yet), the place of the session's previous
    request decides: engines publish their session tables about once a second, agents may be faster.
    """

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the one worker with the most, or all of them when none has anything."""
        resident = {
            name: tokens for name, tokens in request.resident_tokens.items() if tokens > 0 and candidates.has(name)
        }
        recent = request.recent_worker if candidates.has(request.recent_worker) else None
        position = candidates.position(home_of(resident, recent, request.session_hash))
        if position is None:
            return Narrowed(candidates, PlacementReason.HOME_LOST if request.had_home else PlacementReason.NEW_SESSION)
        reason = PlacementReason.KV_RESIDENT if resident else PlacementReason.RECENT_PLACEMENT
        return Narrowed(Candidates((candidates[position],)), reason, is_final=True)
