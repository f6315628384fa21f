"""SMetric's gate (arXiv 2607.08565, later version): a session goes home again while home can answer it in time."""

from dataclasses import dataclass

from coda_router.placement.candidates import Candidates
from coda_router.placement.observations import PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason
from coda_router.placement.smetric import WorthReturning
from coda_router.placement.stage import Narrowed


@dataclass(frozen=True, slots=True)
class AnswersInTime:
    """Decides for the worker with the session's longest local prefix while that can answer in time.

    The predicted time to first token is what waits for prefill there plus the request's own prefill, over the
    worker's rate. The request's prefill counts in tokens at short contexts: a token costs twice as much where
    the context before it has ``equal_cost_context_tokens``. What engines report as pending says nothing of
    contexts and counts as it is, a lower bound.

    The rate is the one that the worker was seen to reach (the paper's 90th percentile of the last 64 samples;
    the fastest steps are those at short contexts, where tokens count as they are), until then the paper's.
    Constants are the paper's for Qwen3-30B-A3B. A home without telemetry is judged by the first version's gate.

    Attributes:
        without_telemetry: The gate for a home of which nobody knows what waits there.
        slack: Multiple of the target within which home is kept.
        target_base_s: Target of the time to first token for an empty prompt, seconds.
        target_per_token_s: What each token of the prompt adds to it, seconds.
        equal_cost_context_tokens: Context at which attention costs as much as all else, tokens; > 0.
        drain_tokens_per_s: Prefill rate of a worker that was not seen to prefill yet, tokens a second; > 0.
    """

    without_telemetry: WorthReturning
    slack: float = 1.0
    target_base_s: float = 1.0
    target_per_token_s: float = 62.5e-6
    equal_cost_context_tokens: float = 6_923.0
    drain_tokens_per_s: float = 21_400.0

    def narrow(self, request: PlacementRequest, candidates: Candidates) -> Narrowed:
        """Return home alone, or all candidates with the reason against it."""
        position = candidates.position(request.home)
        if position is None:
            return Narrowed(candidates, PlacementReason.HOME_LOST if request.had_home else PlacementReason.NEW_SESSION)
        home = candidates[position]
        if not home.has_telemetry:
            return self.without_telemetry.narrow(request, candidates)
        if self.first_token_s(request, home) > self.slack * self._target_s(request):
            return Narrowed(candidates, PlacementReason.HOME_TOO_SLOW)
        is_reported = home.name in request.resident_tokens
        reason = PlacementReason.KV_RESIDENT if is_reported else PlacementReason.RECENT_PLACEMENT
        return Narrowed(Candidates((home,)), reason, is_final=True)

    def first_token_s(self, request: PlacementRequest, worker: WorkerView) -> float:
        """Return the predicted time to the request's first token at a worker, seconds."""
        new_tokens = request.new_tokens(worker.name)
        context_before = request.context_tokens - new_tokens / 2
        own_tokens = new_tokens * (1 + context_before / self.equal_cost_context_tokens)
        rate = worker.prefill_tokens_per_s or self.drain_tokens_per_s
        return (worker.pending_prefill_tokens + own_tokens) / rate

    def _target_s(self, request: PlacementRequest) -> float:
        return self.target_base_s + self.target_per_token_s * request.context_tokens
