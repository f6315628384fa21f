"""vLLM's offloading connector with Coda's shadow behind it.

Two things differ from vLLM's own. A transfer may fail: its blocks are reported as not loaded, its pages are
withdrawn before the next look-up, and its request publishes what it computes again. And the shadow can be
looked at by state admission.
"""

from collections.abc import Collection, Iterable

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig
from vllm.v1.kv_offload.base import ReqContext
from vllm.v1.outputs import KVConnectorOutput

from coda_engine.contract.reasons import Reason
from coda_engine.shadow import ShadowIndex
from coda_engine.vllm_adapter.shadow.manager import ShadowManager, gave_up
from coda_engine.vllm_adapter.shadow.messages import ShadowHandshake, ShadowWorkerMetadata
from coda_engine.vllm_adapter.shadow.spec import ShadowSpec
from coda_engine.vllm_adapter.shadow.worker import ShadowWorker


class CodaShadow:
    """The shadow as the engine's scheduler sees it.

    Attributes:
        index: Which keys can be restored.
        page_bytes_all_ranks: Bytes that restoring one block moves, all ranks together.
    """

    def __init__(self, manager: ShadowManager, index: ShadowIndex, native: OffloadingConnectorScheduler) -> None:
        self.index = index
        self.page_bytes_all_ranks = manager.page_bytes_all_ranks
        self._manager = manager
        self._native = native

    @property
    def outstanding_restore_bytes(self) -> int:
        """Bytes of the restores that have been ordered and have not ended."""
        return self._manager.outstanding_restore_bytes

    @property
    def keys_being_restored(self) -> Collection[bytes]:
        """Keys that restores under way bring back; who needs one of them waits for that restore."""
        return self._native._chunks_being_loaded or ()

    def has_transfers(self, request_id: str) -> bool:
        """Return whether transfers of the request itself are under way; vLLM passes it over meanwhile."""
        status = self._native._req_status.get(request_id)
        return status is not None and bool(status.transfer_jobs)

    def may_restore(self, request_id: str) -> bool:
        """Return whether the request's look-ups find anything; not once its loads have failed too often."""
        status = self._native._req_status.get(request_id)
        return status is None or not gave_up(status.req_context)


class CodaShadowConnector(OffloadingConnector):
    """The connector that Coda's plug-in configures; vLLM makes one in EngineCore and one on each rank."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._shadow: CodaShadow | None = None
        if self.connector_scheduler is not None:
            self._adopt(self.connector_scheduler, kv_cache_config)

    # EngineCore -----------------------------------------------------------------------------------------

    @property
    def coda_shadow(self) -> CodaShadow | None:
        """The shadow; None when it is closed."""
        return self._shadow if self.manager.refusal is None else None

    @property
    def manager(self) -> ShadowManager:
        """The shadow's manager, open or closed."""
        manager = self.scheduler.manager
        assert isinstance(manager, ShadowManager)  # noqa: S101 - the connector's configuration names its spec
        return manager

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """Compare what each rank says of its pages with the scheduler's view; close the shadow if they differ."""
        expected = self.manager.layout_digest
        for rank, hello in sorted(metadata.items()):
            if not isinstance(hello, ShadowHandshake):
                continue
            if hello.problem:
                self.manager.close(Reason.UNSUPPORTED_CONFIGURATION, f"rank {rank}: {hello.problem}")
            elif hello.layout_digest != expected:
                detail = (
                    f"rank {rank} lays its pages out otherwise ({hello.layout_digest}) than EngineCore ({expected})"
                )
                self.manager.close(Reason.UNSUPPORTED_CONFIGURATION, detail)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """Withdraw what failed first, then let vLLM take in what is over."""
        manager, report = self.manager, connector_output.kv_connector_worker_meta
        if isinstance(report, ShadowWorkerMetadata):
            manager.take_failures(report.failures, self._rewound(report.failures.load_jobs))
            manager.count_copies(report.transfer_stats.load, report.transfer_stats.store)
        for request_id in connector_output.finished_recving or ():
            # Also told of jobs that vLLM has forgotten since (its cache was reset while they ran).
            manager.load_over(request_id)
        super().update_connector_output(connector_output)

    def _adopt(self, native: OffloadingConnectorScheduler, kv_cache_config: KVCacheConfig) -> None:
        manager = native.manager
        assert isinstance(manager, ShadowManager)  # noqa: S101 - the connector's configuration names its spec
        groups = kv_cache_config.kv_cache_groups
        if len(groups) != 1 or not isinstance(groups[0].kv_cache_spec, FullAttentionSpec):
            detail = "the model does not use full attention in every layer"
            manager.close(Reason.UNSUPPORTED_CONFIGURATION, detail)
        if manager.index is not None:
            self._shadow = CodaShadow(manager, manager.index, native)

    def _rewound(self, load_jobs: Iterable[int]) -> list[ReqContext]:
        """Return the requests of these loads; they publish from their first chunk on once more.

        vLLM counts a load's chunks as stored when it orders the load. What is published already is left out again.
        """
        native = self.scheduler
        requests: list[ReqContext] = []
        for job_id in load_jobs:
            job = native._jobs.get(job_id)
            status = native._req_status.get(job.req_id) if job is not None else None
            if status is None:
                continue
            requests.append(status.req_context)
            for group in status.group_states:
                group.next_stored_chunk_idx = 0
        return requests

    # Ranks ----------------------------------------------------------------------------------------------

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """Return what this rank says of its pages."""
        spec = self.connector_worker.spec if self.connector_worker is not None else None
        return spec.handshake if isinstance(spec, ShadowSpec) else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return the blocks that loads left unfilled; vLLM computes them again."""
        worker = self._shadow_worker()
        return worker.take_failed_blocks() if worker is not None else set()

    def build_connector_worker_meta(self) -> ShadowWorkerMetadata | None:
        """Return the completed transfers and what failed in them."""
        native, worker = super().build_connector_worker_meta(), self._shadow_worker()
        if native is None:
            return None
        report = ShadowWorkerMetadata(native.completed_jobs, native.transfer_stats)
        if worker is not None:
            report.failures = worker.take_failures()
        return report

    def _shadow_worker(self) -> ShadowWorker | None:
        worker = self.connector_worker.worker if self.connector_worker is not None else None
        return worker if isinstance(worker, ShadowWorker) else None
