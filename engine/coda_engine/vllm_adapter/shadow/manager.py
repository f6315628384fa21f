"""The scheduler's side of the shadow: which pages exist, are read and are written.

vLLM's offloading connector asks; the index that engines share answers. No method raises: an error closes
the shadow, and a closed shadow knows nothing, so that vLLM goes on as if it had none.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import DirectionalTransferStats
from vllm.v1.kv_offload.base import (
    LoadStoreSpec,
    LookupResult,
    OffloadingManager,
    OffloadKey,
    PrepareStoreOutput,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from coda_engine.contract.reasons import Reason
from coda_engine.shadow import PageRef, ShadowError, ShadowIndex
from coda_engine.vllm_adapter.capabilities import Refusal
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.shadow.messages import ShadowPageList, TransferFailures

FAILED_LOADS_PER_REQUEST = 3
"""Failed loads after which a request computes its prompt; it ends retrying whatever the reason of the failures."""

_T = TypeVar("_T")


@dataclass(slots=True)
class ShadowCounters:
    """What came of transfers, in pages unless it says otherwise (all ranks' pages of one block count once).

    Attributes:
        restored: Restored into HBM by transfers that came through.
        published: Published by this engine.
        failed_loads: Transfers that ended at a page that could not be used.
        bad: Found corrupt or unreadable, and poisoned.
        vanished: Taken by another process between look-up and pinning.
        unwritten: Reserved, and given up because the copy failed.
        no_space: Not published, because nothing could be evicted.
        restored_bytes: Copied into HBM, all ranks together; ``restore_seconds``: the time of those copies.
        published_bytes: Copied out of HBM, all ranks together; ``publish_seconds``: the time of those copies.
    """

    restored: int = 0
    published: int = 0
    failed_loads: int = 0
    bad: int = 0
    vanished: int = 0
    unwritten: int = 0
    no_space: int = 0
    restored_bytes: int = 0
    restore_seconds: float = 0.0
    published_bytes: int = 0
    publish_seconds: float = 0.0


@dataclass(slots=True)
class FailedLoads:
    """How many loads of one request have failed; vLLM keeps it with the request."""

    count: int = 0


def gave_up(req_context: ReqContext) -> bool:
    """Return whether the request's loads have failed too often for another one."""
    failed = req_context.get_state(FailedLoads)
    return failed is not None and failed.count >= FAILED_LOADS_PER_REQUEST


class ShadowManager(OffloadingManager):
    """Answers vLLM's offloading connector out of the index.

    Args:
        index: The shared index; None when it could not be opened, with the reason in ``refusal``.
        page_bytes_all_ranks: Bytes of one block's pages on all ranks.
        layout_digest: Digest of the layout as EngineCore sees it.
        refusal: Why there is no index.
    """

    def __init__(
        self,
        index: ShadowIndex | None,
        page_bytes_all_ranks: int,
        layout_digest: str = "",
        refusal: Refusal | None = None,
    ) -> None:
        self.index = index
        self.page_bytes_all_ranks = page_bytes_all_ranks
        self.layout_digest = layout_digest
        self.refusal = refusal
        self.counters = ShadowCounters()
        self.when_closed: Callable[[Refusal], None] = lambda refusal: None
        self._loads: dict[str, tuple[PageRef, ...]] = {}
        self._stores: dict[bytes, PageRef] = {}
        self._unwritten: set[bytes] = set()
        self._stopped_loads: set[str] = set()

    @property
    def outstanding_restore_bytes(self) -> int:
        """Bytes of the restores that have been ordered and have not ended."""
        return sum(len(refs) for refs in self._loads.values()) * self.page_bytes_all_ranks

    def close(self, reason: Reason, detail: str) -> None:
        """Leave the shadow alone from now on; pages under way are given up."""
        if self.refusal is not None:
            return
        self.refusal = Refusal(reason, detail)
        self.shutdown()
        self.when_closed(self.refusal)

    # vLLM's questions -----------------------------------------------------------------------------------

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Look at what other engines did since the last step, before this request is looked up."""
        self._attempt(lambda index: index.sync(), None)
        return RequestOffloadingContext()

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Look at what other engines did."""
        self._attempt(lambda index: index.sync(), None)

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Return whether a chunk can be restored."""
        if gave_up(req_context):
            return LookupResult.MISS
        return LookupResult.HIT if self._attempt(lambda index: index.ready(key), False) else LookupResult.MISS

    def get_load_source(self, key: OffloadKey, req_context: ReqContext) -> CacheHitSource:
        """Return the tier that vLLM's metrics name."""
        return CacheHitSource.HOST

    def prepare_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> LoadStoreSpec:
        """Pin pages; from the first that has vanished on there is none."""
        nothing: tuple[PageRef, ...] = ()
        refs = self._attempt(lambda index: _pin_prefix(index, keys), nothing)
        self._loads[req_context.req_id] = refs
        self.counters.vanished += len(refs) < len(keys)
        return ShadowPageList((*refs, *(None for _ in range(len(keys) - len(refs)))))

    def complete_load(self, keys: Collection[OffloadKey], req_context: ReqContext) -> None:
        """Let the pages of a request's load go."""
        self.load_over(req_context.req_id)

    def prepare_store(self, keys: Collection[OffloadKey], req_context: ReqContext) -> PrepareStoreOutput | None:
        """Reserve pages for those chunks that nobody has published; the others count as used."""
        nothing: list[PageRef] = []
        refs = self._attempt(lambda index: self._reserve(index, list(keys), req_context), nothing)
        self._stores |= {ref.key: ref for ref in refs}
        return PrepareStoreOutput([OffloadKey(ref.key) for ref in refs], ShadowPageList(tuple(refs)), [])

    def complete_store(self, keys: Collection[OffloadKey], req_context: ReqContext, success: bool = True) -> None:
        """Publish pages that every rank has written."""
        prefix_order = [key for key in req_context._offload_key_positions if key in keys]
        refs = [ref for key in prefix_order if (ref := self._stores.pop(key, None)) is not None]
        given_up = [ref for ref in refs if ref.key in self._unwritten or not success]
        written = [ref for ref in refs if ref not in given_up]
        self._unwritten.difference_update(keys)
        if written:
            self._attempt(lambda index: index.publish(written), None)
            self.counters.published += len(written)
        if given_up:
            self._attempt(lambda index: index.abandon(given_up), None)
            self.counters.unwritten += len(given_up)

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Count a request's prefix as used; transfers of it may still be under way."""
        self._attempt(lambda index: index.touch(list(req_context._offload_key_positions)), None)

    def reset_cache(self) -> None:
        """Close the shadow: whoever resets it may have exchanged the weights; what was published before stays valid."""
        self.close(Reason.DISABLED_BY_SETTINGS, "the KV connector's cache was reset; restart the engine")

    def shutdown(self) -> None:
        """Give up what is under way and let the index go."""
        index, self.index = self.index, None
        self._loads.clear()
        self._stores.clear()
        self._unwritten.clear()
        if index is None:
            return
        try:
            index.close()
        except Exception:
            logger.exception("coda KVShadow: the index could not be closed")

    # What transfers report ------------------------------------------------------------------------------

    def load_over(self, request_id: str) -> None:
        """Unpin what a request's load has read; harmless when it was told before."""
        refs = self._loads.pop(request_id, ())
        if request_id not in self._stopped_loads:
            self.counters.restored += len(refs)
        self._stopped_loads.discard(request_id)
        if refs:
            self._attempt(lambda index: index.unpin(refs), None)

    def take_failures(self, failures: TransferFailures, failed_requests: Iterable[ReqContext]) -> None:
        """Withdraw pages that cannot be used, before the next look-up: vLLM would load them again for ever."""
        for context in failed_requests:
            failed = context.get_state(FailedLoads) or FailedLoads()
            failed.count += 1
            context.set_state(failed)
            self._stopped_loads.add(context.req_id)
            self.counters.failed_loads += 1
        if failures.bad_pages:
            self.counters.bad += len(failures.bad_pages)
            logger.warning("coda KVShadow: %d unusable pages are withdrawn and recomputed", len(failures.bad_pages))
            self._attempt(lambda index: index.poison(failures.bad_pages), None)
        # Given back when every rank is through with them: one may still be writing.
        self._unwritten.update(ref.key for ref in failures.unwritten_pages if ref.key in self._stores)

    def count_copies(self, restores: DirectionalTransferStats, stores: DirectionalTransferStats) -> None:
        """Count the copies of transfers that have ended."""
        self.counters.restored_bytes += restores.bytes
        self.counters.restore_seconds += restores.time
        self.counters.published_bytes += stores.bytes
        self.counters.publish_seconds += stores.time

    # Inside ---------------------------------------------------------------------------------------------

    def _reserve(self, index: ShadowIndex, keys: list[OffloadKey], req_context: ReqContext) -> list[PageRef]:
        present = [key for key in keys if index.ready(key)]
        if present:
            index.touch(present)
        if len(present) == len(keys):
            return []
        own_prefix = req_context._offload_key_positions.keys()
        refs = index.reserve(keys, protect=own_prefix)
        if refs is None:
            self.counters.no_space += len(keys) - len(present)
            return []
        return refs

    def _attempt(self, action: Callable[[ShadowIndex], _T], otherwise: _T) -> _T:
        """Return the action's answer; an error closes the shadow and the answer is ``otherwise``."""
        if self.index is None:
            return otherwise
        try:
            return action(self.index)
        except ShadowError as error:
            logger.warning("coda KVShadow is off: %s", error.detail)
            self.close(error.reason, error.detail)
        except Exception as error:
            logger.exception("coda KVShadow failed and is switched off")
            self.close(Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}")
        return otherwise


def _pin_prefix(index: ShadowIndex, keys: Collection[OffloadKey]) -> tuple[PageRef, ...]:
    """Return the pinned pages of as many first keys as there are."""
    refs = index.pin(list(keys))
    if refs is not None:
        return tuple(refs)
    index.sync()
    pinned: list[PageRef] = []
    for key in keys:
        ref = index.pin([key])
        if ref is None:
            break
        pinned += ref
    return tuple(pinned)
