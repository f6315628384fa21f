"""Real vLLM schedulers driven step by step: everything is vLLM's own but the forward pass, whose tokens are given.

A scheduler sees of the model only which tokens were sampled, so long scripts with preemptions, aborts and
shared prefixes run in milliseconds.
"""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import KVCacheBlock, get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from coda_engine.contract.reasons import Feature
from coda_engine.contract.settings import AdmissionSettings, Settings, StateAdmissionPolicyName, StateAdmissionSettings
from coda_engine.profiling.assumed import assumed_profile
from coda_engine.vllm_adapter.compat import Gate, check, installed_version
from coda_engine.vllm_adapter.config import AdapterConfig
from coda_engine.vllm_adapter.runtime import EngineRuntime

BLOCK_TOKENS = 32
STEP_TOKENS = 512
SAMPLED_TOKEN = 7
MAX_STEPS = 3_000

Trace = list[dict[str, int]]
"""Scheduled tokens by request, for each step."""


def resolve_config(model_folder: Path) -> VllmConfig:
    """Return a vLLM configuration as the engine itself would resolve it."""
    arguments = EngineArgs(
        model=str(model_folder),
        enforce_eager=True,
        block_size=BLOCK_TOKENS,
        max_num_batched_tokens=STEP_TOKENS,
        max_num_seqs=16,
        max_model_len=8_192,
        kv_cache_memory_bytes=110_000_000,
    )
    config = arguments.create_engine_config()
    config.cache_config.enable_prefix_caching = True
    return config


def new_scheduler(config: VllmConfig, blocks: int, scheduler_class: type[Scheduler] = Scheduler) -> Scheduler:
    """Return a stock scheduler with ``blocks`` KV blocks, even where Coda's hook is installed."""
    config.cache_config.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=3, head_size=64, dtype=torch.bfloat16)
    kv_cache = KVCacheConfig(
        num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
    )
    construct = getattr(Scheduler.__init__, "__wrapped__", Scheduler.__init__)
    scheduler = scheduler_class.__new__(scheduler_class)
    with set_current_vllm_config(config):
        arguments = {
            "vllm_config": config,
            "kv_cache_config": kv_cache,
            "structured_output_manager": StructuredOutputManager(config),
            "block_size": BLOCK_TOKENS,
            "log_stats": False,
        }
        if scheduler_class is AsyncScheduler:
            patched, Scheduler.__init__ = Scheduler.__init__, construct
            try:
                scheduler.__init__(**arguments)
            finally:
                Scheduler.__init__ = patched
        else:
            construct(scheduler, **arguments)
    return scheduler


def adapter_config(environment: Mapping[str, str] | None = None) -> AdapterConfig:
    """Return the adapter's configuration of an environment (default: an empty one)."""
    return AdapterConfig.from_environment(environment or {})


def open_gates() -> dict[Feature, Gate]:
    """Return the gates as they are for the installed vLLM."""
    return check(installed_version())


def attach(scheduler: Scheduler, environment: Mapping[str, str] | None = None, gates=None) -> EngineRuntime:
    """Attach Coda to ``scheduler`` as its plug-in would."""
    return EngineRuntime.attach(scheduler, adapter_config(environment), gates or open_gates())


def settings_json(policy: StateAdmissionPolicyName = StateAdmissionPolicyName.TIERED_AGING, **state: int) -> str:
    """Return a settings document with this state-admission policy."""
    settings = Settings(admission=AdmissionSettings(state=StateAdmissionSettings(policy=policy, **state)))
    return settings.model_dump_json(by_alias=True)


def use_tiered_aging(runtime: EngineRuntime, **state: int) -> None:
    """Give the engine a profile of its own and Tiered-Aging."""
    assert "digest" in runtime.apply_profile(assumed_profile(runtime.control.full_key).to_json().decode())
    assert "digest" in runtime.apply_settings(settings_json(**state))


def native_hit(scheduler: Scheduler, request: Request) -> list[KVCacheBlock]:
    """Return the blocks that vLLM's own look-up finds for ``request``."""
    manager = scheduler.kv_cache_manager
    if not manager.prefix_cache_lookup_enabled(request):
        return []
    found = manager.coordinator.find_longest_cache_hit(request.block_hashes, request.num_tokens - 1)
    return found[0][0]


class Drive:
    """A scheduler and the requests that a test gave it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, hash_function)
        self.requests: dict[str, Request] = {}
        self.trace: Trace = []
        self.admitted: list[str] = []

    def add(
        self, name: str, prompt: list[int], max_tokens: int = 4, arrival_s: float = 0.0, salt: str | None = None
    ) -> Request:
        """Hand the scheduler a request."""
        core_request = EngineCoreRequest(
            request_id=name,
            prompt_token_ids=prompt,
            mm_features=None,
            sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
            pooling_params=None,
            arrival_time=arrival_s,
            lora_request=None,
            cache_salt=salt,
            data_parallel_rank=None,
        )
        request = Request.from_engine_core_request(core_request, self._hasher)
        self.requests[name] = request
        self.scheduler.add_request(request)
        return request

    def abort(self, names: Iterable[str]) -> None:
        """Abort requests."""
        self.scheduler.finish_requests(list(names), RequestStatus.FINISHED_ABORTED)

    def step(self) -> dict[str, int]:
        """Run one step; return its scheduled tokens by request."""
        output = self.scheduler.schedule()
        scheduled: dict[str, int] = dict(output.num_scheduled_tokens)
        for data in output.scheduled_new_reqs:
            self.admitted.append(data.req_id)
        names = list(scheduled)
        sampled = [[] if self.requests[name].is_prefill_chunk else [SAMPLED_TOKEN] for name in names]
        model_output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: position for position, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        self.scheduler.update_from_output(output, model_output)
        self.trace.append(scheduled)
        return scheduled

    def finish(self, after_step: Callable[[int], None] | None = None) -> Trace:
        """Step until nothing is left; call ``after_step`` with the number of each."""
        for number in range(MAX_STEPS):
            if not self.scheduler.has_requests():
                return self.trace
            self.step()
            if after_step is not None:
                after_step(number)
        raise AssertionError(f"requests are left after {MAX_STEPS} steps: {self.scheduler.get_request_counts()}")

    def statuses(self) -> dict[str, RequestStatus]:
        """Return each request's status."""
        return {name: request.status for name, request in self.requests.items()}
