"""What admission knows of each waiting request: what is where, its cost, its demand and whether it fits.

Nothing here is computed again unless the events of a tier, the request or the cost model changed.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm.v1.request import Request

from coda_engine.policy.cost import StateCostModel, StateWork
from coda_engine.policy.state_admission import ReadyRequest
from coda_engine.vllm_adapter.scheduler.feasibility import KvCapacity, Room
from coda_engine.vllm_adapter.scheduler.residency import CURRENT, ResidencyIndex, ResidentPrefix
from coda_engine.vllm_adapter.scheduler.shadow_residency import RestorableRun
from coda_engine.vllm_adapter.scheduler.shadow_tier import ShadowTier

_NEVER = 1 << 62


@dataclass(slots=True, eq=False)
class Inspection:
    """What is known of one waiting request.

    Attributes:
        prefix: Its hit in HBM.
        run: What it would restore after the hit; None without a shadow.
        tokens: Its tokens when it was first looked at; others mean another look.
        full_blocks: Blocks of its full sequence.
        ready: What the policy sees; remade only when something in it changed.
        surely_fits_in: Usable blocks with which it fits whatever its hit is.
        restore_blocks: Blocks that it would restore.
        cost_ms: Its cost on an idle transfer domain.
        evictable: Unused blocks of the hit, as of ``counted_at`` (the index's ``references``).
    """

    prefix: ResidentPrefix
    run: RestorableRun | None
    tokens: int
    full_blocks: int
    ready: ReadyRequest
    surely_fits_in: int = _NEVER
    restore_blocks: int = 0
    cost_ms: float = 0.0
    evictable: int = 0
    counted_at: int = -1


class Inspector:
    """Read-only looks at waiting requests (paper section 6: candidate inspection is read-only).

    Args:
        capacity: What the allocator would say.
        index: Follows the hits in HBM.
        ready_at_ms: Logical readiness of a request, Unix milliseconds.
    """

    def __init__(self, capacity: KvCapacity, index: ResidencyIndex, ready_at_ms: Callable[[Request], float]) -> None:
        self.capacity = capacity
        self.shadow: ShadowTier | None = None
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

    def use_shadow(self, shadow: ShadowTier | None) -> None:
        """Look at this shadow from now on; None = there is none, or none any more."""
        self.forget(list(self._inspections))
        self.shadow = shadow

    def forget(self, requests: Iterable[Request]) -> None:
        """Drop what is known of ``requests``."""
        for request in requests:
            inspection = self._inspections.pop(request, None)
            if inspection is not None:
                self._index.forget(inspection.prefix)
                if inspection.run is not None and self.shadow is not None:
                    self.shadow.residency.forget(inspection.run)

    def queueing_ms(self) -> float:
        """Return how long a restore ordered now would wait for those ordered before it, milliseconds."""
        if self.shadow is None or self._cost is None or self._cost.restore is None:
            return 0.0
        return self._cost.restore.queueing_ms(self.shadow.outstanding_bytes)

    def inspect(self, request: Request, room: Room, queueing_ms: float = 0.0) -> ReadyRequest:
        """Return the request's readiness, cost, demand and feasibility as of now."""
        # Runs for each candidate of each decision: no property, no dataclasses.replace.
        inspection = self._inspections.get(request)
        if inspection is None or inspection.tokens != request.num_tokens:
            inspection = self._first_look(request)
        run = inspection.run
        if inspection.prefix.stale_from != CURRENT or (run is not None and run.stale_from != CURRENT):
            self._follow(inspection)
        ready, cost_ms = inspection.ready, inspection.cost_ms
        feasible = inspection.surely_fits_in <= room.usable_blocks or self._fits(inspection, room)
        if inspection.restore_blocks:
            cost_ms += queueing_ms
        if ready.feasible != feasible or ready.state_cost_ms != cost_ms:
            ready = inspection.ready = ReadyRequest(
                ready.request_id, ready.ready_at_ms, cost_ms, ready.additional_kv_blocks, feasible,
                ready.blocks_to_compute, ready.output_tokens,
            )  # fmt: skip
        return ready

    def passed_over(self, request: Request) -> bool:
        """Return whether vLLM would pass the inspected request over in this step for the sake of a transfer."""
        inspection = self._inspections[request]
        return (
            self.shadow is not None and inspection.run is not None and self.shadow.passed_over(request, inspection.run)
        )

    def confirmed(self, winner: Request, room: Room) -> bool:
        """Return whether the pool and vLLM's own arithmetic agree with the inspection; if not, it is made anew."""
        inspection = self._inspections[winner]
        if self._index.agrees(inspection.prefix) and self.capacity.confirm(
            winner, inspection.prefix.blocks, inspection.restore_blocks, room
        ):
            return True
        self.forget((winner,))
        return False

    def resident_tokens(self, request: Request) -> int:
        """Return the tokens of the request's last inspected hit; 0 when it has not been looked at."""
        inspection = self._inspections.get(request)
        return len(inspection.prefix.blocks) * self.capacity.block_tokens if inspection is not None else 0

    def restorable_tokens(self, request: Request) -> int:
        """Return the tokens that the shadow would bring back; 0 when the request has not been looked at."""
        inspection = self._inspections.get(request)
        return inspection.restore_blocks * self.capacity.block_tokens if inspection is not None else 0

    def _fits(self, inspection: Inspection, room: Room) -> bool:
        """Return the allocator's answer; counts the hit's unused blocks only where they decide it."""
        new_blocks, restore_blocks = inspection.ready.additional_kv_blocks, inspection.restore_blocks
        if inspection.full_blocks <= room.usable_blocks and (
            not restore_blocks or inspection.full_blocks - new_blocks + restore_blocks <= room.restorable_blocks
        ):
            return True
        if new_blocks > room.usable_blocks or (restore_blocks and restore_blocks > room.restorable_blocks):
            return False
        if inspection.counted_at != self._index.references:
            inspection.counted_at = self._index.references
            inspection.evictable = inspection.prefix.evictable()
        evictable = inspection.evictable
        return room.holds(new_blocks + evictable, restore_blocks + evictable if restore_blocks else 0)

    def _first_look(self, request: Request) -> Inspection:
        self.forget((request,))
        inspection = Inspection(
            prefix=ResidentPrefix(request.block_hashes, self.capacity.hit_limit(request)),
            run=self.shadow.run_of(request) if self.shadow is not None else None,
            tokens=request.num_tokens,
            full_blocks=self.capacity.full_blocks(request),
            ready=ReadyRequest(request.request_id, self._ready_at_ms(request), output_tokens=request.max_tokens),
        )
        self._inspections[request] = inspection
        return inspection

    def _follow(self, inspection: Inspection) -> None:
        """Bring residency, cost and demand up to date after the tiers' events."""
        self._index.refresh(inspection.prefix)
        inspection.counted_at = -1
        hit_blocks = len(inspection.prefix.blocks)
        if inspection.run is not None and self.shadow is not None:
            self.shadow.residency.refresh(inspection.run, hit_blocks)
            inspection.restore_blocks = inspection.run.blocks
        inspection.surely_fits_in = _NEVER if inspection.restore_blocks else inspection.full_blocks
        inspection.cost_ms = self._cost_ms(inspection.tokens, hit_blocks, inspection.restore_blocks)
        ready, new_blocks = inspection.ready, inspection.full_blocks - hit_blocks
        inspection.ready = ReadyRequest(
            ready.request_id, ready.ready_at_ms, inspection.cost_ms, new_blocks, ready.feasible,
            new_blocks - inspection.restore_blocks, ready.output_tokens,
        )  # fmt: skip

    def _cost_ms(self, tokens: int, hit_blocks: int, restore_blocks: int) -> float:
        """Return the cost on an idle transfer domain; the last token is computed even if everything is restored."""
        if self._cost is None:
            return 0.0
        context_tokens = min((hit_blocks + restore_blocks) * self.capacity.block_tokens, tokens - 1)
        page_bytes = self.shadow.page_bytes if self.shadow is not None else 0
        return self._cost.cost_ms(
            StateWork(
                prefill_tokens=tokens - context_tokens,
                context_tokens=context_tokens,
                restore_bytes=restore_blocks * page_bytes,
            )
        )
