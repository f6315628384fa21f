"""Consistent hashing with bounded loads (Mirrokni, Thorup, Zadimoghaddam, 2018) over sessions."""

from dataclasses import dataclass
from math import ceil

import xxhash

from coda_router.placement.candidates import Candidates
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class HashOwner:
    """Decides for the session's owner, or, while that is full, for the next owner with room.

    Every worker has a weight for every session, a hash of both, and the heaviest one owns it (rendezvous
    hashing): all routers agree without a word, whatever the load was before, and a worker that comes or goes
    moves only the sessions that it owns. A session is what the client names, or the hash of its conversation's
    opening (system prompt, tools and first user message), so that equal openings meet at one worker.

    Attributes:
        load_factor: Multiple of the mean load, with this request counted in and rounded up, that no worker
            exceeds; >= 1, so that there is always one with room.
    """

    load_factor: float

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the one worker that has room and the largest weight."""
        session_hash, digest = request.session_hash, xxhash.xxh3_64_intdigest
        weights = [digest(w.name.encode(), session_hash) for w in candidates]
        owner = weights.index(max(weights))
        loads = candidates.loads
        most_requests = ceil(self.load_factor * (sum(loads) + 1) / len(loads))
        if loads[owner] < most_requests:
            return Narrowed(Candidates((candidates[owner],)), PlacementReason.HASH_OWNER, is_final=True)
        _, chosen = max([(weights[at], at) for at, load in enumerate(loads) if load < most_requests])
        return Narrowed(Candidates((candidates[chosen],)), PlacementReason.HASH_OWNER_FULL, is_final=True)
