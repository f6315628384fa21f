"""The victim window: shadows the pool's ``get_new_blocks`` and puts chosen victims at its free queue's head.

vLLM's free queue starts with blocks without content and goes on with cached ones, least recently used first.
When an allocation needs cached blocks, the window is looked at: of its first ``window_blocks`` those that are
one idle session's alone (and published, where the order asks for it) are ranked; the best are moved to the head
and vLLM takes them from there itself. Only free blocks change places, none enters or leaves the queue.

A look costs about a microsecond a block. Its ranking serves allocations for up to half a second, each
victim checked again when it is taken, and the next look waits until looks have taken at most 2% of the time.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

from coda_engine.contract.reasons import VictimReason
from coda_engine.policy.reclaim import Place, VictimOrder
from coda_engine.vllm_adapter.reclaim.gaps import SessionGaps
from coda_engine.vllm_adapter.reclaim.owners import NOBODY, BlockOwners

RANKING_LIFETIME_S = 0.5
RESTS_PER_LOOK = 49.0
"""How many times as long as a look took the next one waits: looks take at most 2% of the time."""


_Published = Callable[[BlockHashWithGroupId], bool]


class Publication(Protocol):
    """Where one finds out what the CPU shadow holds."""

    def __call__(self) -> _Published | None:
        """Return the look-up of published hashes; None while there is no shadow."""
        ...


@dataclass(frozen=True, slots=True)
class ReclaimPlan:
    """What the window does.

    Attributes:
        order: Ranks candidates; None: native order throughout.
        window_blocks: How many free blocks a look goes through; 0: none.
    """

    order: VictimOrder | None = None
    window_blocks: int = 0


NATIVE = ReclaimPlan()


@dataclass(frozen=True, slots=True)
class _Ranked:
    session: str
    rank: float
    position: int
    idle_since_s: float | None


_Candidate = tuple[Place, int, KVCacheBlock, BlockHashWithGroupId, _Ranked]
"""A block's place and position (no two are alike, so comparing ends there), itself, its hash and its session."""


class VictimWindow:
    """Chooses which cached blocks an allocation takes.

    Attributes:
        victims: Cached blocks that were given up, by :class:`VictimReason`.
        looks: How often the window was looked at.
        look_seconds: How long that took together.

    Args:
        pool: The scheduler's block pool.
        published: The CPU shadow's look-up.
        failed: Told of an error, after which the order is native for good.
        clock: Monotonic, seconds.
    """

    def __init__(
        self,
        pool: BlockPool,
        owners: BlockOwners,
        gaps: SessionGaps,
        published: Publication,
        failed: Callable[[Exception], None],
        clock: Callable[[], float],
    ) -> None:
        self.victims: dict[str, int] = {}
        self.looks = 0
        self.look_seconds = 0.0
        self._pool = pool
        self._owners = owners
        self._gaps = gaps
        self._published = published
        self._failed = failed
        self._clock = clock
        self._plan = NATIVE
        self._ranked: list[_Candidate] = []
        self._ranked_until_s = 0.0
        self._next_look_s = 0.0
        self._allocate = pool.get_new_blocks

    def install(self) -> None:
        """Shadow the pool's allocation."""
        self._pool.get_new_blocks = self._choose_and_allocate

    def use(self, plan: ReclaimPlan) -> None:
        """Choose by ``plan`` from now on."""
        self._plan = plan
        self._ranked = []
        self._ranked_until_s = self._next_look_s = 0.0

    def _choose_and_allocate(self, num_blocks: int) -> list[KVCacheBlock]:
        if self._plan.order is not None and self._plan.window_blocks > 0:
            try:
                self._choose(num_blocks, self._plan.order)
            except Exception as error:
                self._plan = NATIVE
                self._failed(error)
        blocks: list[KVCacheBlock] = self._allocate(num_blocks)
        return blocks

    def _choose(self, num_blocks: int, order: VictimOrder) -> None:
        queue = self._pool.free_block_queue
        if not 0 < num_blocks <= queue.num_free_blocks:
            return
        native = [block for block in islice(queue.iter_blocks_after(None), num_blocks) if block.block_hash is not None]
        if not native:
            return
        published = self._published() if order.needs_publication else _everything
        victims: list[KVCacheBlock] = []
        if published is not None:
            try:
                self._take(victims, len(native), order, published)
            finally:
                queue.prepend_n(victims)
        self._count(len(victims), num_blocks, order, published)

    def _take(self, victims: list[KVCacheBlock], wanted: int, order: VictimOrder, published: _Published) -> None:
        """Move up to ``wanted`` victims from the free queue to ``victims``, in their order; look at most once."""
        now_s = self._clock()
        if now_s >= self._ranked_until_s:
            self._ranked = []
        looked = False
        while len(victims) < wanted:
            if not self._ranked:
                if looked or now_s < self._next_look_s:
                    return
                looked = True
                self._look(order, published)
                if not self._ranked:
                    return
            candidate = self._ranked.pop()
            if self._still_good(candidate, published):
                block = candidate[2]
                self._pool.free_block_queue.remove(block)
                victims.append(block)

    def _still_good(self, candidate: _Candidate, published: _Published) -> bool:
        _, _, block, block_hash, ranked = candidate
        return (
            block.ref_cnt == 0
            and block.prev_free_block is not None
            and block.block_hash == block_hash
            and self._owners.owner(block) == ranked.session
            and self._gaps.idle_since_s(ranked.session) == ranked.idle_since_s
            and published(block_hash)
        )

    def _look(self, order: VictimOrder, published: _Published) -> None:
        """Rank the window anew, the first to go last in the list."""
        start_s = self._clock()
        owner_of, depth_of = self._owners.owner, self._owners.depth
        any_other_users = bool(self._pool.cached_block_hashes_by_block or self._pool._reuse_watchers)
        ranks: dict[str, _Ranked | None] = {}
        candidates: list[_Candidate] = []
        free = self._pool.free_block_queue.iter_blocks_after(None)
        for position, block in enumerate(islice(free, self._plan.window_blocks)):
            block_hash = block.block_hash
            if block_hash is None:
                continue
            session = owner_of(block)
            if session == NOBODY:
                continue
            if session in ranks:
                ranked = ranks[session]
            else:
                ranked = ranks[session] = self._rank(session, position, order)
            if ranked is None or not published(block_hash) or (any_other_users and self._has_other_users(block)):
                continue
            place = order.place(ranked.rank, ranked.position, position, depth_of(block))
            candidates.append((place, position, block, block_hash, ranked))
        candidates.sort(reverse=True)
        self._ranked = candidates
        end_s = self._clock()
        self.looks += 1
        self.look_seconds += end_s - start_s
        self._ranked_until_s = end_s + RANKING_LIFETIME_S
        self._next_look_s = end_s + RESTS_PER_LOOK * (end_s - start_s)

    def _rank(self, session: str, position: int, order: VictimOrder) -> _Ranked | None:
        idle = self._gaps.idle(session)
        rank = order.rank(idle) if idle is not None else None
        return _Ranked(session, rank, position, self._gaps.idle_since_s(session)) if rank is not None else None

    def _has_other_users(self, block: KVCacheBlock) -> bool:
        """Return whether more than its own hash leads to the block, or somebody watches for its reuse."""
        pool, number = self._pool, block.block_id
        return number in pool.cached_block_hashes_by_block or number in pool._reuse_watchers

    def _count(self, chosen: int, num_blocks: int, order: VictimOrder, published: _Published | None) -> None:
        """Count the allocation's victims: those chosen, and of the native ones that go with them why they were not."""
        self._add(VictimReason.PREDICTED_IDLE, chosen)
        ranked: dict[str, bool] = {}
        for block in islice(self._pool.free_block_queue.iter_blocks_after(None), chosen, num_blocks):
            if block.block_hash is not None:
                self._add(self._why_native(block, order, published, ranked), 1)

    def _why_native(
        self, block: KVCacheBlock, order: VictimOrder, published: _Published | None, ranked: dict[str, bool]
    ) -> VictimReason:
        session = self._owners.owner(block)
        if session == NOBODY or self._has_other_users(block):
            return VictimReason.SHARED
        if self._gaps.is_active(session):
            return VictimReason.SESSION_ACTIVE
        if session not in ranked:
            ranked[session] = self._rank(session, 0, order) is not None
        if not ranked[session]:
            return VictimReason.NO_PREDICTION
        if published is None or not published(block.block_hash):
            return VictimReason.NOT_PUBLISHED
        return VictimReason.NOT_LOOKED_AT

    def _add(self, reason: VictimReason, count: int) -> None:
        if count:
            self.victims[reason.value] = self.victims.get(reason.value, 0) + count


def _everything(_block_hash: BlockHashWithGroupId) -> bool:
    return True
