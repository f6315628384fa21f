"""SMetric's later fallback, LMetric (arXiv 2603.15202): least prefill work times requests."""

from dataclasses import dataclass

from coda_router.placement.candidates import Candidates
from coda_router.placement.load import least_loaded
from coda_router.placement.observations import PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class LeastWork:
    """Decides for the smallest product of tokens to prefill and requests, both with this request counted in.

    The tokens are those pending at the worker and those that the request would need there, so a worker that has
    some of its prefix is preferred; a first request needs the same everywhere and is placed by load alone. The
    request itself counts among the requests, so that idle workers differ in what they have of its prefix.
    """

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return the workers of the smallest product; without telemetry the least loaded."""
        if len(candidates) == 1:
            return Narrowed(candidates, PlacementReason.ONLY_CANDIDATE, is_final=True)
        if candidates.silent:
            return Narrowed(least_loaded(candidates), PlacementReason.NO_TELEMETRY, is_final=True)
        whole_tokens, loads = request.context_tokens, candidates.loads
        work = [
            (w.pending_prefill_tokens + whole_tokens) * (load + 1) for w, load in zip(candidates, loads, strict=True)
        ]
        for name in {*request.resident_tokens, request.recent_worker}:
            position = candidates.position(name)
            if position is not None:
                tokens = candidates[position].pending_prefill_tokens + request.new_tokens(candidates[position].name)
                work[position] = tokens * (loads[position] + 1)
        least = min(work)
        best = [w for w, product in zip(candidates, work, strict=True) if product == least]
        return Narrowed(Candidates(best), PlacementReason.LEAST_WORK, is_final=True)
