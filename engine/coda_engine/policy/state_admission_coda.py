"""Coda's own order: Tiered-Aging with every wait bounded and requests that can still be on time first."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from coda_engine.contract.reasons import AdmissionReason
from coda_engine.policy.state_admission import READY_TIME, ReadyRequest, Selection, TieredAging, first_feasible

CALIBRATED = TieredAging(tau_ms=20_000.0, max_wait_ms=70_000.0)
"""Chosen with a model of one engine under overload: a shorter guard costs tokens in time, a longer one bounds less."""


@dataclass(frozen=True, slots=True)
class Coda:
    """Tiered-Aging (paper section 4.2) and two rules more; without them it is Tiered-Aging.

    *Reservation.* The paper's guard looks at feasible requests only, so one that needs much of the HBM can be
    passed by for ever: whatever is freed goes to somebody smaller. Here the guard looks at the oldest request
    whether it fits or not; while it does not, it is put first all the same. vLLM admits nobody behind a head
    that does not fit, so freed blocks are kept until it does, and every wait is bounded.

    *On time first.* Under overload somebody has to be late. A request that can still deliver its first token
    in time gains from being next; one that is late already loses little by waiting on, up to the guard.

    Attributes:
        aging: Tiered-Aging, by default with :data:`CALIBRATED` constants.
        on_time_ms: Target of ready time to first token, milliseconds; 0 = the second rule is off.
        reserve: Whether the guard looks at requests that do not fit (the first rule).
    """

    needs_inspection: ClassVar[bool] = True

    aging: TieredAging = CALIBRATED
    on_time_ms: float = 4_000.0
    reserve: bool = True

    def __post_init__(self) -> None:
        if self.on_time_ms < 0:
            raise ValueError("on_time_ms must not be negative")

    def select(self, candidates: Sequence[ReadyRequest], now_ms: float) -> Selection:
        """Return the oldest request once it has waited max_wait_ms, else the lowest aged cost, on-time ones first.

        The oldest may not fit: then it is reserved for (see :attr:`Selection.reserves`).
        """
        guarded = candidates if self.reserve else [request for request in candidates if request.feasible]
        oldest = min(guarded, key=READY_TIME, default=None)
        if oldest is not None and now_ms - oldest.ready_at_ms >= self.aging.max_wait_ms:
            fits = AdmissionReason.MAX_WAIT_REACHED if oldest.feasible else AdmissionReason.RESERVED_FOR_OLDEST
            return Selection.of(oldest, now_ms, fits)
        if self.on_time_ms > 0 and len(candidates) > 1:
            # Its first token is in time if it is prepared now.
            on_time = [
                request
                for request in candidates
                if request.feasible and now_ms - request.ready_at_ms + request.state_cost_ms <= self.on_time_ms
            ]
            if on_time:
                return Selection.of(self.aging.lowest_aged(on_time, now_ms), now_ms, AdmissionReason.CHEAPEST_ON_TIME)
        return first_feasible(
            candidates,
            now_ms,
            AdmissionReason.LOWEST_AGED_COST,
            lambda fitting: self.aging.lowest_aged(fitting, now_ms),
        )
