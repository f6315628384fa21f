"""State admission: which logically ready request has its KV state prepared next (paper section 4.2)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, Protocol

from coda_engine.contract.reasons import AdmissionReason


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """One candidate of the frontier, as inspected at decision time.

    Attributes:
        request_id: The engine's request id.
        ready_at_ms: When a user request's arrival or a tool's completion made it ready, milliseconds.
        state_cost_ms: C_state (eq. 1), milliseconds; 0 where the policy asks for no costs.
        additional_kv_blocks: Blocks that are not in HBM yet: to be restored, loaded or computed.
        feasible: It satisfies the current HBM constraint exactly as the allocator computes it.
        blocks_to_compute: Of the additional blocks those in no tier.
        output_tokens: Most tokens that it will generate.
    """

    request_id: str
    ready_at_ms: float
    state_cost_ms: float = 0.0
    additional_kv_blocks: int = 0
    feasible: bool = True
    blocks_to_compute: int = 0
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Selection:
    """The decision. ``request_id`` is None when nothing is to be promoted: the native head stays."""

    request_id: str | None
    reason: AdmissionReason
    wait_ms: float = 0.0
    state_cost_ms: float = 0.0

    @classmethod
    def of(cls, request: ReadyRequest, now_ms: float, reason: AdmissionReason) -> "Selection":
        """Return the decision for ``request``."""
        return cls(request.request_id, reason, now_ms - request.ready_at_ms, request.state_cost_ms)

    @property
    def reserves(self) -> bool:
        """Whether the request does not fit yet: as head of the queue it keeps freed blocks until it does."""
        return self.reason is AdmissionReason.RESERVED_FOR_OLDEST


class StateAdmissionPolicy(Protocol):
    """An order of the waiting queue.

    Attributes:
        needs_inspection: The policy looks at costs and feasibility; otherwise neither is computed.
    """

    @property
    def needs_inspection(self) -> bool:
        """Whether candidates must carry costs and feasibility."""
        ...

    def select(self, candidates: Sequence[ReadyRequest], now_ms: float) -> Selection:
        """Return which of ``candidates`` (in the native queue's order) is prepared next."""
        ...


@dataclass(frozen=True, slots=True)
class Fifo:
    """vLLM's own order: the native head, whatever it costs."""

    needs_inspection: ClassVar[bool] = False

    def select(self, candidates: Sequence[ReadyRequest], now_ms: float) -> Selection:
        """Return the native head."""
        if not candidates:
            return Selection(None, AdmissionReason.NOTHING_WAITING)
        head = candidates[0]
        return Selection(head.request_id, AdmissionReason.READY_ORDER, now_ms - head.ready_at_ms)


def first_feasible(
    candidates: Sequence[ReadyRequest],
    now_ms: float,
    reason: AdmissionReason,
    first: Callable[[Sequence[ReadyRequest]], ReadyRequest],
) -> Selection:
    """Return the one of the feasible candidates that ``first`` picks.

    Without a feasible candidate no decision is made (section 4.2).
    """
    if not candidates:
        return Selection(None, AdmissionReason.NOTHING_WAITING)
    feasible = [request for request in candidates if request.feasible]
    if not feasible:
        return Selection(None, AdmissionReason.NOTHING_FEASIBLE)
    only = len(candidates) == 1
    return Selection.of(first(feasible), now_ms, AdmissionReason.ONLY_CANDIDATE if only else reason)


READY_TIME: Callable[[ReadyRequest], float] = attrgetter("ready_at_ms")
COST_THEN_DEMAND: Callable[[ReadyRequest], tuple[float, ...]] = attrgetter(
    "state_cost_ms", "additional_kv_blocks", "ready_at_ms"
)
"""Raw cost, then additional KV blocks, then ready time (Appendix A)."""


@dataclass(frozen=True, slots=True)
class TieredAging:
    """Tiered-Aging (eq. 2-4; ties and constants of Appendix A).

    Attributes:
        tau_ms: Age at which a request's cost counts half, milliseconds; > 0.
        max_wait_ms: Age from which the oldest feasible request always wins, milliseconds; > 0.
    """

    needs_inspection: ClassVar[bool] = True

    tau_ms: float = 5_000.0
    max_wait_ms: float = 20_000.0

    def __post_init__(self) -> None:
        if self.tau_ms <= 0 or self.max_wait_ms <= 0:
            raise ValueError("tau_ms and max_wait_ms must be positive")

    def aged_cost_ms(self, request: ReadyRequest, now_ms: float) -> float:
        """Return the age-adjusted cost, C / (1 + w / tau) (eq. 3), milliseconds."""
        wait_ms = now_ms - request.ready_at_ms
        return request.state_cost_ms / (1.0 + wait_ms / self.tau_ms) if wait_ms > 0 else request.state_cost_ms

    def lowest_aged(self, requests: Sequence[ReadyRequest], now_ms: float) -> ReadyRequest:
        """Return the request with the lowest aged cost; equal ones are resolved by :data:`COST_THEN_DEMAND`."""
        aged_ms = [self.aged_cost_ms(request, now_ms) for request in requests]
        lowest_ms = min(aged_ms)
        equal = [request for request, cost_ms in zip(requests, aged_ms, strict=True) if cost_ms == lowest_ms]
        return min(equal, key=COST_THEN_DEMAND)

    def select(self, candidates: Sequence[ReadyRequest], now_ms: float) -> Selection:
        """Return the oldest feasible request once it has waited max_wait_ms, else the lowest aged cost (eq. 4)."""
        feasible = [request for request in candidates if request.feasible]
        oldest = min(feasible, key=READY_TIME, default=None)
        if oldest is not None and now_ms - oldest.ready_at_ms >= self.max_wait_ms:
            return Selection.of(oldest, now_ms, AdmissionReason.MAX_WAIT_REACHED)
        return first_feasible(
            candidates, now_ms, AdmissionReason.LOWEST_AGED_COST, lambda fitting: self.lowest_aged(fitting, now_ms)
        )
