"""State admission on a live engine: gather the frontier, let the policy decide, promote, report."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import islice

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from coda_engine.contract.reasons import AdmissionReason
from coda_engine.policy.cost import StateCostModel, StateWork
from coda_engine.policy.state_admission import ReadyRequest, Selection, StateAdmissionPolicy
from coda_engine.vllm_adapter.scheduler.decisions import Decision, DecisionLog
from coda_engine.vllm_adapter.scheduler.feasibility import KvCapacity
from coda_engine.vllm_adapter.scheduler.queue import FrontierQueue
from coda_engine.vllm_adapter.scheduler.residency import ResidencyIndex, ResidentPrefix

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
    frontier: int = 64

    @property
    def inspects(self) -> bool:
        """Whether decisions look at costs and feasibility."""
        return self.policy is not None and self.policy.needs_inspection and self.cost is not None


@dataclass(slots=True, eq=False)
class Inspection:
    """What is known of one waiting request.

    Attributes:
        prefix: Its hit in HBM.
        tokens: Its tokens when it was first looked at; others mean another look.
        full_blocks: Blocks of its full sequence.
        ready: What the policy sees; remade only when something in it changed.
        evictable: Unused blocks of the hit, as of ``counted_at`` (the index's ``references``).
    """

    prefix: ResidentPrefix
    tokens: int
    full_blocks: int
    ready: ReadyRequest
    evictable: int = 0
    counted_at: int = -1


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
        self.capacity = KvCapacity(scheduler)
        self.log = DecisionLog()
        self.refused_after_feasible = 0
        self.unconfirmed = 0
        self._native_unblock = scheduler._handle_blocked_waiting_request
        self._index = index
        self._ready_at_ms = ready_at_ms
        self._failed = failed
        self._clock = clock
        self._plan = AdmissionPlan()
        self._inspections: dict[Request, Inspection] = {}
        self._pending: Pending | None = None
        self._popped: list[Pending] = []
        self._infeasible_head: Request | None = None

    @property
    def plan(self) -> AdmissionPlan:
        """What is in force."""
        return self._plan

    def use(self, plan: AdmissionPlan) -> None:
        """Put ``plan`` in force from the next decision on."""
        if plan.cost != self._plan.cost or not plan.inspects:
            self.forget(list(self._inspections))
        self._plan = plan

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
        if pending is None or pending.request is not request:
            pending = self._native_choice(request)
        self._popped.append(pending)

    def removed(self, requests: Iterable[Request]) -> None:
        """Forget requests that were aborted while they waited."""
        self._pending = None
        self.forget(requests)

    # The step's side ------------------------------------------------------------------------------------

    def end_step(self, waiting: FrontierQueue) -> None:
        """Count what the scheduler did with this step's choices."""
        for acted_on in self._popped:
            if acted_on.request.status == RequestStatus.RUNNING:
                self.log.add(acted_on.decision)
                self.forget((acted_on.request,))
        self._popped.clear()
        kept, self._pending = self._pending, None
        if kept is not None and kept.request is waiting.chosen and not kept.has_encoder_inputs:
            # Peeked and not popped: in the configurations that the gate lets through, that is the allocator's no.
            self.refused_after_feasible += 1
        waiting.reconsider()

    def forget(self, requests: Iterable[Request]) -> None:
        """Drop what is known of ``requests``."""
        for request in requests:
            inspection = self._inspections.pop(request, None)
            if inspection is not None:
                self._index.forget(inspection.prefix)
            if request is self._infeasible_head:
                self._infeasible_head = None

    def inspect(self, request: Request) -> ReadyRequest:
        """Return the request's readiness, cost, demand and feasibility as of now."""
        return self._inspect(request, self.capacity.usable_blocks())

    def resident_tokens(self, request: Request) -> int:
        """Return the tokens of the request's last inspected hit; 0 when it has not been looked at."""
        inspection = self._inspections.get(request)
        return len(inspection.prefix.blocks) * self.capacity.block_tokens if inspection is not None else 0

    # Gather -> decide -> apply --------------------------------------------------------------------------

    def _select(self, waiting: FrontierQueue) -> Request | None:
        policy, now_ms = self._plan.policy, self._clock() * 1000.0
        assert policy is not None  # noqa: S101 - inspects says so
        for _ in range(_CONFIRM_ATTEMPTS):
            candidates = self._frontier(waiting)
            usable = self.capacity.usable_blocks()
            ready = [self._inspect(request, usable) for request in candidates]
            selection = policy.select(ready, now_ms)
            if selection.request_id is None:
                self._note_nothing_feasible(waiting, selection, ready, now_ms)
                return None
            winner = next(
                request
                for request, value in zip(candidates, ready, strict=True)
                if value.request_id == selection.request_id
            )
            if self._confirmed(winner):
                self._remember(winner, selection, ready, reordered=winner is not waiting[0])
                return winner
        return None

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

    def _inspect(self, request: Request, usable_blocks: int) -> ReadyRequest:
        inspection = self._inspections.get(request)
        if inspection is None or inspection.tokens != request.num_tokens:
            inspection = self._first_look(request)
        if not inspection.prefix.current:
            self._follow(inspection)
        ready = inspection.ready
        feasible = self._fits(inspection, usable_blocks)
        if ready.feasible != feasible:
            ready = inspection.ready = replace(ready, feasible=feasible)
        return ready

    def _fits(self, inspection: Inspection, usable_blocks: int) -> bool:
        """Return the allocator's answer; counts the hit's unused blocks only where they decide it."""
        new_blocks = inspection.ready.additional_kv_blocks
        if inspection.full_blocks <= usable_blocks:
            return True
        if new_blocks > usable_blocks:
            return False
        if inspection.counted_at != self._index.references:
            inspection.counted_at = self._index.references
            inspection.evictable = inspection.prefix.evictable()
        return new_blocks + inspection.evictable <= usable_blocks

    def _first_look(self, request: Request) -> Inspection:
        self.forget((request,))
        inspection = Inspection(
            prefix=ResidentPrefix(request.block_hashes, self.capacity.hit_limit(request)),
            tokens=request.num_tokens,
            full_blocks=self.capacity.full_blocks(request),
            ready=ReadyRequest(request.request_id, self._ready_at_ms(request)),
        )
        self._inspections[request] = inspection
        return inspection

    def _follow(self, inspection: Inspection) -> None:
        """Bring hit, cost and demand up to date after the pool's events."""
        self._index.refresh(inspection.prefix)
        inspection.counted_at = -1
        hit_blocks = len(inspection.prefix.blocks)
        inspection.ready = replace(
            inspection.ready,
            state_cost_ms=self._cost_ms(inspection.tokens - hit_blocks * self.capacity.block_tokens),
            additional_kv_blocks=inspection.full_blocks - hit_blocks,
        )

    def _cost_ms(self, prefill_tokens: int) -> float:
        cost = self._plan.cost
        return cost.cost_ms(StateWork(prefill_tokens)) if cost is not None else 0.0

    def _confirmed(self, winner: Request) -> bool:
        inspection = self._inspections[winner]
        if self.capacity.confirm(winner, inspection.prefix.blocks):
            return True
        self.unconfirmed += 1
        self.forget((winner,))
        return False

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
