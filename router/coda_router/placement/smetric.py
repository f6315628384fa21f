"""SMetric's gate (arXiv 2607.08565, first version): a session goes home again while that is worth it."""

from dataclasses import dataclass

from coda_router.placement.candidates import Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class WorthReturning:
    """Decides for the worker with the session's longest local prefix, unless it is overloaded or has lost most of it.

    Attributes:
        overload_bound: Multiple of the mean load of all workers beyond which home is overloaded; >= 1.
        min_hit_ratio: Share of the session's previous context that must be resident at home; in [0, 1]. Of a
            session whose residency no engine has reported yet, the whole context counts as resident.
    """

    overload_bound: float
    min_hit_ratio: float = 0.5

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return home alone, or all candidates with the reason against it."""
        position = candidates.position(request.home)
        if position is None:
            return Narrowed(candidates, PlacementReason.HOME_LOST if request.had_home else PlacementReason.NEW_SESSION)
        loads = candidates.loads
        if loads[position] > self.overload_bound * sum(loads) / len(loads):
            return Narrowed(candidates, PlacementReason.HOME_OVERLOADED)
        home = candidates[position]
        resident_tokens = request.resident_tokens.get(home.name)
        if resident_tokens is None:
            return Narrowed(Candidates((home,)), PlacementReason.RECENT_PLACEMENT, is_final=True)
        if resident_tokens < self.min_hit_ratio * request.history_tokens:
            return Narrowed(candidates, PlacementReason.HIT_TOO_SMALL)
        return Narrowed(Candidates((home,)), PlacementReason.KV_RESIDENT, is_final=True)
