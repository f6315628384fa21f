"""Compatibility gates: each feature runs only on vLLM internals that it was written for.

A feature that relies on private functions names them here. Their sources are compared, comments,
docstrings and formatting aside, with those it was tested with; another version family, a missing function
or another source closes that feature alone, with its reason, and vLLM serves on without it.
"""

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from coda_engine.contract.interface import VLLM_VERSION_FAMILY
from coda_engine.contract.reasons import Feature, Reason
from coda_engine.vllm_adapter.keys import vllm_distribution
from coda_engine.vllm_adapter.known_sources import SOURCES

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_CORE = "vllm.v1.engine.core:EngineCore"
_OFFLOADING = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"

_STEP = (f"{_SCHEDULER}._update_after_schedule", f"{_SCHEDULER}.get_request_counts", f"{_SCHEDULER}._free_request")

TOUCHED: Mapping[Feature, tuple[str, ...]] = {
    Feature.SNAPSHOT: (
        *_STEP,
        "vllm.v1.engine.core:EngineCore.step",
        "vllm.v1.engine.core:EngineCoreProc._handle_shutdown",
        "vllm.v1.engine.core:EngineCoreProc.is_running",
    ),
    Feature.EXECUTION_ADMISSION: _STEP,
    Feature.IDENTITY: (
        f"{_CORE}.preprocess_add_request",
        "vllm.v1.request:Request.from_engine_core_request",
        "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys",
    ),
    Feature.KV_SHADOW: (
        "vllm.engine.arg_utils:EngineArgs.create_engine_config",
        "vllm.config.kv_transfer:KVTransferConfig",
        f"{_OFFLOADING}_connector:OffloadingConnector",
        f"{_OFFLOADING}.common:OffloadingWorkerMetadata",
        f"{_OFFLOADING}.config:build_offloading_config",
        f"{_OFFLOADING}.scheduler:OffloadingConnectorScheduler",
        f"{_OFFLOADING}.scheduler:RequestOffloadState",
        f"{_OFFLOADING}.worker:OffloadingConnectorWorker",
        "vllm.v1.kv_offload.base:GPULoadStoreSpec",
        "vllm.v1.kv_offload.base:OffloadingManager",
        "vllm.v1.kv_offload.base:OffloadingSpec",
        "vllm.v1.kv_offload.base:OffloadingWorker",
        "vllm.v1.kv_offload.base:ReqContext",
        "vllm.v1.kv_offload.base:make_offload_key",
        "vllm.v1.core.kv_cache_utils:hash_block_tokens",
        "vllm.v1.core.kv_cache_utils:resolve_none_hash_seed",
        "vllm.distributed.kv_transfer.kv_connector.utils:KVOutputAggregator.aggregate",
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.get_connector_class",
        "vllm.v1.kv_offload.factory:OffloadingSpecFactory.get_spec_cls",
        "vllm.v1.worker.gpu.kv_connector:ActiveKVConnector",
        "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin._get_kv_connector_output",
        f"{_SCHEDULER}.schedule",
        f"{_SCHEDULER}.update_from_output",
        f"{_SCHEDULER}._update_from_kv_xfer_finished",
        f"{_SCHEDULER}._update_requests_with_invalid_blocks",
        f"{_SCHEDULER}._update_waiting_for_remote_kv",
        f"{_SCHEDULER}._handle_invalid_blocks",
        f"{_SCHEDULER}._connector_finished",
    ),
    Feature.LIVE_SETTINGS: (
        "vllm.v1.engine.core:EngineCoreProc._handle_client_request",
        "vllm.v1.engine.core:EngineCoreProc._invoke_utility_method",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.reset_prefix_cache",
    ),
    Feature.STATE_ADMISSION: (
        f"{_SCHEDULER}.schedule",
        f"{_SCHEDULER}._handle_blocked_waiting_request",
        f"{_SCHEDULER}._enqueue_waiting_request",
        f"{_SCHEDULER}._inflight_prefill_reserved_blocks",
        f"{_SCHEDULER}._request_remaining_blocks",
        f"{_SCHEDULER}._preempt_request",
        f"{_SCHEDULER}.finish_requests",
        f"{_SCHEDULER}._free_request",
        "vllm.v1.core.sched.request_queue:FCFSRequestQueue",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        "vllm.v1.core.kv_cache_manager:KVCacheManager.prefix_cache_lookup_enabled",
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.get_num_blocks_to_allocate",
        "vllm.v1.core.kv_cache_coordinator:UnitaryKVCacheCoordinator.find_longest_cache_hit",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.get_num_blocks_to_allocate",
        "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager.find_longest_cache_hit",
        "vllm.v1.core.block_pool:BlockHashToBlockMap",
        f"{_POOL}.get_cached_block",
        f"{_POOL}._insert_block_hash",
        f"{_POOL}._remove_cached_block_hashes",
        f"{_POOL}.reset_prefix_cache",
        f"{_POOL}.get_new_blocks",
        f"{_POOL}.touch",
        f"{_POOL}.free_blocks",
    ),
    Feature.RECLAIM: (
        f"{_SCHEDULER}.add_request",
        f"{_SCHEDULER}._free_request",
        f"{_POOL}.get_new_blocks",
        f"{_POOL}.free_blocks",
        f"{_POOL}.unpin_blocks",
        f"{_POOL}._remove_cached_block_hashes",
        f"{_POOL}._insert_block_hash",
        "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue",
        "vllm.v1.core.kv_cache_utils:KVCacheBlock",
        "vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id",
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.free",
    ),
    Feature.TRACE_ATTRIBUTES: (
        f"{_SCHEDULER}.update_from_output",
        "vllm.v1.engine:EngineCoreOutput",
        "vllm.v1.engine.output_processor:OutputProcessor.do_tracing",
        "vllm.tracing:instrument_manual",
    ),
}
"""Feature to the vLLM functions and classes whose behaviour it relies on."""

_CHAT = "vllm.entrypoints.openai.chat_completion.serving:OpenAIServingChat"
_RESPONSES = "vllm.entrypoints.openai.responses.serving:OpenAIServingResponses"

TOUCHED_BY_REPLIES = (
    "vllm.entrypoints.generate.base.serving:GenerateBaseServing._get_session_id",
    f"{_CHAT}._make_parser",
    f"{_CHAT}._create_chat_completion",
    f"{_CHAT}.chat_completion_stream_generator",
    f"{_CHAT}.chat_completion_full_generator",
    f"{_RESPONSES}._make_response_parser",
    f"{_RESPONSES}._create_responses",
    f"{_RESPONSES}._make_response_output_items",
    f"{_RESPONSES}._process_simple_streaming_events",
    "vllm.entrypoints.anthropic.serving:AnthropicServingMessages.create_messages",
    "vllm.parser.abstract_parser:Parser",
)
"""What seeing replies' tools relies on, in the API process alone: EngineCore has not imported these modules."""


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether a feature may run on this vLLM, and if not, why."""

    open: bool
    reason: Reason = Reason.ENABLED
    detail: str = ""


def check(version: str, resolve: Callable[[str], object] | None = None) -> dict[Feature, Gate]:
    """Return the gate of each feature for this vLLM.

    Args:
        version: The installed vLLM's version.
        resolve: From ``module:qualified.name`` to the object; default: import it.
    """
    return {feature: _gate(targets, version, resolve or resolve_target) for feature, targets in TOUCHED.items()}


def check_replies(version: str, resolve: Callable[[str], object] | None = None) -> Gate:
    """Return the gate of seeing replies' tools; the arguments are those of :func:`check`."""
    return _gate(TOUCHED_BY_REPLIES, version, resolve or resolve_target)


def installed_version() -> str:
    """Return the version of the installed vLLM, whatever its distribution is called."""
    return vllm_distribution()[1]


def _gate(targets: tuple[str, ...], version: str, resolve: Callable[[str], object]) -> Gate:
    if not version.startswith(VLLM_VERSION_FAMILY):
        return Gate(
            False, Reason.UNSUPPORTED_VLLM_VERSION, f"vLLM {version or 'unknown'}; {VLLM_VERSION_FAMILY}* is supported"
        )
    changed = [problem for target in targets if (problem := _problem(target, resolve))]
    if changed:
        return Gate(False, Reason.CHANGED_VLLM_INTERNALS, "; ".join(changed))
    return Gate(True)


def _problem(target: str, resolve: Callable[[str], object]) -> str:
    name = target.partition(":")[2]
    try:
        digest = source_digest(resolve(target))
    except (ImportError, AttributeError):
        return f"{name} is gone"
    except (OSError, TypeError, SyntaxError):
        return f"the source of {name} cannot be read"
    return "" if digest in SOURCES.get(target, ()) else f"{name} has changed"


def resolve_target(target: str) -> object:
    """Return the object that ``module:qualified.name`` names.

    Raises:
        ImportError: There is no such module.
        AttributeError: The module has no such member.
    """
    module, _, path = target.partition(":")
    found: object = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def source_digest(function: object) -> str:
    """Return a digest of a function's or class's syntax tree without docstrings, comments and formatting.

    The tree is written down without empty fields, so that Python versions that add such fields agree.
    """
    source = inspect.getsource(function)  # type: ignore[arg-type]
    tree = ast.parse(textwrap.dedent(source))
    return hashlib.sha256(_written(tree).encode()).hexdigest()[:16]


def _written(node: object) -> str:
    if isinstance(node, list):
        return "[" + ",".join(_written(item) for item in node) + "]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = []
    for name, value in ast.iter_fields(node):
        if name == "body" and isinstance(value, list):
            value = _without_docstring(value)
        if value is not None and value != [] and name not in ("kind", "type_comment", "ctx"):
            fields.append(f"{name}={_written(value)}")
    return f"{type(node).__name__}({','.join(fields)})"


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body
