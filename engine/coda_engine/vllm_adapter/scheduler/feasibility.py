"""Whether the allocator would take a waiting request now, by its own rules and without asking it to.

``KVCacheManager.allocate_slots`` admits a waiting request through two gates. The first: the blocks of its
full sequence, less those it reuses, plus the reused ones that count as free, plus the watermark (when
anything runs) are free. The second looks only at what is taken in this step; it decides for a request that
is restored from the shadow, whose blocks must fit beside those that prefills and restores in flight still
need. The compatibility gate pins the source of these functions; :meth:`KvCapacity.confirm` asks them for
the winner.
"""

from dataclasses import dataclass

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


@dataclass(frozen=True, slots=True)
class Room:
    """The blocks that an admission may take now.

    Attributes:
        usable_blocks: Free ones less the watermark while anything runs.
        restorable_blocks: Of them those that a restore may take at once: what prefills and restores in
            flight still need is kept back.
    """

    usable_blocks: int
    restorable_blocks: int

    def holds(self, full_demand: int, restore_demand: int) -> bool:
        """Return whether a request passes both gates.

        Args:
            full_demand: Blocks that its full sequence takes out of the free ones.
            restore_demand: Blocks that its hit and its restore take; 0 when nothing is restored.
        """
        return full_demand <= self.usable_blocks and (restore_demand == 0 or restore_demand <= self.restorable_blocks)

    def within(self, other: "Room") -> bool:
        """Return whether nothing fits here that does not fit in ``other``."""
        return self.usable_blocks <= other.usable_blocks and self.restorable_blocks <= other.restorable_blocks


class KvCapacity:
    """Reads the scheduler and its KV manager; changes nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self.block_tokens: int = scheduler.block_size

    def room(self) -> Room:
        """Return what an admission may take now."""
        scheduler = self._scheduler
        usable = self._pool.get_num_free_blocks() - (self._manager.watermark_blocks if scheduler.running else 0)
        if scheduler.connector is None:
            return Room(usable, usable)
        reserved = scheduler._inflight_prefill_reserved_blocks() + scheduler._spec_decode_step_blocks
        return Room(usable, usable - reserved)

    def full_blocks(self, request: Request) -> int:
        """Return the blocks of the request's full sequence."""
        return -(-min(request.num_tokens, self._manager.max_model_len) // self.block_tokens)

    def hit_limit(self, request: Request) -> int:
        """Return the most blocks that the request may reuse: its last token is always computed."""
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        return min(len(request.block_hashes), (request.num_tokens - 1) // self.block_tokens)

    def adopted_blocks(self, request: Request) -> int:
        """Return how many blocks of HBM a request that is being restored has adopted."""
        blocks: int = self._manager.coordinator.single_type_managers[0].num_cached_block.get(request.request_id, 0)
        return blocks

    def native_demand(self, request: Request, hit: list[KVCacheBlock], restore_blocks: int = 0) -> int:
        """Return the blocks that vLLM's own full-sequence gate would charge for the request."""
        return self._demand(request, hit, restore_blocks, min(request.num_tokens, self._manager.max_model_len))

    def confirm(self, request: Request, hit: list[KVCacheBlock], restore_blocks: int, room: Room) -> bool:
        """Return whether vLLM's own functions agree that the request fits with this hit and restore."""
        full_demand = self.native_demand(request, hit, restore_blocks)
        restored_tokens = (len(hit) + restore_blocks) * self.block_tokens
        restore_demand = self._demand(request, hit, restore_blocks, restored_tokens) if restore_blocks else 0
        return room.holds(full_demand, restore_demand)

    def _demand(self, request: Request, hit: list[KVCacheBlock], restore_blocks: int, tokens: int) -> int:
        local_tokens = len(hit) * self.block_tokens
        computed_tokens = local_tokens + restore_blocks * self.block_tokens
        demand: int = self._manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens,
            new_computed_blocks=(hit,),
            num_encoder_tokens=0,
            total_computed_tokens=min(computed_tokens, self._manager.max_model_len),
            num_local_computed_tokens=local_tokens,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        return demand
