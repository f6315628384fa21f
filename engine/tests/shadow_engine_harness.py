"""A real engine with a CPU shadow: what tests look at and how they take things away from it."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from engine_harness import RealEngine, Run, Script, environment
from vllm.distributed.kv_transfer import get_kv_transfer_group

from coda_engine.shadow import ShadowStatistics
from coda_engine.vllm_adapter.shadow.connector import CodaShadowConnector
from coda_engine.vllm_adapter.shadow.manager import ShadowManager
from coda_engine.vllm_adapter.shadow.worker import HostShadowWorker

BLOCK_TOKENS = 32
BLOCK_BYTES = 1_474_560
"""Bytes of one block of the built-in model as float32."""


@contextmanager
def shadow_folder() -> Iterator[Path]:
    """A folder in shared memory that does not exist yet, removed afterwards."""
    parent = Path(tempfile.mkdtemp(prefix="coda-test-", dir="/dev/shm"))
    try:
        yield parent / "shadow"
    finally:
        shutil.rmtree(parent)


def shadow_environment(folder: Path, blocks: int) -> Mapping[str, str]:
    """The environment of an engine with a shadow of that many blocks."""
    return {
        "VLLM_PLUGINS": "coda",
        "CODA_SHADOW_BYTES": str(blocks * BLOCK_BYTES),
        "CODA_SHADOW_DIR": str(folder),
        "CODA_SHADOW_EVICTION": "lru",
        "CODA_PAGE_DIR": str(folder.parent),
    }


class ShadowEngine(RealEngine):
    """A real engine whose scheduler, and with it the view of the shadow, can be renewed."""

    @classmethod
    @contextmanager
    def running(cls, model_folder: Path, folder: Path, blocks: int) -> Iterator["ShadowEngine"]:
        """One engine with a shadow of ``blocks`` blocks."""
        with environment(shadow_environment(folder, blocks)):
            engine = cls(model_folder)
            yield engine
            engine.core.shutdown()

    @property
    def connector(self) -> CodaShadowConnector:
        """The scheduler's side."""
        connector = self.core.scheduler.connector
        assert isinstance(connector, CodaShadowConnector)
        return connector

    @property
    def manager(self) -> ShadowManager:
        """The scheduler's side of the shadow."""
        return self.connector.manager

    @property
    def worker(self) -> HostShadowWorker:
        """The worker's side of the shadow."""
        worker = get_kv_transfer_group().connector_worker.worker
        assert isinstance(worker, HostShadowWorker)
        return worker

    @property
    def statistics(self) -> ShadowStatistics:
        """The index's figures."""
        return self.manager.index.statistics()

    def renew(self) -> None:
        """Give the engine a new scheduler: nothing in HBM, and the shadow as another engine would find it."""
        self.core.scheduler.shutdown()
        self.renew_scheduler()

    def forget_hbm(self) -> None:
        """Evict every block from HBM; the shadow stays."""
        assert self.core.scheduler.reset_prefix_cache()

    def answer(self, name: str, prompt: list[int], max_tokens: int = 8) -> list[int]:
        """Serve one request alone and let its stores drain; return its tokens."""
        run = self.run({0: [(name, prompt, max_tokens)]})
        self.drain()
        return run.outputs[name]

    def drain(self) -> None:
        """Step until no transfer is under way."""
        for _ in range(20):
            if not self.core.scheduler.has_requests():
                return
            self.llm.llm_engine.step()
        raise AssertionError("transfers do not end")

    def serve(self, script: Script, act: Callable[[int], None] | None = None) -> Run:
        """Run a script and let its stores drain."""
        run = self.run(script, act)
        self.drain()
        return run

    def leftovers(self) -> dict[str, int]:
        """What is still held although nothing runs; all must be 0."""
        scheduler, statistics = self.core.scheduler, self.statistics
        pool = scheduler.kv_cache_manager.block_pool
        return {
            "blocks": pool.num_gpu_blocks - 1 - pool.get_num_free_blocks(),
            "pinned": statistics.pinned_pages,
            "writing": statistics.writing_pages,
            "poisoned": statistics.poisoned_pages,
            "requests": len(self.connector.scheduler._req_status),
            "jobs": len(self.connector.scheduler._jobs),
            "outstanding": self.manager.outstanding_restore_bytes,
            "lost": statistics.used_pages + statistics.free_pages - statistics.capacity_pages,
        }


def flip_a_byte(engine: ShadowEngine, key: bytes, offset: int = 1_000) -> None:
    """Change one byte of a published page, as a broken memory cell or a stray write would."""
    refs = engine.manager.index.pin([key])
    engine.worker._pages.page(refs[0].slot)[offset] ^= 1
    engine.manager.index.unpin(refs)
