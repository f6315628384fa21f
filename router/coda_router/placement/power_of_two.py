"""The power of two choices (Mitzenmacher, 2001): the less loaded of two workers drawn at random."""

from dataclasses import dataclass

import xxhash

from coda_router.placement.candidates import Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class PowerOfTwo:
    """Decides for the less loaded of two workers.

    Stale loads make everybody run to the same least loaded worker; two draws do not. The draw comes of the
    session and this router's count of decisions: a decision can be repeated, and routers that count alike do
    not draw alike.
    """

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the less loaded of the two, the first drawn if they are equal."""
        count = len(candidates)
        if count == 1:
            return Narrowed(candidates, PlacementReason.ONLY_CANDIDATE, is_final=True)
        draw: int = xxhash.xxh3_64_intdigest(request.rotation.to_bytes(8, "little"), request.session_hash)
        first = draw % count
        second = (first + 1 + draw // count % (count - 1)) % count
        loads = candidates.loads
        chosen = first if loads[first] <= loads[second] else second
        return Narrowed(Candidates((candidates[chosen],)), PlacementReason.POWER_OF_TWO, is_final=True)
