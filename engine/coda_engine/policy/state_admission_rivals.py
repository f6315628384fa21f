"""Orders that Coda is compared with: CacheWise's, shortest preparation without aging, and one that knows the future."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar

from coda_engine.contract.reasons import AdmissionReason
from coda_engine.policy.state_admission import COST_THEN_DEMAND, ReadyRequest, Selection, first_feasible


@dataclass(frozen=True, slots=True)
class CacheWise:
    """Fewest additional KV blocks first (arXiv 2606.16824): those neither in HBM nor in the shadow; no aging.

    Nothing bounds how long a request with many missing blocks is passed by.
    """

    needs_inspection: ClassVar[bool] = True

    def select(self, candidates: Sequence[ReadyRequest], now_ms: float) -> Selection:
        """Return the feasible request with the fewest blocks to compute; ties by arrival, then id."""
        return first_feasible(
            candidates,
            now_ms,
            AdmissionReason.FEWEST_BLOCKS,
            lambda fitting: min(fitting, key=attrgetter("blocks_to_compute", "ready_at_ms", "request_id")),
        )


@dataclass(frozen=True, slots=True)
class ShortestPreparation:
    """Cheapest state preparation first (eq. 2 alone): Tiered-Aging without age and guard."""

    needs_inspection: ClassVar[bool] = True

    def select(self, candidates: Sequence[ReadyRequest], now_ms: float) -> Selection:
        """Return the feasible request with the lowest cost; ties by additional KV blocks, then ready time."""
        return first_feasible(
            candidates,
            now_ms,
            AdmissionReason.LOWEST_COST,
            lambda fitting: min(fitting, key=COST_THEN_DEMAND),
        )


@dataclass(frozen=True, slots=True)
class Oracle:
    """Shortest job first with the output's length known beforehand, which no server can: for comparisons outside one.

    Attributes:
        token_ms: Time of one output token, milliseconds; >= 0.
    """

    needs_inspection: ClassVar[bool] = True

    token_ms: float = 25.0

    def __post_init__(self) -> None:
        if self.token_ms < 0:
            raise ValueError("token_ms must not be negative")

    def select(self, candidates: Sequence[ReadyRequest], now_ms: float) -> Selection:
        """Return the feasible request with the least preparation and generation together; ties by ready time."""
        return first_feasible(
            candidates,
            now_ms,
            AdmissionReason.SHORTEST_JOB,
            lambda fitting: min(
                fitting, key=lambda one: (one.state_cost_ms + self.token_ms * one.output_tokens, one.ready_at_ms)
            ),
        )
