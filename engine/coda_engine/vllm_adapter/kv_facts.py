"""What this engine's KV cache and its shadow are made of, as far as costs depend on it."""

from dataclasses import dataclass
from pathlib import Path

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig

from coda_engine.vllm_adapter.log import logger

_NUMA_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True, slots=True)
class KvFacts:
    """The part of the full key that is only known once vLLM has made its scheduler.

    Attributes:
        block_tokens: Tokens in a KV block.
        block_bytes: Bytes of a block over all ranks.
        shadow_layout: How the CPU shadow holds a block; "" = no shadow.
        transfer_topology: What lies between the shadow and HBM; "" = no shadow.
    """

    block_tokens: int
    block_bytes: int = 0
    shadow_layout: str = ""
    transfer_topology: str = ""


def kv_facts(scheduler: Scheduler) -> KvFacts:
    """Return the facts about a scheduler's cache; the shadow's size and folder do not change costs and are none."""
    config = scheduler.vllm_config
    ranks = config.parallel_config.tensor_parallel_size
    shadow = getattr(scheduler.connector, "coda_shadow", None)
    if shadow is None:
        return KvFacts(scheduler.block_size, _block_bytes(scheduler.kv_cache_config, ranks))
    page_bytes = shadow.page_bytes_all_ranks
    layout = f"pages of {page_bytes} bytes, {scheduler.block_size} tokens, {ranks} ranks"
    return KvFacts(scheduler.block_size, page_bytes, layout, transfer_topology(config))


def transfer_topology(config: VllmConfig) -> str:
    """Return what the transfers of a shadow pass through: kind of copy, ranks, NUMA nodes, and the GPU's link."""
    ranks = config.parallel_config.tensor_parallel_size
    numa_nodes = len(list(_NUMA_NODES.glob("node[0-9]*"))) or 1
    if str(config.device_config.device_type) == "cpu":
        return f"host copy, {ranks} ranks, {numa_nodes} NUMA nodes"
    return f"pinned host memory, {ranks} ranks, {numa_nodes} NUMA nodes, {_gpu_link()}"


def gpu_driver() -> str:
    """Return the GPU driver's version; "" where it cannot be asked (tried on no GPU yet)."""
    try:
        from vllm.third_party import pynvml

        pynvml.nvmlInit()
        try:
            return f"NVIDIA {pynvml.nvmlSystemGetDriverVersion()}"
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:
        logger.warning("coda: the GPU driver's version cannot be read: %s", error)
        return ""


def _gpu_link() -> str:
    """Return what the first GPU's PCIe link can do at most; "PCIe" where it cannot be asked (tried on no GPU yet)."""
    try:
        from vllm.third_party import pynvml

        pynvml.nvmlInit()
        try:
            handle = pynvml.nvmlDeviceGetHandleByIndex(current_platform.device_id_to_physical_device_id(0))
            generation = pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)
            return f"PCIe {generation} x{pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)}"
        finally:
            pynvml.nvmlShutdown()
    except Exception as error:
        logger.warning("coda: the GPU's link cannot be read: %s", error)
        return "PCIe"


def _block_bytes(cache: KVCacheConfig, ranks: int) -> int:
    """Return the bytes of one block on all ranks; every tensor's size is that of the one allocation behind all."""
    tensors = cache.kv_cache_tensors
    return tensors[0].size // cache.num_blocks * ranks if tensors else 0
