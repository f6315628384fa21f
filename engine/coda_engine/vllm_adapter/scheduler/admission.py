"""State admission on a live engine: gather the frontier, let the policy decide, promote, report."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from coda_engine.contract.interface import FRONTIER_REQUESTS
from coda_engine.contract.reasons import AdmissionReason
from coda_engine.policy.cost import StateCostModel
from coda_engine.policy.state_admission import ReadyRequest, Selection, StateAdmissionPolicy
from coda_engine.vllm_adapter.scheduler.decisions import Decision, DecisionLog, StatePath
from coda_engine.vllm_adapter.scheduler.feasibility import KvCapacity
from coda_engine.vllm_adapter.scheduler.inspection import Inspector
from coda_engine.vllm_adapter.scheduler.pending import Circumstances, Pending, Standstill
from coda_engine.vllm_adapter.scheduler.queue import FrontierQueue
from coda_engine.vllm_adapter.scheduler.residency import ResidencyIndex
from coda_engine.vllm_adapter.scheduler.shadow_tier import ShadowTier, open_shadow

_ADMISSIBLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
_ADMITTED = (RequestStatus.RUNNING, RequestStatus.WAITING_FOR_REMOTE_KVS)
_CONFIRM_ATTEMPTS = 3


@dataclass(frozen=True, slots=True)
class AdmissionPlan:
    """What the engine runs now, as settings, profile and gates resolve it.

    Attributes:
        policy: The order; None while the feature is off (vLLM's own order, unobserved).
        cost: Costs of state preparation; needed by policies that inspect.
        frontier: Most waiting requests that one decision looks at.
    """

    policy: StateAdmissionPolicy | None = None
    cost: StateCostModel | None = None
    frontier: int = FRONTIER_REQUESTS

    @property
    def inspects(self) -> bool:
        """Whether decisions look at costs and feasibility."""
        return self.policy is not None and self.policy.needs_inspection and self.cost is not None


class StateAdmission:
    """The chooser of the waiting queue's head (see :class:`HeadChooser`).

    Args:
        scheduler: The scheduler whose queue this is.
        index: Residency of waiting prompts.
        ready_at_ms: Logical readiness of a request, Unix milliseconds.
        failed: Called with the error when choosing raised; the native order is used from then on.
        clock: Unix seconds.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        index: ResidencyIndex,
        ready_at_ms: Callable[[Request], float],
        failed: Callable[[Exception], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.inspector = Inspector(KvCapacity(scheduler), index, ready_at_ms)
        self.log = DecisionLog()
        self.refused_after_feasible = 0
        self.unconfirmed = 0
        self._scheduler = scheduler
        self._native_unblock = scheduler._handle_blocked_waiting_request
        self._index = index
        self._ready_at_ms = ready_at_ms
        self._failed = failed
        self._clock = clock
        self._plan = AdmissionPlan()
        self._pending: Pending | None = None
        self._popped: list[Pending] = []
        self._noted: tuple[Request, AdmissionReason] | None = None
        self._standstill: Standstill | None = None

    @property
    def plan(self) -> AdmissionPlan:
        """What is in force."""
        return self._plan

    @property
    def reserved_for(self) -> Request | None:
        """The waiting request for which freed blocks are kept; None: for nobody."""
        request, reason = self._noted or (None, None)
        return request if reason is AdmissionReason.RESERVED_FOR_OLDEST and self._plan.inspects else None

    def use(self, plan: AdmissionPlan) -> None:
        """Put ``plan`` in force from the next decision on."""
        self._plan = plan
        self.inspector.use(plan.cost)
        self._standstill = None

    def stop(self) -> None:
        """Leave every decision to vLLM from now on; touches nothing that an error may have left half done."""
        self._plan = AdmissionPlan()
        self._standstill = None

    # The queue's side -----------------------------------------------------------------------------------

    @property
    def reorders(self) -> bool:
        """Whether others than the native head may be promoted."""
        return self._plan.inspects

    def choose(self, waiting: FrontierQueue) -> Request | None:
        """Return the request to promote to the head; None keeps the native one."""
        self._pending = None
        if not self._plan.inspects:
            return None
        started_s = time.perf_counter()
        try:
            return self._select(waiting)
        except Exception as error:  # the engine must go on whatever happens here
            self._pending = None
            self._failed(error)
            return None
        finally:
            self.log.took(time.perf_counter() - started_s)

    def popped(self, request: Request) -> None:
        """Remember the choice that the scheduler acted on; :meth:`end_step` sees what became of it."""
        pending, self._pending = self._pending, None
        try:
            if pending is None or pending.request is not request:
                pending = self._native_choice(request)
            self._popped.append(pending)
        except Exception as error:
            self._failed(error)

    def removed(self, requests: Sequence[Request]) -> None:
        """Forget requests that were aborted while they waited."""
        self._pending = None
        try:
            self._forget(requests)
        except Exception as error:
            self._failed(error)

    # The step's side ------------------------------------------------------------------------------------

    def end_step(self, waiting: FrontierQueue, scheduled_tokens: Mapping[str, int]) -> list[Decision]:
        """Count what the scheduler did with this step's choices; return the admissions.

        Args:
            waiting: The queue.
            scheduled_tokens: Tokens that the step computes, by request.
        """
        admitted = []
        for acted_on in self._popped:
            request = acted_on.request
            if request.status in _ADMITTED:
                admitted.append(replace(acted_on.decision, path=self._path(request, scheduled_tokens)))
                self.log.add(admitted[-1])
                self._forget((request,))
        self._popped.clear()
        kept, self._pending = self._pending, None
        if kept is not None and kept.request is waiting.chosen and kept.refused:
            # Peeked and not popped: in the configurations that the gate lets through, that is the allocator's no.
            self.refused_after_feasible += 1
        waiting.reconsider()
        return admitted

    def _path(self, request: Request, scheduled_tokens: Mapping[str, int]) -> StatePath:
        computed: int = request.num_computed_tokens
        if request.status == RequestStatus.RUNNING:
            hbm_tokens = computed - scheduled_tokens.get(request.request_id, 0)
            return StatePath(hbm_tokens, 0, request.num_tokens - hbm_tokens)
        hbm_tokens = self.inspector.capacity.adopted_blocks(request) * self.inspector.capacity.block_tokens
        # Of a prompt that is restored whole the last token is computed again.
        return StatePath(hbm_tokens, computed - hbm_tokens, max(request.num_tokens - computed, 1))

    def _forget(self, requests: Sequence[Request]) -> None:
        self.inspector.forget(requests)
        if self._noted is not None and self._noted[0] in requests:
            self._noted = None

    # Gather -> decide -> apply --------------------------------------------------------------------------

    def _select(self, waiting: FrontierQueue) -> Request | None:
        policy, now_ms = self._plan.policy, self._clock() * 1000.0
        assert policy is not None  # noqa: S101 - inspects says so
        self._follow_shadow()
        now = self._circumstances(waiting)
        if self._standstill is not None and self._standstill.holds(now):
            return self._standstill.reserved
        queueing_ms = self.inspector.queueing_ms()
        for _ in range(_CONFIRM_ATTEMPTS):
            candidates = self._frontier(waiting)
            ready = [self.inspector.inspect(request, now.room, queueing_ms) for request in candidates]
            selection = policy.select(ready, now_ms)
            winner = _chosen(selection, candidates)
            if winner is not None and self.inspector.passed_over(winner):
                candidates, ready = self._without_passed_over(candidates, ready)
                selection = policy.select(ready, now_ms)
                winner = _chosen(selection, candidates)
            if winner is None or selection.reserves:
                # Others in the frontier wait for a grammar or a transfer; they become candidates without an event.
                complete = len(candidates) == min(len(waiting), self._plan.frontier)
                self._standstill = Standstill(now, winner) if complete else None
                self._note_standstill(winner or waiting[0], selection, ready, now_ms)
            if winner is None:
                return None
            if selection.reserves or self.inspector.confirmed(winner, now.room):
                self._remember(winner, selection, ready, reordered=winner is not waiting[0])
                return winner
            self.unconfirmed += 1
        return None

    def _follow_shadow(self) -> None:
        """Look at the shadow that is open now; an index that closes says nothing more."""
        shadow, tier = open_shadow(self._scheduler), self.inspector.shadow
        if shadow is not (tier.shadow if tier is not None else None):
            block_tokens = self.inspector.capacity.block_tokens
            self.inspector.use_shadow(ShadowTier(shadow, block_tokens) if shadow is not None else None)

    def _circumstances(self, waiting: FrontierQueue) -> Circumstances:
        tier = self.inspector.shadow
        doubts = self._index.doubts + (tier.residency.doubts if tier is not None else 0)
        return Circumstances(self.inspector.capacity.room(), waiting.changes, doubts, self._index.references)

    def _frontier(self, waiting: FrontierQueue) -> list[Request]:
        """Return the admissible requests among the first of the queue.

        A request whose grammar is being compiled is looked at by the native scheduler only when it is the
        head; promoting others past it would leave it unnoticed, so it gets its native look here.
        """
        return [
            request
            for request in islice(waiting, self._plan.frontier)
            if (
                request.status in _ADMISSIBLE
                or (
                    request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
                    and self._native_unblock(request)
                )
            )
            and (request.drop_stale_output or not request.num_stale_output_tokens)
        ]

    def _without_passed_over(
        self, candidates: list[Request], ready: list[ReadyRequest]
    ) -> tuple[list[Request], list[ReadyRequest]]:
        """Leave out whom vLLM would pass over in this step for the sake of a transfer."""
        kept = [
            (request, value)
            for request, value in zip(candidates, ready, strict=True)
            if not self.inspector.passed_over(request)
        ]
        return [request for request, _ in kept], [value for _, value in kept]

    def _remember(self, winner: Request, selection: Selection, ready: list[ReadyRequest], *, reordered: bool) -> None:
        self._pending = Pending(
            winner,
            Decision(
                winner.request_id,
                selection.reason,
                selection.wait_ms,
                selection.state_cost_ms,
                candidates=len(ready),
                feasible=sum(value.feasible for value in ready),
                reordered=reordered,
            ),
            promised=not selection.reserves,
        )

    def _note_standstill(self, head: Request, selection: Selection, ready: list[ReadyRequest], now_ms: float) -> None:
        """Count one finding for each time that a head begins to wait for blocks, not for each step that it does."""
        found = (head, selection.reason)
        if selection.reason is not AdmissionReason.NOTHING_WAITING and found != self._noted:
            self._noted = found
            wait_ms = now_ms - self._ready_at_ms(head)
            feasible = sum(value.feasible for value in ready)
            self.log.add(
                Decision(head.request_id, selection.reason, wait_ms, 0.0, len(ready), feasible, reordered=False)
            )

    def _native_choice(self, request: Request) -> Pending:
        """Return the decision of an order that looks at the head only."""
        now_ms = self._clock() * 1000.0
        value = ReadyRequest(request.request_id, self._ready_at_ms(request))
        policy = self._plan.policy
        if policy is None or policy.needs_inspection:
            selection = Selection(request.request_id, AdmissionReason.FEATURE_OFF, now_ms - value.ready_at_ms)
        else:
            selection = policy.select((value,), now_ms)
        decision = Decision(request.request_id, selection.reason, selection.wait_ms, 0.0, 1, 1, reordered=False)
        return Pending(request, decision)


def _chosen(selection: Selection, candidates: Sequence[Request]) -> Request | None:
    return next((request for request in candidates if request.request_id == selection.request_id), None)
