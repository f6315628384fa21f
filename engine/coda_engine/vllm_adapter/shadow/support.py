"""In which engines the shadow may run, by vLLM's resolved configuration."""

import os

from vllm.config import VllmConfig

from coda_engine.vllm_adapter.shadow.weights import weights_identity

_SHAREABLE_HASHES = ("sha256", "sha256_cbor")


def unsupported_configuration(config: VllmConfig) -> str:
    """Return what keeps the shadow from running on this engine, and the remedy; "" = nothing.

    Raises:
        OSError: The weights' files cannot be read.

    Whether the KV cache has one group of full-attention layers only shows once it is laid out; the connector
    looks then.
    """
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    device = str(config.device_config.device_type)
    problems = {
        "another KV connector is configured; remove --kv-transfer-config or --kv-offloading-size": (
            config.kv_transfer_config is not None
        ),
        "an encoder-cache connector is configured; remove --ec-transfer-config": config.ec_transfer_config is not None,
        "prefix caching is off; remove --no-enable-prefix-caching": not cache.enable_prefix_caching,
        f"block hashes of {cache.prefix_caching_hash_algo} can be made to collide; use sha256": (
            cache.prefix_caching_hash_algo not in _SHAREABLE_HASHES
        ),
        "pipeline, data or context parallelism is on": parallel.pipeline_parallel_size > 1
        or parallel.data_parallel_size > 1
        or parallel.decode_context_parallel_size > 1
        or parallel.prefill_context_parallel_size > 1,
        "the ranks are on several nodes": parallel.world_size != parallel.tensor_parallel_size
        or parallel.nnodes_within_dp > 1,
        "the model does not use full attention in every layer": model.is_hybrid
        or model.is_attention_free
        or model.get_sliding_window() is not None
        or model.attention_chunk_size is not None,
        "encoder-decoder and pooling models are not supported": model.is_encoder_decoder
        or model.runner_type == "pooling",
        "speculative decoding is on; remove --speculative-config": config.speculative_config is not None,
        "adapters are hashed by name, not by content; remove --enable-lora": config.lora_config is not None,
        "weights may be exchanged while the engine runs; remove --weight-transfer-config": (
            config.weight_transfer_config is not None
        ),
        "weights that come neither from a folder nor from a hub's commit cannot be told from others": (
            not weights_identity(config)
        ),
        "the device is neither a CPU nor CUDA": device not in ("cpu", "cuda"),
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True may move the KV cache; remove it": (
            "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
            and not model.enable_cumem_allocator
        ),
    }
    return next((problem for problem, present in problems.items() if present), "")
