"""What admission knows of each waiting request: its hit, cost, demand and whether it fits.

Nothing here is computed again unless the pool's events, the request or the cost model changed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from vllm.v1.request import Request

from coda_engine.policy.cost import StateCostModel, StateWork
from coda_engine.policy.state_admission import ReadyRequest
from coda_engine.vllm_adapter.scheduler.feasibility import KvCapacity
from coda_engine.vllm_adapter.scheduler.residency import ResidencyIndex, ResidentPrefix


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


class Inspector:
    """Read-only looks at waiting requests (paper section 6: candidate inspection is read-only).

    Args:
        capacity: What the allocator would say.
        index: Follows the hits.
        ready_at_ms: Logical readiness of a request, Unix milliseconds.
    """

    def __init__(self, capacity: KvCapacity, index: ResidencyIndex, ready_at_ms: Callable[[Request], float]) -> None:
        self.capacity = capacity
        self._index = index
        self._ready_at_ms = ready_at_ms
        self._cost: StateCostModel | None = None
        self._inspections: dict[Request, Inspection] = {}

    def __len__(self) -> int:
        return len(self._inspections)

    def use(self, cost: StateCostModel | None) -> None:
        """Put a cost model in force; None = costs are 0."""
        if cost != self._cost:
            self._cost = cost
            self.forget(list(self._inspections))

    def forget(self, requests: Iterable[Request]) -> None:
        """Drop what is known of ``requests``."""
        for request in requests:
            inspection = self._inspections.pop(request, None)
            if inspection is not None:
                self._index.forget(inspection.prefix)

    def inspect(self, request: Request, usable_blocks: int) -> ReadyRequest:
        """Return the request's readiness, cost, demand and feasibility as of now."""
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

    def confirmed(self, winner: Request) -> bool:
        """Return whether vLLM's own functions agree with the inspection; otherwise it will be made anew."""
        if self.capacity.confirm(winner, self._inspections[winner].prefix.blocks):
            return True
        self.forget((winner,))
        return False

    def resident_tokens(self, request: Request) -> int:
        """Return the tokens of the request's last inspected hit; 0 when it has not been looked at."""
        inspection = self._inspections.get(request)
        return len(inspection.prefix.blocks) * self.capacity.block_tokens if inspection is not None else 0

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
        return self._cost.cost_ms(StateWork(prefill_tokens)) if self._cost is not None else 0.0
