"""Which engine configurations state admission can predict the allocator in."""

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.sched.request_queue import FCFSRequestQueue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

from coda_engine.vllm_adapter.shadow.connector import CodaShadowConnector


def unsupported_configuration(scheduler: Scheduler) -> str:
    """Return what keeps state admission from running on this engine, and the remedy; "" = nothing."""
    manager = scheduler.kv_cache_manager
    coordinator = manager.coordinator
    parallel = scheduler.parallel_config
    unitary = type(coordinator) is UnitaryKVCacheCoordinator
    problems = {
        "the scheduling policy is not fcfs; remove --scheduling-policy": type(scheduler.waiting)
        is not FCFSRequestQueue,
        "prefix caching is off; remove --no-enable-prefix-caching": not manager.enable_caching,
        "the model does not use full attention in every layer": not unitary
        or type(coordinator.single_type_managers[0]) is not FullAttentionManager,
        "prompts are not chunked; remove --no-enable-chunked-prefill": not (
            scheduler.scheduler_config.enable_chunked_prefill
        ),
        "admission looks at the first chunk only; remove --no-scheduler-reserve-full-isl": not (
            scheduler.scheduler_reserve_full_isl
        ),
        "speculative decoding is on; remove --speculative-config": scheduler.num_spec_tokens > 0,
        "a KV connector other than Coda's, or an encoder-cache connector, is configured": not _predictable_connector(
            scheduler
        )
        or scheduler.ec_connector is not None,
        "pipeline, data or context parallelism is on": scheduler.use_pp
        or parallel.data_parallel_size > 1
        or scheduler.dcp_world_size > 1
        or scheduler.pcp_world_size > 1,
        "encoder-decoder models are not supported": scheduler.is_encoder_decoder,
    }
    return next((problem for problem, present in problems.items() if present), "")


def _predictable_connector(scheduler: Scheduler) -> bool:
    """Return whether it is known beforehand what the connector restores: block by block out of Coda's shadow."""
    connector = scheduler.connector
    if connector is None:
        return True
    if not isinstance(connector, CodaShadowConnector):
        return False
    config = connector.scheduler.config
    by_blocks = all(group.tokens_per_chunk == scheduler.block_size for group in config.kv_group_configs)
    return by_blocks and not config.supports_partial_tail
