"""Whether the allocator would take a waiting request now, by its own rules and without asking it to.

``KVCacheManager.allocate_slots`` admits a waiting request when the blocks of its full sequence, less those
it reuses, plus the reused ones that count as free, plus the watermark (when anything runs) are free. The
compatibility gate pins the source of that function; :meth:`KvCapacity.confirm` asks vLLM's own functions
for the winner.
"""

from typing import Any

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request


class KvCapacity:
    """Reads the scheduler's KV manager; changes nothing."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._manager = scheduler.kv_cache_manager
        self._pool = self._manager.block_pool
        self.block_tokens: int = scheduler.block_size

    def usable_blocks(self) -> int:
        """Return the blocks that an admission may take now: free ones less the watermark while anything runs."""
        watermark = self._manager.watermark_blocks if self._scheduler.running else 0
        free: int = self._pool.get_num_free_blocks()
        return free - watermark

    def full_blocks(self, request: Request) -> int:
        """Return the blocks of the request's full sequence."""
        return -(-min(request.num_tokens, self._manager.max_model_len) // self.block_tokens)

    def hit_limit(self, request: Request) -> int:
        """Return the most blocks that the request may reuse: its last token is always computed."""
        if not self._manager.prefix_cache_lookup_enabled(request):
            return 0
        return min(len(request.block_hashes), (request.num_tokens - 1) // self.block_tokens)

    def native_hit(self, request: Request) -> list[KVCacheBlock]:
        """Return the blocks that vLLM's own look-up finds for the request."""
        if not self._manager.prefix_cache_lookup_enabled(request):
            return []
        hit: tuple[Any, ...] = self._manager.coordinator.find_longest_cache_hit(
            request.block_hashes, request.num_tokens - 1
        )
        blocks: list[KVCacheBlock] = hit[0][0]
        return blocks

    def native_demand(self, request: Request, hit: list[KVCacheBlock]) -> int:
        """Return the blocks that vLLM's own full-sequence gate would charge for the request."""
        tokens = min(request.num_tokens, self._manager.max_model_len)
        computed = len(hit) * self.block_tokens
        demand: int = self._manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=tokens,
            new_computed_blocks=(hit,),
            num_encoder_tokens=0,
            total_computed_tokens=min(computed, self._manager.max_model_len),
            num_local_computed_tokens=computed,
            num_tokens_main_model=tokens,
            apply_admission_cap=True,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )
        return demand

    def confirm(self, request: Request, hit: list[KVCacheBlock]) -> bool:
        """Return whether vLLM's own functions agree with an inspection: this hit, and it fits."""
        return self.native_hit(request) == hit and self.native_demand(request, hit) <= self.usable_blocks()
