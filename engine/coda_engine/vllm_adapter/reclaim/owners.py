"""Which session each cached block belongs to: a side table beside the pool, as large as the pool.

An entry holds as long as the block carries the hash that it was claimed with, so nothing has to be told of
evictions: what is read is checked against the block itself.
"""

from array import array
from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock

NOBODY = ""
"""Owner of a block that several sessions use, that no session is known of, or that was claimed with another hash."""


class BlockOwners:
    """Owners and depths by block number."""

    def __init__(self, blocks: int) -> None:
        self._sessions = [NOBODY] * blocks
        self._hashes: list[BlockHashWithGroupId | None] = [None] * blocks
        self._depths = array("l", bytes(array("l").itemsize * blocks))

    def claim(self, session: str, chain: Sequence[KVCacheBlock]) -> None:
        """Note that a request of ``session`` ends with these blocks.

        The walk goes from the chain's end to the first block that is the session's already or known to be shared:
        those before it were claimed with it. So a turn costs its new blocks, not its context. A block that another
        session owns becomes nobody's.

        Args:
            session: The session's key; :data:`NOBODY` when there is none.
            chain: The request's blocks from its first token on.
        """
        sessions, hashes = self._sessions, self._hashes
        for depth in range(len(chain) - 1, -1, -1):
            block = chain[depth]
            number, block_hash = block.block_id, block.block_hash
            if block_hash is None:
                continue
            if hashes[number] == block_hash:
                if sessions[number] in (session, NOBODY):
                    return
                sessions[number] = NOBODY
            else:
                sessions[number], hashes[number], self._depths[number] = session, block_hash, depth

    def owner(self, block: KVCacheBlock) -> str:
        """Return the key of the only session that uses the block's content, else :data:`NOBODY`."""
        number = block.block_id
        return self._sessions[number] if self._hashes[number] == block.block_hash else NOBODY

    def depth(self, block: KVCacheBlock) -> int:
        """Return the block's number in its session's chain."""
        return self._depths[block.block_id]
