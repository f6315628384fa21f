"""The worker on CUDA: own streams, pinned pages, checksums in threads. Not yet run on a GPU.

Stores and loads each have a stream, so neither waits for the other nor for the forward pass. Memory that
processes share cannot come from torch's pinned allocator; it is registered with the driver afterwards.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from vllm import _custom_ops as ops
from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec
from vllm.v1.kv_offload.cpu.host_register import host_register, host_unregister

from coda_engine.shadow import PageRef, ShadowPages
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.shadow.blocks import KvBlocks
from coda_engine.vllm_adapter.shadow.worker import Outcome, ShadowWorker, given_pages, page_list


@dataclass(frozen=True, slots=True)
class Batch:
    """Copies under way on a stream; the driver reads the pointers until ``done``."""

    pointers: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    done: torch.cuda.Event


@dataclass(slots=True)
class StoreJob:
    """A store: copies on the stream first, then sealing in a thread."""

    outcome: Outcome
    started_s: float
    refs: list[PageRef]
    batch: Batch | None
    sealing: Future[list[PageRef]] | None = None


@dataclass(slots=True)
class LoadJob:
    """A load: checking in a thread first, which then starts the copies on the stream."""

    outcome: Outcome
    started_s: float
    blocks: list[int]
    refs: Sequence[PageRef | None]
    checking: Future[Batch | None]


class CudaShadowWorker(ShadowWorker):
    """Copies between HBM and pinned host memory, overlapped with the model's execution."""

    def __init__(self, pages: ShadowPages, blocks: KvBlocks) -> None:
        super().__init__()
        self._pages = pages
        self._blocks = blocks
        self._device = blocks.parts[0].rows.device
        self._store_stream = torch.cuda.Stream(self._device)
        self._load_stream = torch.cuda.Stream(self._device)
        # One thread each: a restore, which somebody waits for, must not queue behind checksums of stores.
        self._sealer = ThreadPoolExecutor(1, "coda-shadow-seal")
        self._checker = ThreadPoolExecutor(1, "coda-shadow-load", torch.cuda.set_device, (self._device,))
        self._stores: dict[int, StoreJob] = {}
        self._loads: dict[int, LoadJob] = {}
        address = pages.payload.ctypes.data
        self._registered = address if host_register(address, pages.payload.nbytes) else 0

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Start copying blocks into their pages, after what the model has been told to compute so far."""
        outcome, refs = Outcome(job_id), given_pages(dst_spec)
        job = self._stores[job_id] = StoreJob(outcome, time.perf_counter(), [], None)
        try:
            pairs = []
            for block, ref in zip(src_spec.block_ids.tolist(), refs, strict=True):
                if self._pages.begin_write(ref):
                    pairs.append((block, ref))
                else:
                    outcome.failures.unwritten_pages.append(ref)
            job.refs = [ref for _, ref in pairs]
            job.batch = self._copy(self._store_stream, pairs, self._computed(), to_pages=True)
        except Exception:
            logger.exception("coda KVShadow: blocks could not be published")
            outcome.failures.unwritten_pages = refs
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Start checking pages; those up to the first unusable one are copied into their blocks."""
        outcome, blocks, refs = Outcome(job_id), dst_spec.block_ids.tolist(), page_list(src_spec)
        checking = self._checker.submit(self._check_and_copy, outcome, blocks, refs, self._computed())
        self._loads[job_id] = LoadJob(outcome, time.perf_counter(), blocks, refs, checking)
        return True

    def wait(self, job_ids: set[int]) -> None:
        """Block until the copies of these jobs are over (a store may still have to be sealed)."""
        for job_id in job_ids:
            store, load = self._stores.get(job_id), self._loads.get(job_id)
            batch = store.batch if store is not None else None
            if load is not None:
                batch = load.checking.result()
            if batch is not None:
                batch.done.synchronize()

    def shutdown(self) -> None:
        """Wait for what is under way and let the pages go."""
        for thread in (self._checker, self._sealer):
            thread.shutdown(wait=True)
        torch.cuda.synchronize(self._device)
        if self._registered:
            host_unregister(self._registered)
        self._pages.close()

    def _ended(self) -> list[Outcome]:
        outcomes = []
        for job_id, store in list(self._stores.items()):
            if self._stored(store):
                outcomes.append(_closed(store))
                del self._stores[job_id]
        for job_id, load in list(self._loads.items()):
            if load.checking.done() and ((batch := load.checking.result()) is None or batch.done.query()):
                self._give_up_lost(load)
                outcomes.append(_closed(load))
                del self._loads[job_id]
        return outcomes

    def _give_up_lost(self, job: LoadJob) -> None:
        """Fail the copied blocks from the first page on that has become another's meanwhile."""
        copied = job.outcome.copied_bytes // self._blocks.page_bytes
        for position, ref in enumerate(job.refs[:copied]):
            if ref is None or not self._pages.holds(ref):
                job.outcome.load_failed(job.blocks[position:], ref)
                return

    def _stored(self, job: StoreJob) -> bool:
        """Return whether a store is over; starts the sealing once the copies are."""
        if job.batch is None:
            return True
        if job.sealing is None:
            if job.batch.done.query():
                job.sealing = self._sealer.submit(self._seal, job.refs)
            return False
        if not job.sealing.done():
            return False
        unwritten = job.sealing.result()
        job.outcome.failures.unwritten_pages += unwritten
        job.outcome.copied_bytes = (len(job.refs) - len(unwritten)) * self._blocks.page_bytes
        return True

    def _seal(self, refs: list[PageRef]) -> list[PageRef]:
        """Seal pages; return those that could not be."""
        unwritten = []
        for ref in refs:
            try:
                self._pages.seal(ref)
            except Exception:
                logger.exception("coda KVShadow: a page could not be sealed")
                unwritten.append(ref)
        return unwritten

    def _check_and_copy(
        self, outcome: Outcome, blocks: list[int], refs: Sequence[PageRef | None], computed: torch.cuda.Event
    ) -> Batch | None:
        try:
            usable = self._usable(refs[: len(blocks)])
            batch = self._copy(self._load_stream, list(zip(blocks, usable, strict=False)), computed, to_pages=False)
        except Exception:
            logger.exception("coda KVShadow: pages could not be restored")
            outcome.load_failed(blocks, refs[0] if refs else None)
            return None
        if len(usable) < len(blocks):
            outcome.load_failed(blocks[len(usable) :], refs[len(usable)] if len(usable) < len(refs) else None)
        outcome.copied_bytes = len(usable) * self._blocks.page_bytes
        return batch

    def _usable(self, refs: Sequence[PageRef | None]) -> list[PageRef]:
        """Return the pages before the first that vanished or is not what was sealed."""
        usable: list[PageRef] = []
        for ref in refs:
            if ref is None or not self._pages.intact(ref):
                break
            usable.append(ref)
        return usable

    def _computed(self) -> torch.cuda.Event:
        """Return an event after what the model has been told to compute so far."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _copy(
        self,
        stream: torch.cuda.Stream,
        pairs: Sequence[tuple[int, PageRef]],
        computed: torch.cuda.Event,
        *,
        to_pages: bool,
    ) -> Batch | None:
        """Start copies between blocks and pages; None when there are none."""
        if not pairs:
            return None
        in_hbm, in_host, sizes = [], [], []
        for block, ref in pairs:
            page = self._pages.page(ref.slot).ctypes.data
            for part in self._blocks.parts:
                in_hbm.append(part.rows.data_ptr() + block * part.rows.stride(0))
                in_host.append(page + part.start)
                sizes.append(part.size)
        source, target = (in_hbm, in_host) if to_pages else (in_host, in_hbm)
        pointers = (_pinned(source), _pinned(target), _pinned(sizes))
        done = torch.cuda.Event()
        stream.wait_event(computed)
        with torch.cuda.stream(stream):
            ops.swap_blocks_batch(*pointers, is_src_access_order_any=not to_pages)
            done.record(stream)
        return Batch(pointers, done)


def _pinned(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64, pin_memory=True)


def _closed(job: StoreJob | LoadJob) -> Outcome:
    job.outcome.seconds = time.perf_counter() - job.started_s
    return job.outcome
