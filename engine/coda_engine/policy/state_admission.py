"""State admission: which logically ready request has its KV state prepared next (paper section 4.2)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from coda_engine.contract.reasons import AdmissionReason


@dataclass(frozen=True, slots=True)
class ReadyRequest:
    """One candidate of the frontier, as inspected at decision time.

    Attributes:
        request_id: The engine's request id.
        ready_at_ms: When a user request's arrival or a tool's completion made it ready, milliseconds.
        state_cost_ms: C_state (eq. 1), milliseconds; 0 where the policy asks for no costs.
        additional_kv_blocks: Blocks that the allocator would take for it now.
        feasible: It satisfies the current HBM constraint exactly as the allocator computes it.
    """

    request_id: str
    ready_at_ms: float
    state_cost_ms: float = 0.0
    additional_kv_blocks: int = 0
    feasible: bool = True


@dataclass(frozen=True, slots=True)
class Selection:
    """The decision. ``request_id`` is None when nothing is to be promoted: the native head stays."""

    request_id: str | None
    reason: AdmissionReason
    wait_ms: float = 0.0
    state_cost_ms: float = 0.0


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

    @property
    def needs_inspection(self) -> bool:
        """FIFO looks at nothing."""
        return False

    def select(self, candidates: Sequence[ReadyRequest], now_ms: float) -> Selection:
        """Return the native head."""
        if not candidates:
            return Selection(None, AdmissionReason.NOTHING_WAITING)
        head = candidates[0]
        return Selection(head.request_id, AdmissionReason.READY_ORDER, now_ms - head.ready_at_ms)


@dataclass(frozen=True, slots=True)
class TieredAging:
    """Tiered-Aging (eq. 2-4; ties and constants of Appendix A).

    Attributes:
        tau_ms: Age at which a request's cost counts half, milliseconds; > 0.
        max_wait_ms: Age from which the oldest feasible request always wins, milliseconds; > 0.
    """

    tau_ms: float = 5_000.0
    max_wait_ms: float = 20_000.0

    def __post_init__(self) -> None:
        if self.tau_ms <= 0 or self.max_wait_ms <= 0:
            raise ValueError("tau_ms and max_wait_ms must be positive")

    @property
    def needs_inspection(self) -> bool:
        """Tiered-Aging needs each candidate's cost and feasibility."""
        return True

    def aged_cost_ms(self, request: ReadyRequest, now_ms: float) -> float:
        """Return the age-adjusted cost, C / (1 + w / tau) (eq. 3), milliseconds."""
        wait_ms = max(0.0, now_ms - request.ready_at_ms)
        return request.state_cost_ms / (1.0 + wait_ms / self.tau_ms)

    def select(self, candidates: Sequence[ReadyRequest], now_ms: float) -> Selection:
        """Return the oldest feasible request once it has waited max_wait_ms, else the lowest aged cost.

        Equal aged costs are resolved by raw cost, then additional KV blocks, then ready time
        (Appendix A). Without a feasible candidate no decision is made (section 4.2).
        """
        if not candidates:
            return Selection(None, AdmissionReason.NOTHING_WAITING)
        feasible = [request for request in candidates if request.feasible]
        if not feasible:
            return Selection(None, AdmissionReason.NOTHING_FEASIBLE)
        oldest = min(feasible, key=lambda request: request.ready_at_ms)
        if now_ms - oldest.ready_at_ms >= self.max_wait_ms:
            return self._selected(oldest, now_ms, AdmissionReason.MAX_WAIT_REACHED)
        cheapest = min(
            feasible,
            key=lambda request: (
                self.aged_cost_ms(request, now_ms),
                request.state_cost_ms,
                request.additional_kv_blocks,
                request.ready_at_ms,
            ),
        )
        only = AdmissionReason.ONLY_CANDIDATE if len(candidates) == 1 else AdmissionReason.LOWEST_AGED_COST
        return self._selected(cheapest, now_ms, only)

    @staticmethod
    def _selected(request: ReadyRequest, now_ms: float, reason: AdmissionReason) -> Selection:
        return Selection(request.request_id, reason, now_ms - request.ready_at_ms, request.state_cost_ms)
