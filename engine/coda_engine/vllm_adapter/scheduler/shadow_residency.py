"""How much of each waiting prompt the CPU shadow could bring back, kept current by the index's own events.

What a request would restore is the run of consecutive ready keys that begins where its hit in HBM ends.
Only two events can change a run: one of its keys vanishes, or the key right after it becomes ready. Each run
is registered at those keys, so nothing is looked up again while nothing happens to them; looking pins,
touches and counts nothing.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from vllm.v1.core.kv_cache_utils import BlockHash
from vllm.v1.kv_offload.base import make_offload_key

from coda_engine.vllm_adapter.scheduler.residency import CURRENT

_GROUP_SUFFIX = make_offload_key(b"", 0)


def shadow_key(block_hash: bytes) -> bytes:
    """Return the shadow's key of a block hash (group 0, the only one in supported configurations)."""
    return block_hash + _GROUP_SUFFIX


class ReadyKeys(Protocol):
    """The part of a shadow's index that admission reads."""

    def ready(self, key: bytes) -> bool:
        """Return whether the key's page can be restored now."""
        ...

    def on_change(self, listener: Callable[[bytes, bool], None]) -> None:
        """Call ``listener(key, present)`` whenever a ready key appears or vanishes."""
        ...


class RestorableRun:
    """The blocks that a request would restore now.

    Attributes:
        keys: The request's offload keys, by block.
        most_blocks: Most blocks that the request lets itself restore at once.
        start: First block of the run: the end of the hit in HBM.
        end: One past its last block; valid after :meth:`ShadowResidency.refresh`.
    """

    __slots__ = ("end", "keys", "known_from", "missing", "most_blocks", "stale_from", "start")

    def __init__(self, hashes: Sequence[BlockHash], limit: int, most_blocks: int | None = None) -> None:
        self.most_blocks = limit if most_blocks is None else most_blocks
        self.keys: list[bytes] = [block_hash + _GROUP_SUFFIX for block_hash in hashes[:limit]]
        self.start = 0
        self.end = 0
        self.known_from = 0
        self.stale_from = 0
        self.missing: bytes | None = None

    @property
    def blocks(self) -> int:
        """How many blocks would be restored."""
        return min(self.end - self.start, self.most_blocks)

    def current(self, start: int) -> bool:
        """Return whether the run from ``start`` on is known and no event has touched it."""
        return self.stale_from == CURRENT and start == self.start

    def restored_keys(self) -> list[bytes]:
        """Return the keys of the blocks that would be restored."""
        return self.keys[self.start : self.start + self.blocks]


class ShadowResidency:
    """Follows a shadow's index for the prompts of waiting requests.

    Attributes:
        doubts: Grows whenever an event made a run doubtful.
    """

    def __init__(self, index: ReadyKeys) -> None:
        self.doubts = 0
        self._ready = index.ready
        self._holders: dict[bytes, dict[RestorableRun, int]] = {}
        self._expecting: dict[bytes, set[RestorableRun]] = {}
        index.on_change(self._changed)

    def refresh(self, run: RestorableRun, start: int) -> None:
        """Bring ``run`` up to date for a hit in HBM of ``start`` blocks, walking only what is not known."""
        if run.current(start):
            return
        known_from, end = run.known_from, max(run.known_from, min(run.end, run.stale_from))
        if start > end or (start < known_from and self._walk(run, start, known_from) < known_from):
            # What is known does not continue this hit.
            self._drop(run, known_from, run.end)
            known_from = end = start
        else:
            self._drop(run, end, run.end)
        run.known_from = min(start, known_from)
        end = self._walk(run, end, len(run.keys))
        run.start, run.end, run.stale_from = start, end, CURRENT
        self._expect(run, run.keys[end] if end < len(run.keys) else None)

    def forget(self, run: RestorableRun) -> None:
        """Stop following ``run``."""
        self._drop(run, run.known_from, run.end)
        run.known_from = run.start = run.end = run.stale_from = 0
        self._expect(run, None)

    def registrations(self) -> int:
        """Return how many keys any run is registered at."""
        return len(self._holders) + len(self._expecting)

    def _walk(self, run: RestorableRun, first: int, limit: int) -> int:
        """Register ``run`` at the ready keys from ``first`` on; return the first that is not ready, or ``limit``."""
        keys, ready, holders = run.keys, self._ready, self._holders
        for position in range(first, limit):
            key = keys[position]
            if not ready(key):
                return position
            registered = holders.get(key)
            if registered is None:
                holders[key] = {run: position}
            else:
                registered[run] = position
        return limit

    def _drop(self, run: RestorableRun, first: int, end: int) -> None:
        for key in run.keys[first:end]:
            registered = self._holders.get(key)
            if registered is not None:
                registered.pop(run, None)
                if not registered:
                    del self._holders[key]

    def _expect(self, run: RestorableRun, missing: bytes | None) -> None:
        if run.missing == missing:
            return
        if run.missing is not None:
            expecting = self._expecting[run.missing]
            expecting.discard(run)
            if not expecting:
                del self._expecting[run.missing]
        if missing is not None:
            self._expecting.setdefault(missing, set()).add(run)
        run.missing = missing

    def _changed(self, key: bytes, present: bool) -> None:
        if present:
            for run in self._expecting.get(key, ()):
                self._doubt(run, run.end)
            return
        for run, position in self._holders.get(key, {}).items():
            self._doubt(run, position)

    def _doubt(self, run: RestorableRun, position: int) -> None:
        self.doubts += 1
        run.stale_from = min(run.stale_from, position)
