"""Sees requests begin and get their first token, for startup costs and span attributes."""

from collections.abc import Iterable, Mapping

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from coda_engine.vllm_adapter.identity.table import IdentityTable
from coda_engine.vllm_adapter.scheduler.decisions import Decision, StatePath
from coda_engine.vllm_adapter.telemetry.startup import StartupCosts
from coda_engine.vllm_adapter.tracing.attributes import attach, span_attributes


class RequestBeginnings:
    """Told of each step; a request begins when vLLM gives it blocks, to compute or to restore into.

    Args:
        scheduler: The scheduler.
        identities: Who each request is from.
        costs: Takes what startups cost.
        tracing: Whether spans shall carry attributes.
    """

    def __init__(self, scheduler: Scheduler, identities: IdentityTable, costs: StartupCosts, *, tracing: bool) -> None:
        self._costs = costs
        self._scheduler = scheduler
        self._identities = identities
        self._tracing = tracing
        self._begun: dict[str, Request] = {}

    def step_scheduled(self, output: SchedulerOutput, admitted: Iterable[Decision]) -> None:
        """Note who begins with this step, and by which decision."""
        decisions: Mapping[str, Decision] = {decision.request_id: decision for decision in admitted}
        for request in self._candidates(output):
            if request.request_id not in self._begun and request.num_output_tokens == 0:
                self._begin(request, decisions.get(request.request_id))

    def step_finished(self) -> None:
        """Note whose first token has come."""
        for request_id in [name for name, request in self._begun.items() if request.num_output_tokens > 0]:
            del self._begun[request_id]
            self._costs.first_token(request_id)

    def request_over(self, request: Request) -> None:
        """Note that a request leaves."""
        if self._begun.pop(request.request_id, None) is not None and request.num_output_tokens > 0:
            self._costs.first_token(request.request_id)
        session = self._identities.get(request.request_id).session_key
        self._costs.over(request.request_id, session, request.num_tokens)

    def _candidates(self, output: SchedulerOutput) -> Iterable[Request]:
        requests: dict[str, Request] = self._scheduler.requests
        for data in output.scheduled_new_reqs:
            yield requests[data.req_id]
        for request in self._scheduler.kv_holding_waiting:
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                yield request

    def _begin(self, request: Request, decision: Decision | None) -> None:
        self._begun[request.request_id] = request
        identity, path = self._identities.get(request.request_id), _path(request)
        self._costs.admitted(
            request.request_id, identity.session_key, path.hbm_tokens, path.shadow_tokens, request.num_tokens
        )
        if self._tracing:
            attach(request, span_attributes(path, identity, decision))


def _path(request: Request) -> StatePath:
    """Return where vLLM itself says that the prompt's KV comes from; all computed while it says nothing."""
    stats = request.prefill_stats
    if stats is None or not stats.num_prompt_tokens:
        return StatePath(prefill_tokens=request.num_tokens)
    return StatePath(stats.num_local_cached_tokens, stats.num_external_cached_tokens, stats.num_computed_tokens)
