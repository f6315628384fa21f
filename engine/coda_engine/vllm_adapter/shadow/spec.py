"""What vLLM's offloading connector makes on each side of the shadow."""

import time

from vllm.v1.kv_offload.base import CanonicalKVCaches, OffloadingSpec
from vllm.v1.kv_offload.config import OffloadingConfig

from coda_engine.contract.reasons import Reason
from coda_engine.shadow import ShadowError, ShadowIndex, ShadowLayout, ShadowPages
from coda_engine.vllm_adapter.capabilities import Refusal
from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.shadow.blocks import KvBlocks
from coda_engine.vllm_adapter.shadow.layout import ShadowPlan, shadow_layout
from coda_engine.vllm_adapter.shadow.manager import ShadowManager
from coda_engine.vllm_adapter.shadow.messages import ShadowHandshake
from coda_engine.vllm_adapter.shadow.worker import HostShadowWorker, NoPagesWorker, ShadowWorker


class ShadowSpec(OffloadingSpec):
    """Makes the manager in EngineCore and the worker on each rank; what cannot be made is made as closed."""

    def __init__(self, config: OffloadingConfig) -> None:
        super().__init__(config)
        self.plan = ShadowPlan.from_field(config.extra_config)
        self.rank = config.parallel.rank
        self.problem = _problem(config, self.plan)
        self.handshake: ShadowHandshake | None = None

    def get_manager(self) -> ShadowManager:
        """Return the manager; closed, with its reason, when there is no index."""
        page_bytes = self.config.worker_kv_bytes_per_block * self.config.parallel.tp_size
        if self.problem:
            refusal = Refusal(Reason.UNSUPPORTED_CONFIGURATION, self.problem)
            return ShadowManager(None, page_bytes, refusal=refusal)
        layout = self.layout()
        try:
            index = ShadowIndex.open(self.plan.path, layout, eviction=self.plan.eviction, clock=time.monotonic)
        except ShadowError as error:
            return ShadowManager(None, page_bytes, refusal=Refusal(error.reason, error.detail))
        except Exception as error:
            logger.exception("coda KVShadow: the index could not be opened")
            refusal = Refusal(Reason.INTERNAL_ERROR, f"{type(error).__name__}: {error}")
            return ShadowManager(None, page_bytes, refusal=refusal)
        return ShadowManager(index, page_bytes, layout.digest())

    def get_worker(self, kv_caches: CanonicalKVCaches) -> ShadowWorker:
        """Return the worker of this rank; one without pages when they could not be made."""
        try:
            worker, problem = self._worker(kv_caches)
        except ShadowError as error:
            worker, problem = NoPagesWorker(), error.detail
        except Exception as error:
            logger.exception("coda KVShadow: rank %d has no pages", self.rank)
            worker, problem = NoPagesWorker(), f"{type(error).__name__}: {error}"
        digest = self.layout().digest() if not self.problem else ""
        self.handshake = ShadowHandshake(digest, problem)
        return worker

    def layout(self) -> ShadowLayout:
        """Return the layout of the files as this side sees it."""
        return shadow_layout(self.plan, self.config)

    def _worker(self, kv_caches: CanonicalKVCaches) -> tuple[ShadowWorker, str]:
        if self.problem:
            return NoPagesWorker(), self.problem
        blocks, layout = KvBlocks.of(kv_caches), self.layout()
        if blocks.page_bytes != layout.page_bytes:
            return NoPagesWorker(), (
                f"a KV block has {blocks.page_bytes} bytes in this rank's layers, {layout.page_bytes} in the allocation"
            )
        pages = ShadowPages.open(self.plan.path, layout, self.rank)
        if blocks.parts[0].rows.device.type == "cpu":
            return HostShadowWorker(pages, blocks), ""
        from coda_engine.vllm_adapter.shadow.cuda_worker import CudaShadowWorker

        return CudaShadowWorker(pages, blocks), ""


def _problem(config: OffloadingConfig, plan: ShadowPlan) -> str:
    """Return what only shows once the KV cache is laid out and keeps the shadow from being used; "" = nothing."""
    page_bytes = config.worker_kv_bytes_per_block * config.parallel.tp_size
    if len(config.groups) != 1:
        return f"the KV cache has {len(config.groups)} groups of layers; one is supported"
    if page_bytes <= 0:
        return "the size of a KV block is not known"
    if plan.size_bytes < page_bytes:
        return f"{plan.size_bytes} bytes hold no KV block, which has {page_bytes}; make spec.kvShadow.size larger"
    return ""
