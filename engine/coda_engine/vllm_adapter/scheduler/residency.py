"""How much of each waiting prompt is in HBM, kept current by the block pool's own events.

Probing 64 prompts anew at every step would cost milliseconds. A prompt's hit is the longest prefix of its
block hashes that the pool knows, so only two events can change it: a block of the hit loses its hash, or the
first missing hash is inserted. Each prefix is therefore registered at its hit's blocks and at that one hash,
and an event costs a dictionary look-up.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import islice, repeat
from operator import concat
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId, KVCacheBlock, make_block_hash_with_group_id

CURRENT = 1 << 62
"""``stale_from`` of what no event has touched since it was brought up to date."""

_GROUP_SUFFIX = make_block_hash_with_group_id(BlockHash(b""), 0)


def pool_key(block_hash: BlockHash) -> BlockHashWithGroupId:
    """Return the pool's key of a block hash (group 0, the only one in supported configurations)."""
    return BlockHashWithGroupId(block_hash + _GROUP_SUFFIX)


class ResidentPrefix:
    """The blocks that a request would reuse now.

    Attributes:
        hashes: The request's block hashes (its own list).
        limit: Most blocks that a hit may have: the last token is always computed.
        blocks: The hit, valid after :meth:`ResidencyIndex.refresh`.
        stale_from: First position of the hit that an event made doubtful.
        missing: The pool's key of the first missing hash; None when the hit is complete.
    """

    __slots__ = ("blocks", "hashes", "limit", "missing", "stale_from")

    def __init__(self, hashes: list[BlockHash], limit: int) -> None:
        self.hashes = hashes
        self.limit = limit
        self.blocks: list[KVCacheBlock] = []
        self.stale_from = 0
        self.missing: BlockHashWithGroupId | None = None

    def evictable(self) -> int:
        """Return how many blocks of the hit nobody uses: taking the hit takes them out of the free pool."""
        return [block.ref_cnt for block in self.blocks].count(0)


class ResidencyIndex:
    """Follows a block pool for the prefixes of waiting requests.

    Attributes:
        references: Grows whenever blocks may have become used or unused.
        doubts: Grows whenever an event made a prefix doubtful.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.references = 0
        self.doubts = 0
        self._pool = pool
        self._holders: dict[int, dict[ResidentPrefix, int]] = {}
        self._expecting: dict[BlockHashWithGroupId, set[ResidentPrefix]] = {}
        self._eviction_listener: Callable[[BlockHashWithGroupId], None] | None = None
        self._insert = pool._insert_block_hash
        self._remove = pool._remove_cached_block_hashes
        self._reset = pool.reset_prefix_cache
        self._touch = pool.touch
        self._free = pool.free_blocks

    def install(self) -> None:
        """Shadow the pool's methods through which every change of its hash map and reference counts goes."""
        self._pool._insert_block_hash = self._insert_and_notify
        self._pool._remove_cached_block_hashes = self._remove_and_notify
        self._pool.reset_prefix_cache = self._reset_and_notify
        self._pool.touch = self._touch_and_count
        self._pool.free_blocks = self._free_and_count

    def on_eviction(self, listener: Callable[[BlockHashWithGroupId], None]) -> None:
        """Also tell ``listener`` of each hash that leaves the pool."""
        self._eviction_listener = listener

    def forget(self, prefix: ResidentPrefix) -> None:
        """Stop following ``prefix``."""
        self._truncate(prefix, 0)
        self._expect(prefix, None)

    def refresh(self, prefix: ResidentPrefix) -> None:
        """Bring the prefix's hit up to date, walking only from where events made it doubtful."""
        if prefix.stale_from == CURRENT:
            return
        self._truncate(prefix, prefix.stale_from)
        prefix.stale_from = CURRENT
        blocks, holders = prefix.blocks, self._holders
        first = len(blocks)
        blocks += self._found(islice(prefix.hashes, first, prefix.limit))
        for position in range(first, len(blocks)):
            block_id = blocks[position].block_id
            registered = holders.get(block_id)
            if registered is None:
                holders[block_id] = {prefix: position}
            else:
                registered[prefix] = position
        self._expect(prefix, pool_key(prefix.hashes[len(blocks)]) if len(blocks) < prefix.limit else None)

    def agrees(self, prefix: ResidentPrefix) -> bool:
        """Return whether the pool has exactly this hit now, whatever the events said."""
        return self._found(islice(prefix.hashes, prefix.limit)) == prefix.blocks

    def resident_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Return how many hashes are in the pool before the first that is not."""
        return len(self._found(hashes))

    def registrations(self) -> int:
        """Return how many blocks and hashes any prefix is registered at."""
        return len(self._holders) + len(self._expecting)

    def _found(self, hashes: Iterable[BlockHash]) -> list[KVCacheBlock]:
        """Return the pool's blocks of ``hashes``, up to the first that it does not have."""
        # Past the map's own method, whose source is pinned: its calls would be half of a decision's time.
        found: list[KVCacheBlock] = []
        for block in map(self._pool.cached_block_hash_to_block._cache.get, map(concat, hashes, repeat(_GROUP_SUFFIX))):
            if block is None:
                break
            found.append(next(iter(block.values())) if isinstance(block, dict) else block)
        return found

    def _truncate(self, prefix: ResidentPrefix, length: int) -> None:
        for block in prefix.blocks[length:]:
            registered = self._holders.get(block.block_id)
            if registered is not None:
                registered.pop(prefix, None)
                if not registered:
                    del self._holders[block.block_id]
        del prefix.blocks[length:]

    def _expect(self, prefix: ResidentPrefix, missing: BlockHashWithGroupId | None) -> None:
        if prefix.missing == missing:
            return
        if prefix.missing is not None:
            expecting = self._expecting[prefix.missing]
            expecting.discard(prefix)
            if not expecting:
                del self._expecting[prefix.missing]
        if missing is not None:
            self._expecting.setdefault(missing, set()).add(prefix)
        prefix.missing = missing

    def _doubt(self, prefix: ResidentPrefix, position: int) -> None:
        self.doubts += 1
        prefix.stale_from = min(prefix.stale_from, position)

    def _insert_and_notify(self, key: BlockHashWithGroupId, *args: Any, **kwargs: Any) -> None:
        self._insert(key, *args, **kwargs)
        for prefix in self._expecting.get(key, ()):
            self._doubt(prefix, len(prefix.blocks))

    def _remove_and_notify(self, block: KVCacheBlock) -> list[BlockHashWithGroupId]:
        removed: list[BlockHashWithGroupId] = self._remove(block)
        registered = self._holders.get(block.block_id)
        if registered is not None:
            for prefix, position in registered.items():
                self._doubt(prefix, position)
        if self._eviction_listener is not None:
            for key in removed:
                self._eviction_listener(key)
        return removed

    def _reset_and_notify(self) -> bool:
        done: bool = self._reset()
        self.references += 1
        for registered in self._holders.values():
            for prefix in registered:
                self._doubt(prefix, 0)
        return done

    def _touch_and_count(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.references += 1
        self._touch(blocks)

    def _free_and_count(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        self.references += 1
        self._free(ordered_blocks)
