"""State admission on a live engine: gather the frontier, let the policy decide, promote, report."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from coda_engine.contract.interface import FRONTIER_REQUESTS
from coda_engine.contract.reasons import AdmissionReason
from coda_engine.policy.cost import StateCostModel
from coda_engine.policy.state_admission import ReadyRequest, Selection, StateAdmissionPolicy
from coda_engine.vllm_adapter.scheduler.decisions import Decision, DecisionLog
from coda_engine.vllm_adapter.scheduler.feasibility import KvCapacity
from coda_engine.vllm_adapter.scheduler.inspection import Inspector
from coda_engine.vllm_adapter.scheduler.queue import FrontierQueue
from coda_engine.vllm_adapter.scheduler.residency import ResidencyIndex

_ADMISSIBLE = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
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


@dataclass(slots=True, eq=False)
class Pending:
    """A choice that the scheduler has not acted on yet."""

    request: Request
    decision: Decision

    @property
    def has_encoder_inputs(self) -> bool:
        """Whether something else than KV may keep the request from being scheduled."""
        inputs: bool = self.request.has_encoder_inputs
        return inputs


@dataclass(frozen=True, slots=True)
class Stuck:
    """When nothing was feasible. It stays so while nothing here changes and no more blocks are usable."""

    usable_blocks: int
    queue_changes: int
    doubts: int
    references: int

    def holds(self, now: "Stuck") -> bool:
        """Return whether it is certain that still nothing is feasible."""
        return now.usable_blocks <= self.usable_blocks and now == replace(self, usable_blocks=now.usable_blocks)


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
        self._native_unblock = scheduler._handle_blocked_waiting_request
        self._index = index
        self._ready_at_ms = ready_at_ms
        self._failed = failed
        self._clock = clock
        self._plan = AdmissionPlan()
        self._pending: Pending | None = None
        self._popped: list[Pending] = []
        self._infeasible_head: Request | None = None
        self._stuck: Stuck | None = None

    @property
    def plan(self) -> AdmissionPlan:
        """What is in force."""
        return self._plan

    def use(self, plan: AdmissionPlan) -> None:
        """Put ``plan`` in force from the next decision on."""
        self._plan = plan
        self.inspector.use(plan.cost)
        self._stuck = None

    def stop(self) -> None:
        """Leave every decision to vLLM from now on; touches nothing that an error may have left half done."""
        self._plan = AdmissionPlan()
        self._stuck = None

    # The queue's side -----------------------------------------------------------------------------------

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

    def end_step(self, waiting: FrontierQueue) -> None:
        """Count what the scheduler did with this step's choices."""
        for acted_on in self._popped:
            if acted_on.request.status == RequestStatus.RUNNING:
                self.log.add(acted_on.decision)
                self._forget((acted_on.request,))
        self._popped.clear()
        kept, self._pending = self._pending, None
        if kept is not None and kept.request is waiting.chosen and not kept.has_encoder_inputs:
            # Peeked and not popped: in the configurations that the gate lets through, that is the allocator's no.
            self.refused_after_feasible += 1
        waiting.reconsider()

    def _forget(self, requests: Sequence[Request]) -> None:
        self.inspector.forget(requests)
        if self._infeasible_head in requests:
            self._infeasible_head = None

    # Gather -> decide -> apply --------------------------------------------------------------------------

    def _select(self, waiting: FrontierQueue) -> Request | None:
        policy, now_ms = self._plan.policy, self._clock() * 1000.0
        assert policy is not None  # noqa: S101 - inspects says so
        circumstances = self._circumstances(waiting)
        if self._stuck is not None and self._stuck.holds(circumstances):
            return None
        for _ in range(_CONFIRM_ATTEMPTS):
            candidates = self._frontier(waiting)
            ready = [self.inspector.inspect(request, circumstances.usable_blocks) for request in candidates]
            selection = policy.select(ready, now_ms)
            if selection.request_id is None:
                # Others in the frontier wait for their grammar; they become candidates without an event.
                complete = len(candidates) == min(len(waiting), self._plan.frontier)
                self._stuck = circumstances if complete else None
                self._note_nothing_feasible(waiting, selection, ready, now_ms)
                return None
            winner = next(
                request
                for request, value in zip(candidates, ready, strict=True)
                if value.request_id == selection.request_id
            )
            if self.inspector.confirmed(winner):
                self._remember(winner, selection, ready, reordered=winner is not waiting[0])
                return winner
            self.unconfirmed += 1
        return None

    def _circumstances(self, waiting: FrontierQueue) -> Stuck:
        return Stuck(
            self.inspector.capacity.usable_blocks(), waiting.changes, self._index.doubts, self._index.references
        )

    def _frontier(self, waiting: FrontierQueue) -> list[Request]:
        """Return the admissible requests among the first of the queue.

        A request whose grammar is being compiled is looked at by the native scheduler only when it is the
        head; promoting others past it would leave it unnoticed, so it gets its native look here.
        """
        return [
            request
            for request in islice(waiting, self._plan.frontier)
            if request.status in _ADMISSIBLE
            or (request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR and self._native_unblock(request))
        ]

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
        )

    def _note_nothing_feasible(
        self, waiting: FrontierQueue, selection: Selection, ready: list[ReadyRequest], now_ms: float
    ) -> None:
        """Count one finding for each time that a head begins to be stuck, not for each step that it is."""
        head = waiting[0]
        if selection.reason is AdmissionReason.NOTHING_FEASIBLE and head is not self._infeasible_head:
            self._infeasible_head = head
            wait_ms = now_ms - self._ready_at_ms(head)
            self.log.add(Decision(head.request_id, selection.reason, wait_ms, 0.0, len(ready), 0, reordered=False))

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
