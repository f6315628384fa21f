"""Stage 7: among equally loaded workers, the one whose decoding contexts are most like the request's."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import log2

from coda_router.placement.load import comparable_loads
from coda_router.placement.observations import Narrowed, PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason


def context_distance(decode_context_tokens: Sequence[int], context_tokens: int) -> float:
    """Return the mean absolute log2 ratio of active contexts to the arriving one, dimensionless (eq. 8).

    An empty population has distance 0: a worker that decodes nothing mixes no contexts.
    """
    if not decode_context_tokens:
        return 0.0
    arriving = log2(max(context_tokens, 1))
    return sum(abs(log2(max(tokens, 1)) - arriving) for tokens in decode_context_tokens) / len(decode_context_tokens)


@dataclass(frozen=True, slots=True)
class ContextDistance:
    """Decides by eq. 8; without telemetry or decoders it keeps the parent policy's minimum load."""

    def narrow(self, request: PlacementRequest, candidates: Sequence[WorkerView]) -> Narrowed:
        """Return the workers of the smallest distance, of them the least loaded."""
        if not all(w.has_telemetry for w in candidates):
            return self._least_loaded(candidates, PlacementReason.NO_TELEMETRY)
        if not any(w.decode_context_tokens for w in candidates):
            return self._least_loaded(candidates, PlacementReason.NO_DECODERS)
        distances = [context_distance(w.decode_context_tokens, request.context_tokens) for w in candidates]
        nearest = min(distances)
        best = [w for w, distance in zip(candidates, distances, strict=True) if distance == nearest]
        return self._least_loaded(best, PlacementReason.CONTEXT_DISTANCE)

    @staticmethod
    def _least_loaded(candidates: Sequence[WorkerView], reason: PlacementReason) -> Narrowed:
        loads = comparable_loads(candidates)
        least = [w for w, load in zip(candidates, loads, strict=True) if load == min(loads)]
        return Narrowed(least, reason, is_final=True)
