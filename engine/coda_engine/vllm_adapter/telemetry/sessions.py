"""Which sessions have how much of their KV in HBM.

A row remembers the block hashes of its session's last request, no further than they are resident. Blocks of
a chain are freed tail first, so its resident prefix shrinks from its tail: the table watches each row's tail
hash and walks a row again only after that hash was evicted or a request of the session ended.
"""

import json
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from vllm.v1.core.kv_cache_utils import BlockHash, BlockHashWithGroupId
from vllm.v1.request import Request

from coda_engine.vllm_adapter.scheduler.residency import ResidencyIndex, pool_key
from coda_engine.vllm_adapter.telemetry.pages import SessionsDocument

MAX_SESSIONS = 4_096
_MAX_REMOVED = 4_096


class _Row:
    __slots__ = ("changed_at", "hashes", "hbm_tokens", "key", "last_use_s", "tail")

    def __init__(self, key: str) -> None:
        self.key = key
        self.hashes: list[BlockHash] = []
        self.hbm_tokens = 0
        self.last_use_s = 0.0
        self.changed_at = 0
        self.tail: BlockHashWithGroupId | None = None


class SessionTable:
    """At most ``max_sessions`` rows and ``max_hashes`` hashes; the least recently used give way."""

    def __init__(
        self,
        index: ResidencyIndex,
        instance_id: str,
        block_tokens: int,
        max_hashes: int,
        max_sessions: int = MAX_SESSIONS,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._index = index
        self._instance_id = instance_id
        self._block_tokens = block_tokens
        self._max_hashes = max_hashes
        self._max_sessions = max_sessions
        self._clock = clock
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
        return bool(self._doubtful)

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
            self._remove(next(iter(self._rows)))

    def gather(self) -> Callable[[int], bytes]:
        """Bring doubtful rows up to date and return the encoder of the table as it is now."""
        self._version += 1
        doubtful, self._doubtful = self._doubtful, set()
        for key in doubtful:
            row = self._rows.get(key)
            if row is not None:
                self._refresh(row)
        while len(self._removed) > _MAX_REMOVED:
            self._complete_since = self._removed.popleft()[1]
        document = SessionsDocument(
            instance_id=self._instance_id,
            version=self._version,
            complete_since=self._complete_since,
            rows=[(row.key, row.hbm_tokens, row.last_use_s, row.changed_at) for row in self._rows.values()],
            removed=list(self._removed),
        )
        return lambda _page_version: json.dumps(document, separators=(",", ":")).encode()

    def _refresh(self, row: _Row) -> None:
        resident = self._index.resident_blocks(row.hashes)
        if resident == 0:
            self._remove(row.key)
            return
        self._keep(row, row.hashes[:resident])
        row.hbm_tokens = resident * self._block_tokens
        row.changed_at = self._version
        row.tail = pool_key(row.hashes[-1])
        self._by_tail.setdefault(row.tail, set()).add(row.key)

    def _keep(self, row: _Row, hashes: list[BlockHash]) -> None:
        self._unwatch(row)
        self._hashes_kept += len(hashes) - len(row.hashes)
        row.hashes = hashes

    def _remove(self, key: str) -> None:
        row = self._rows.pop(key)
        self._keep(row, [])
        self._removed.append((key, self._version))

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
            {"key": key, "hbm_tokens": hbm_tokens, "shadow_tokens": hbm_tokens, "last_use_s": last_use_s}
            for key, hbm_tokens, last_use_s, changed_at in document["rows"]
            if changed_at > since or since == 0
        ],
        "removed": sorted({key for key, at in document["removed"] if at > since} - {row[0] for row in document["rows"]})
        if since
        else [],
    }
