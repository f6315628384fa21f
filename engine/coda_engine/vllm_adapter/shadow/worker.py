"""The workers' side of the shadow: copies between KV blocks and pages, and what became of them.

vLLM asserts that every transfer succeeds, so one that fails is reported as done, and its failure on two
ways beside that: the blocks to vLLM, which computes them again, and the pages to the scheduler's side,
which must not offer them once more.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.v1.kv_offload.base import GPULoadStoreSpec, LoadStoreSpec, OffloadingWorker, TransferResult

from coda_engine.shadow import PageRef, ShadowPages
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.shadow.blocks import HostCopies, KvBlocks
from coda_engine.vllm_adapter.shadow.messages import ShadowPageList, TransferFailures


@dataclass(slots=True)
class Outcome:
    """A transfer that has ended.

    Attributes:
        job_id: vLLM's number of it.
        copied_bytes: Bytes that were copied.
        seconds: Time from submission to end.
        failures: What did not come about.
        failed_blocks: Blocks of the KV cache that were to be filled and were not.
    """

    job_id: int
    copied_bytes: int = 0
    seconds: float = 0.0
    failures: TransferFailures = field(default_factory=TransferFailures)
    failed_blocks: set[int] = field(default_factory=set)

    def load_failed(self, blocks: Iterable[int], bad_page: PageRef | None) -> None:
        """Note that a load filled none of ``blocks``; ``bad_page`` is the page that stopped it."""
        self.failures.load_jobs.add(self.job_id)
        self.failed_blocks.update(blocks)
        if bad_page is not None:
            self.failures.bad_pages.append(bad_page)


class ShadowWorker(OffloadingWorker):
    """What the kinds of workers share: reporting."""

    def __init__(self) -> None:
        self._failures = TransferFailures()
        self._failed_blocks: set[int] = set()

    def get_finished(self) -> list[TransferResult]:
        """Return the transfers that have ended since the last call, each as a success."""
        results = []
        for outcome in self._ended():
            self._failures.add(outcome.failures)
            self._failed_blocks |= outcome.failed_blocks
            results.append(TransferResult(outcome.job_id, True, outcome.copied_bytes, outcome.seconds))
        return results

    def take_failures(self) -> TransferFailures:
        """Return, once, the failures of the transfers that :meth:`get_finished` has returned."""
        failures, self._failures = self._failures, TransferFailures()
        return failures

    def take_failed_blocks(self) -> set[int]:
        """Return, once, the blocks that those transfers left unfilled."""
        blocks, self._failed_blocks = self._failed_blocks, set()
        return blocks

    def _ended(self) -> list[Outcome]:
        raise NotImplementedError


class NoPagesWorker(ShadowWorker):
    """Stands in where a rank has no pages: nothing is stored, nothing restored, and vLLM goes on."""

    def __init__(self) -> None:
        super().__init__()
        self._outcomes: list[Outcome] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Give every page up."""
        outcome = Outcome(job_id)
        outcome.failures.unwritten_pages += given_pages(dst_spec)
        self._outcomes.append(outcome)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Fail every block."""
        outcome = Outcome(job_id)
        outcome.load_failed(dst_spec.block_ids.tolist(), None)
        self._outcomes.append(outcome)
        return True

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: nothing is under way."""

    def _ended(self) -> list[Outcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes


class HostShadowWorker(ShadowWorker):
    """Copies on the CPU platform: both ends are host memory, so a transfer is over when it has been submitted."""

    def __init__(self, pages: ShadowPages, blocks: KvBlocks) -> None:
        super().__init__()
        self._pages = pages
        self._copies = HostCopies(blocks)
        self._page_bytes = blocks.page_bytes
        self._outcomes: list[Outcome] = []

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        """Copy blocks into their pages and seal these."""
        started_s, outcome, refs = time.perf_counter(), Outcome(job_id), given_pages(dst_spec)
        for block, ref in zip(src_spec.block_ids.tolist(), refs, strict=False):
            if self._published(block, ref):
                outcome.copied_bytes += self._page_bytes
            else:
                outcome.failures.unwritten_pages.append(ref)
        outcome.failures.unwritten_pages += refs[len(src_spec.block_ids) :]
        self._end(outcome, started_s)
        return True

    def submit_load(self, job_id: int, src_spec: LoadStoreSpec, dst_spec: GPULoadStoreSpec) -> bool:
        """Copy pages into their blocks up to the first page that cannot be used."""
        started_s, outcome = time.perf_counter(), Outcome(job_id)
        blocks, refs = dst_spec.block_ids.tolist(), page_list(src_spec)
        for position, block in enumerate(blocks):
            ref = refs[position] if position < len(refs) else None
            if ref is None or not self._restored(ref, block):
                # What follows an unusable page is of no use either: its tokens would be computed again.
                outcome.load_failed(blocks[position:], ref)
                break
            outcome.copied_bytes += self._page_bytes
        self._end(outcome, started_s)
        return True

    def wait(self, job_ids: set[int]) -> None:
        """Return at once: what was submitted is over."""

    def shutdown(self) -> None:
        """Let the pages go."""
        self._pages.close()

    def _published(self, block: int, ref: PageRef) -> bool:
        try:
            if not self._pages.begin_write(ref):
                return False
            self._copies.to_page(block, self._pages.page(ref.slot))
            self._pages.seal(ref)
        except Exception:
            logger.exception("coda KVShadow: a block could not be published")
            return False
        return True

    def _restored(self, ref: PageRef, block: int) -> bool:
        try:
            if not self._pages.intact(ref):
                return False
            self._copies.from_page(self._pages.page(ref.slot), block)
            return self._pages.holds(ref)
        except Exception:
            logger.exception("coda KVShadow: a page could not be restored")
            return False

    def _end(self, outcome: Outcome, started_s: float) -> None:
        outcome.seconds = time.perf_counter() - started_s
        self._outcomes.append(outcome)

    def _ended(self) -> list[Outcome]:
        outcomes, self._outcomes = self._outcomes, []
        return outcomes


def page_list(spec: LoadStoreSpec) -> tuple[PageRef | None, ...]:
    """Return the pages of a transfer's shadow end."""
    return spec.refs if isinstance(spec, ShadowPageList) else ()


def given_pages(spec: LoadStoreSpec) -> list[PageRef]:
    """Return the pages that a store was given."""
    return [ref for ref in page_list(spec) if ref is not None]
