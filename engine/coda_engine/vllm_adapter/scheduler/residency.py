"""How much of each waiting prompt is in HBM, kept current by the block pool's own events.

Probing 64 prompts anew at every step would cost milliseconds. A prompt's hit is the longest prefix of its
block hashes that the pool knows, so only two events can change it: one of its hashes is evicted, or the
first missing one is inserted. Each prefix therefore watches exactly these hashes, and an event costs one
dictionary look-up.
"""

from collections.abc import Callable
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock, make_block_hash_with_group_id

_CURRENT = 1 << 62
_GROUP = 0


class ResidentPrefix:
    """The blocks that a request would reuse now.

    Attributes:
        hashes: The request's block hashes (its own list).
        limit: Most blocks that a hit may have: the last token is always computed.
        blocks: The hit, valid after :meth:`ResidencyIndex.refresh`.
    """

    __slots__ = ("blocks", "hashes", "limit", "stale_from", "watched")

    def __init__(self, hashes: list[BlockHash], limit: int) -> None:
        self.hashes = hashes
        self.limit = limit
        self.blocks: list[KVCacheBlock] = []
        self.stale_from = 0
        self.watched = 0

    def evictable(self) -> int:
        """Return how many blocks of the hit nobody uses: taking the hit takes them out of the free pool."""
        return [block.ref_cnt for block in self.blocks].count(0)


class ResidencyIndex:
    """Watches a block pool for the hashes that prefixes depend on."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._watchers: dict[BlockHashWithGroupId, dict[ResidentPrefix, int]] = {}
        self._prefixes: set[ResidentPrefix] = set()
        self._eviction_listener: Callable[[BlockHashWithGroupId], None] | None = None
        self._insert = pool._insert_block_hash
        self._remove = pool._remove_cached_block_hashes
        self._reset = pool.reset_prefix_cache

    def install(self) -> None:
        """Shadow the pool's three methods through which every change of its hash map goes."""
        self._pool._insert_block_hash = self._insert_and_notify
        self._pool._remove_cached_block_hashes = self._remove_and_notify
        self._pool.reset_prefix_cache = self._reset_and_notify

    def on_eviction(self, listener: Callable[[BlockHashWithGroupId], None]) -> None:
        """Also tell ``listener`` of each hash that leaves the pool."""
        self._eviction_listener = listener

    def watch(self, hashes: list[BlockHash], limit: int) -> ResidentPrefix:
        """Return a watched prefix of ``hashes``; :meth:`forget` it when the request leaves."""
        prefix = ResidentPrefix(hashes, limit)
        self._prefixes.add(prefix)
        return prefix

    def forget(self, prefix: ResidentPrefix) -> None:
        """Stop watching ``prefix``."""
        self._prefixes.discard(prefix)
        for position in range(prefix.watched):
            key = make_block_hash_with_group_id(prefix.hashes[position], _GROUP)
            watchers = self._watchers.get(key)
            if watchers is not None:
                watchers.pop(prefix, None)
                if not watchers:
                    del self._watchers[key]

    def refresh(self, prefix: ResidentPrefix) -> list[KVCacheBlock]:
        """Return the prefix's hit, walking only from where events made it doubtful."""
        blocks = prefix.blocks
        if prefix.stale_from == _CURRENT:
            return blocks
        del blocks[prefix.stale_from :]
        known = self._pool.cached_block_hash_to_block
        while len(blocks) < prefix.limit:
            position = len(blocks)
            key = make_block_hash_with_group_id(prefix.hashes[position], _GROUP)
            if position >= prefix.watched:
                self._watchers.setdefault(key, {})[prefix] = position
                prefix.watched = position + 1
            block = known.get_one_block(key)
            if block is None:
                break
            blocks.append(block)
        prefix.stale_from = _CURRENT
        return blocks

    def resident_blocks(self, hashes: list[BlockHash], limit: int) -> int:
        """Return how many of the first ``limit`` hashes are in the pool before the first that is not."""
        known = self._pool.cached_block_hash_to_block
        for position in range(min(limit, len(hashes))):
            if known.get_one_block(make_block_hash_with_group_id(hashes[position], _GROUP)) is None:
                return position
        return min(limit, len(hashes))

    def _doubt(self, key: BlockHashWithGroupId) -> None:
        watchers = self._watchers.get(key)
        if watchers is not None:
            for prefix, position in watchers.items():
                prefix.stale_from = min(prefix.stale_from, position)

    def _insert_and_notify(self, key: BlockHashWithGroupId, *args: Any, **kwargs: Any) -> None:
        self._insert(key, *args, **kwargs)
        self._doubt(key)

    def _remove_and_notify(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        removed: list[BlockHashWithGroupId] = self._remove(block)
        for key in removed:
            self._doubt(key)
            if self._eviction_listener is not None:
                self._eviction_listener(key)
        return removed

    def _reset_and_notify(self) -> bool:
        done: bool = self._reset()
        for prefix in self._prefixes:
            prefix.stale_from = 0
        return done
