"""Stage 5: a session goes where most of its KV is."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_router.placement.observations import Narrowed, PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason


@dataclass(frozen=True, slots=True)
class KVAffinity:
    """Decides for the worker with the largest actual local prefix (paper section 5).

    What engines report comes first. Where they report nothing (yet), the place of the session's previous
    request decides: engines publish their session tables about once a second, agents may be faster.
    """

    def narrow(self, request: PlacementRequest, candidates: Sequence[WorkerView]) -> Narrowed:
        """Return the one worker with the most, or all of them when none has anything."""
        resident = [w for w in candidates if request.resident_tokens.get(w.name, 0) > 0]
        recent = next((w for w in candidates if w.name == request.recent_worker), None)
        if resident:
            longest_tokens = max(request.resident_tokens[w.name] for w in resident)
            best = [w for w in resident if request.resident_tokens[w.name] == longest_tokens]
            chosen = recent if recent in best else best[request.rotation % len(best)]
            return Narrowed((chosen,), PlacementReason.KV_RESIDENT, is_final=True)
        if recent is not None:
            return Narrowed((recent,), PlacementReason.RECENT_PLACEMENT, is_final=True)
        return Narrowed(candidates, PlacementReason.HOME_LOST if request.had_home else PlacementReason.NEW_SESSION)
