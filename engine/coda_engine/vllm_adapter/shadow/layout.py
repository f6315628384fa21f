"""Which engines may share a shadow: those in which equal keys name equal bytes.

The files' identity is made of everything that changes the bytes of a KV block or the meaning of its hash.
The plug-in's process knows what follows from the configuration; block sizes and layouts are only known when
the KV cache is made, and are added by each side from the same resolved description.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, resolve_none_hash_seed
from vllm.v1.kv_offload.config import OffloadingConfig

from coda_engine.shadow import EvictionPolicyName, ShadowLayout
from coda_engine.vllm_adapter.keys import model_digest, vllm_distribution
from coda_engine.vllm_adapter.shadow.weights import weights_identity

PLAN_FIELD = "coda_shadow"
"""Field of vLLM's connector configuration in which the plan travels to EngineCore and workers."""

_FIXED_PROMPT = tuple(range(1, 33))


@dataclass(frozen=True, slots=True)
class ShadowPlan:
    """The shadow as the plug-in's process decided it.

    Attributes:
        folder: Folder of the shadow's files, this CodaCluster's alone.
        size_bytes: Most bytes of all pages of all ranks.
        eviction: Which page makes room for a new one.
        identity: What the configuration says about bytes and hashes, as JSON.
    """

    folder: str
    size_bytes: int
    eviction: EvictionPolicyName
    identity: str

    def to_field(self) -> dict[str, Any]:
        """Return the plan as plain data."""
        return asdict(self) | {"eviction": self.eviction.value}

    @classmethod
    def from_field(cls, extra_config: Mapping[str, Any]) -> Self:
        """Return the plan in a connector's configuration."""
        fields = extra_config[PLAN_FIELD]
        return cls(**fields | {"eviction": EvictionPolicyName(fields["eviction"])})

    @property
    def path(self) -> Path:
        """The folder as a path."""
        return Path(self.folder)


def configured_identity(config: VllmConfig) -> str:
    """Return what the configuration says about the bytes of a KV block and the meaning of its hash."""
    model, parallel = config.model_config, config.parallel_config
    return _written(
        {
            "model": model_digest(config),
            "weights": weights_identity(config),
            "revision": model.revision or "",
            # Positions are encoded by it in some models (LongRoPE chooses its factors by the longest context).
            "longest_context_tokens": model.max_model_len,
            "dtype": str(model.dtype),
            "quantization": model.quantization or "",
            "load_format": str(config.load_config.load_format),
            "kv_dtype": config.cache_config.cache_dtype,
            "tensor_parallel": parallel.tensor_parallel_size,
            "attention_backend": str(config.attention_config.backend),
            "v2_runner": config.use_v2_model_runner,
            "device": current_platform.get_device_name(),
            "vllm": vllm_distribution()[1],
            "hashes": _hash_of_a_fixed_prompt(config.cache_config.prefix_caching_hash_algo),
        }
    )


def shadow_layout(plan: ShadowPlan, config: OffloadingConfig) -> ShadowLayout:
    """Return the layout of the shadow's files; equal on the scheduler's side and on every rank."""
    page_bytes, ranks = config.worker_kv_bytes_per_block * config.cache.blocks_per_chunk, config.parallel.tp_size
    (group,) = config.groups
    resolved = {
        "configured": plan.identity,
        "block_tokens": group.tokens_per_block,
        "hash_tokens": config.cache.tokens_per_hash,
        "layers": list(group.layer_names),
        "kv_layout": config.kv_cache_layout,
        "kv_dtype": config.model.dtype,
    }
    return ShadowLayout(
        identity=hashlib.sha256(_written(resolved).encode()).hexdigest(),
        page_bytes=page_bytes,
        ranks=ranks,
        slots=plan.size_bytes // (page_bytes * ranks) if page_bytes > 0 else 0,
    )


def _hash_of_a_fixed_prompt(algorithm: str) -> str:
    """Return the first block hash of one prompt: it tells algorithms, seeds and their environment apart."""
    function = get_hash_fn_by_name(algorithm)
    root = BlockHash(function(resolve_none_hash_seed(function)))
    return f"{algorithm} {hash_block_tokens(function, root, _FIXED_PROMPT, None).hex()}"


def _written(fields: Mapping[str, Any]) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"))
