"""Which sessions have how much of their KV in HBM, and how much in HBM or the CPU shadow.

A row remembers the block hashes of its session's last request, no further than they are resident anywhere. Blocks
of a chain are freed tail first, so its prefix in HBM shrinks from its tail: the table watches the last resident
hash and walks a row again only after that hash was evicted or a request of the session ended. What the shadow
adds is followed as for waiting requests: a row is walked again when one of its pages vanished or the next appeared.
"""

import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId
from vllm.v1.request import Request

from coda_engine.vllm_adapter.scheduler.residency import ResidencyIndex, pool_key
from coda_engine.vllm_adapter.scheduler.shadow_residency import ReadyKeys, RestorableRun, ShadowResidency
from coda_engine.vllm_adapter.telemetry.pages import SessionsDocument

MAX_SESSIONS = 4_096
_MAX_REMOVED = 4_096


class _Row:
    """A session: ``hbm_blocks`` of its prefix are in HBM, ``resident_blocks`` in HBM or the shadow."""

    __slots__ = ("changed_at", "hashes", "hbm_blocks", "key", "last_use_s", "resident_blocks", "run", "tail")

    def __init__(self, key: str) -> None:
        self.key = key
        self.hashes: list[BlockHash] = []
        self.hbm_blocks = 0
        self.resident_blocks = 0
        self.run: RestorableRun | None = None
        self.last_use_s = 0.0
        self.changed_at = 0
        self.tail: BlockHashWithGroupId | None = None


class SessionTable:
    """At most ``max_sessions`` rows and ``max_hashes`` hashes; the least recently used give way.

    Args:
        index: Residency in HBM.
        instance_id: The engine's.
        block_tokens: Tokens in a KV block.
        max_hashes: Most block hashes of all rows together.
        max_sessions: Most rows.
        clock: Unix seconds.
        waits_for: Tells which tool a session waits for and how long already, seconds.
        shadow: Returns what the CPU shadow holds; None while there is none.
    """

    def __init__(
        self,
        index: ResidencyIndex,
        instance_id: str,
        block_tokens: int,
        max_hashes: int,
        max_sessions: int = MAX_SESSIONS,
        clock: Callable[[], float] = time.time,
        waits_for: Callable[[str], tuple[str, float] | None] | None = None,
        shadow: Callable[[], ReadyKeys | None] = lambda: None,
    ) -> None:
        self._index = index
        self._instance_id = instance_id
        self._block_tokens = block_tokens
        self._max_hashes = max_hashes
        self._max_sessions = max_sessions
        self._clock = clock
        self._waits_for = waits_for
        self._shadow = shadow
        self._followed: ReadyKeys | None = None
        self._runs: ShadowResidency | None = None
        self._run_doubts = 0
        self._waits_changed: set[str] = set()
        self._rows: OrderedDict[str, _Row] = OrderedDict()
        self._by_tail: dict[BlockHashWithGroupId, set[str]] = {}
        self._doubtful: set[str] = set()
        self._removed: deque[tuple[str, int]] = deque()
        self._hashes_kept = 0
        self._version = 0
        self._complete_since = 0
        index.on_eviction(self._evicted)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def doubtful(self) -> bool:
        """Whether rows changed, or may have, since the last :meth:`gather`."""
        return bool(self._doubtful or self._waits_changed) or self._shadow_moved()

    def used(self, key: str, request: Request) -> None:
        """Note that a request of the session ends now; its blocks are freed right after."""
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = _Row(key)
        self._rows.move_to_end(key)
        self._keep(row, list(request.block_hashes))
        row.last_use_s = self._clock()
        self._doubtful.add(key)
        while len(self._rows) > 1 and (len(self._rows) > self._max_sessions or self._hashes_kept > self._max_hashes):
            # Told by the next version: readers of this one have the row.
            self._remove(next(iter(self._rows)), self._version + 1)

    def changed(self, key: str) -> None:
        """Note that the session waits for something else than before."""
        if key in self._rows:
            self._waits_changed.add(key)

    def gather(self) -> Callable[[int], bytes]:
        """Bring doubtful rows up to date and return the encoder of the table as it is now."""
        self._version += 1
        self._follow_shadow()
        doubtful, self._doubtful = self._doubtful, set()
        for key in doubtful:
            row = self._rows.get(key)
            if row is not None:
                self._refresh(row)
        waits_changed, self._waits_changed = self._waits_changed, set()
        for key in waits_changed & self._rows.keys():
            self._rows[key].changed_at = self._version
        tokens = self._block_tokens
        document = SessionsDocument(
            instance_id=self._instance_id,
            version=self._version,
            complete_since=self._complete_since,
            rows=[
                (row.key, row.hbm_blocks * tokens, row.resident_blocks * tokens, row.last_use_s, row.changed_at)
                for row in self._rows.values()
            ],
            removed=list(self._removed),
            waiting=self._waiting(),
        )
        return lambda _page_version: json.dumps(document, separators=(",", ":")).encode()

    def _waiting(self) -> dict[str, tuple[str, float]]:
        """Return which rows' sessions wait for a tool: its label and since when, Unix seconds."""
        if self._waits_for is None:
            return {}
        now_s, waits = self._clock(), {key: self._waits_for(key) for key in self._rows}
        return {key: (wait[0], now_s - wait[1]) for key, wait in waits.items() if wait is not None}

    def _shadow_moved(self) -> bool:
        """Return whether the shadow came, went or changed in what rows have of it."""
        doubts = self._runs.doubts if self._runs is not None else 0
        return self._shadow() is not self._followed or doubts != self._run_doubts

    def _follow_shadow(self) -> None:
        if not self._shadow_moved():
            return
        shadow = self._shadow()
        if shadow is not self._followed:
            self._followed, self._runs = shadow, ShadowResidency(shadow) if shadow is not None else None
            for row in self._rows.values():
                row.run = None
            self._doubtful.update(self._rows)
        if self._runs is not None:
            self._run_doubts = self._runs.doubts
            rows = self._rows.values()
            self._doubtful.update(row.key for row in rows if row.run and not row.run.current(row.hbm_blocks))
        else:
            self._run_doubts = 0

    def _refresh(self, row: _Row) -> None:
        row.hbm_blocks = self._index.resident_blocks(row.hashes)
        row.resident_blocks = self._resident_anywhere(row)
        if row.resident_blocks == 0:
            self._remove(row.key, self._version)
            return
        if row.resident_blocks < len(row.hashes):
            self._keep(row, row.hashes[: row.resident_blocks])
            self._resident_anywhere(row)
        self._unwatch(row)
        row.changed_at = self._version
        if row.hbm_blocks:
            row.tail = pool_key(row.hashes[row.hbm_blocks - 1])
            self._by_tail.setdefault(row.tail, set()).add(row.key)

    def _resident_anywhere(self, row: _Row) -> int:
        """Return the blocks of the row's longest prefix in HBM or the shadow; the row's run is current then."""
        if self._runs is None:
            return row.hbm_blocks
        if row.run is None:
            row.run = RestorableRun(row.hashes, len(row.hashes))
        self._runs.refresh(row.run, row.hbm_blocks)
        return row.run.end

    def _keep(self, row: _Row, hashes: list[BlockHash]) -> None:
        self._unwatch(row)
        if row.run is not None and self._runs is not None:
            self._runs.forget(row.run)
        row.run = None
        self._hashes_kept += len(hashes) - len(row.hashes)
        row.hashes = hashes

    def _remove(self, key: str, at: int) -> None:
        """Remove a row, as of version ``at``; readers of versions so old that the list has no room get the table."""
        row = self._rows.pop(key)
        self._keep(row, [])
        self._doubtful.discard(key)
        self._waits_changed.discard(key)
        self._removed.append((key, at))
        while len(self._removed) > _MAX_REMOVED:
            self._complete_since = self._removed.popleft()[1]

    def _unwatch(self, row: _Row) -> None:
        if row.tail is not None:
            keys = self._by_tail.get(row.tail)
            if keys is not None:
                keys.discard(row.key)
                if not keys:
                    del self._by_tail[row.tail]
            row.tail = None

    def _evicted(self, key: BlockHashWithGroupId) -> None:
        keys = self._by_tail.get(key)
        if keys is not None:
            self._doubtful.update(keys)


def delta(document: SessionsDocument, instance_id: str, since: int) -> dict[str, object]:
    """Return the SessionDelta from ``since`` of ``instance_id`` to the document's version.

    The full table (``since`` 0) when the reader knows another instance, a version that this table never
    had, or one so old that removals since then are no longer listed.
    """
    known = instance_id == document["instance_id"] and document["complete_since"] <= since <= document["version"]
    since = since if known else 0
    return {
        "instance_id": document["instance_id"],
        "since": since,
        "version": document["version"],
        "sessions": [
            {"key": key, "hbm_tokens": hbm_tokens, "shadow_tokens": shadow_tokens, "last_use_s": last_use_s}
            | _wait(document["waiting"].get(key))
            for key, hbm_tokens, shadow_tokens, last_use_s, changed_at in document["rows"]
            if changed_at > since or since == 0
        ],
        "removed": sorted({key for key, at in document["removed"] if at > since} - {row[0] for row in document["rows"]})
        if since
        else [],
    }


def _wait(wait: tuple[str, float] | None) -> dict[str, object]:
    return {} if wait is None else {"tool": wait[0], "tool_waiting_since_s": wait[1]}
