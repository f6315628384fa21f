"""Source digests of the vLLM functions that features rely on (see ``compat``); see ``record_sources``."""

# fmt: off
SOURCES: dict[str, tuple[str, ...]] = {
    "vllm.config.kv_transfer:KVTransferConfig": (
        "c5d9f27cd919d2ca",
    ),
    "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.get_connector_class": (
        "519640b50dbc237a",
    ),
    "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate": (
        "0cab940a0db19dd1",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.common:OffloadingWorkerMetadata": (
        "084d8a9cbe22fc51",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.config:build_offloading_config": (
        "f80ef55a0f96b03c",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler": (
        "a5f874a43928522f",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:RequestOffloadState": (
        "74ca68ea08b4a7d0",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker:OffloadingConnectorWorker": (
        "d15953d3b812a934",
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector": (
        "c93f9ffc8802c057",
    ),
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": (
        "91024dc5617a5ea9",
    ),
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages": (
        "72c83947b0427841",
    ),
    "vllm.entrypoints.generate.base.serving:GenerateBaseServing._get_session_id": (
        "5e425add36fefab0",
    ),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._create_chat_completion": (
        "8c4bea6795c6357d",
    ),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat._make_parser": (
        "dbc81892f25d5337",
    ),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_full_generator": (
        "5d70b082cdd57a29",
    ),
    "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat.chat_completion_stream_generator": (
        "5da1558aef63e076",
    ),
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._create_responses": (
        "254567ebf9e51809",
    ),
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._make_response_output_items": (
        "c668fd0e8c581f63",
    ),
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._make_response_parser": (
        "2013187d0d127c32",
    ),
    "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses._process_simple_streaming_events": (
        "1dfefdd3c55bf4b1",
    ),
    "vllm.parser.abstract_parser:Parser": (
        "47ca7e3b6a8a5241",
    ),
    "vllm.tracing:instrument_manual": (
        "c645ac54f690c57a",
    ),
    "vllm.v1.core.block_pool:BlockHashToBlockMap": (
        "a541b8723b51ab5f",
    ),
    "vllm.v1.core.block_pool:BlockPool._insert_block_hash": (
        "66f1b1c069f3f633",
    ),
    "vllm.v1.core.block_pool:BlockPool._remove_cached_block_hashes": (
        "c48f7dfc63fc3ad4",
    ),
    "vllm.v1.core.block_pool:BlockPool.free_blocks": (
        "4e4637b2e794c22a",
    ),
    "vllm.v1.core.block_pool:BlockPool.get_cached_block": (
        "f3373639b227cff3",
    ),
    "vllm.v1.core.block_pool:BlockPool.get_new_blocks": (
        "c70a91f9a6af498f",
    ),
    "vllm.v1.core.block_pool:BlockPool.reset_prefix_cache": (
        "a9a7bf72ee9bf897",
    ),
    "vllm.v1.core.block_pool:BlockPool.touch": (
        "162f3b3ff886d423",
    ),
    "vllm.v1.core.block_pool:BlockPool.unpin_blocks": (
        "f63af19f1b6852b4",
    ),
    "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate": (
        "0c4918cbb6f22324",
    ),
    "vllm.v1.core.kv_cache_coordinator:UnitaryKVCacheCoordinator.find_longest_cache_hit": (
        "68c782304f3ba601",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": (
        "b7b4298b5997832e",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": (
        "1a3e3dc5a66a3294",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.prefix_cache_lookup_enabled": (
        "a830afc66217bfef",
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache": (
        "15de32fc719082af",
    ),
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue": (
        "49842827743f539d",
    ),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": (
        "1c518d1f67e558f4",
    ),
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys": (
        "4f6f21723dbef1da",
    ),
    "vllm.v1.core.kv_cache_utils:hash_block_tokens": (
        "2cda8cf13683e685",
    ),
    "vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id": (
        "a1adf34e0dc6a3d9",
    ),
    "vllm.v1.core.kv_cache_utils:resolve_none_hash_seed": (
        "86f52d50e9cae3bf",
    ),
    "vllm.v1.core.sched.request_queue:FCFSRequestQueue": (
        "29cddf7a66aca6ff",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._connector_finished": (
        "f3f0ab1d2a145e2c",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._enqueue_waiting_request": (
        "43defa96ae5653e5",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._free_request": (
        "4639735b00b0327c",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._handle_blocked_waiting_request": (
        "da07fe50de41aff4",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._handle_invalid_blocks": (
        "f596bf0b240d3e80",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._inflight_prefill_reserved_blocks": (
        "6bd85ebaf6a9473a",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": (
        "ca3a04c978e076a5",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._request_remaining_blocks": (
        "f5d17a64eaeb8534",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._update_after_schedule": (
        "ce7ca4083e20aa10",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._update_from_kv_xfer_finished": (
        "b69ce5cc4f5b9989",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._update_requests_with_invalid_blocks": (
        "0a7629d1abd5c489",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._update_waiting_for_remote_kv": (
        "cdb57c850c79d4c9",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.add_request": (
        "3bed73cb8e636828",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.finish_requests": (
        "3a4241482254c90d",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.get_request_counts": (
        "cc4b5e7a89a8e0fa",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": (
        "ac739a60ca21a44e",
    ),
    "vllm.v1.core.sched.scheduler:Scheduler.update_from_output": (
        "fad76c72e94c4539",
    ),
    "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.find_longest_cache_hit": (
        "8bf99bea8524dd30",
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.free": (
        "868f6a80f10975f0",
    ),
    "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.get_num_blocks_to_allocate": (
        "b1e57efa1d414e49",
    ),
    "vllm.v1.engine.core:EngineCore.preprocess_add_request": (
        "0571123ab7416ec5",
    ),
    "vllm.v1.engine.core:EngineCore.step": (
        "3578106e4fa3ad70",
    ),
    "vllm.v1.engine.core:EngineCoreProc._handle_client_request": (
        "5d8b030e6999b209",
    ),
    "vllm.v1.engine.core:EngineCoreProc._handle_shutdown": (
        "3bf17fdd57ff5692",
    ),
    "vllm.v1.engine.core:EngineCoreProc._invoke_utility_method": (
        "ee5a75e874506f2d",
    ),
    "vllm.v1.engine.core:EngineCoreProc.is_running": (
        "aa9995a3d681244a",
    ),
    "vllm.v1.engine.output_processor:OutputProcessor.do_tracing": (
        "9d9ca843585f2623",
    ),
    "vllm.v1.engine:EngineCoreOutput": (
        "b898fd785e8ae168",
    ),
    "vllm.v1.kv_offload.base:GPULoadStoreSpec": (
        "e81f8fa7121452f1",
    ),
    "vllm.v1.kv_offload.base:OffloadingManager": (
        "ca46a05d16dd3a3f",
    ),
    "vllm.v1.kv_offload.base:OffloadingSpec": (
        "0e8a0385bc49bae4",
    ),
    "vllm.v1.kv_offload.base:OffloadingWorker": (
        "48a10b52e709ff68",
    ),
    "vllm.v1.kv_offload.base:ReqContext": (
        "c9228ef56f6b4b4e",
    ),
    "vllm.v1.kv_offload.base:make_offload_key": (
        "76b1172350e05479",
    ),
    "vllm.v1.kv_offload.factory:OffloadingSpecFactory.get_spec_cls": (
        "d2c34d869edb5dff",
    ),
    "vllm.v1.request:Request.from_engine_core_request": (
        "34d1628579495443",
    ),
    "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector": (
        "61a6bdece675fe35",
    ),
    "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output": (
        "19c111e059c01687",
    ),
}
