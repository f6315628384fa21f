"""Whether a specification can run on a machine: purely, every problem at once, each with its field and remedy."""

from dataclasses import dataclass
from pathlib import Path

from coda_cli.up.machine import LOOPBACK, Machine
from coda_engine.contract.interface import VLLM_VERSION_FAMILY
from coda_operator.desired.processes import DEFAULT_CPU_KV_CACHE_BYTES, shadow_space_bytes
from coda_operator.spec import CodaClusterSpec, Device, ShadowScope, quantity_bytes

ENGINE_BASE_BYTES = 2_200_000_000
"""Memory of an engine's three processes without weights and KV cache (measured: 2.0 to 2.2 GB)."""

ENGINE_SHARED_MEMORY_BYTES = 256_000_000
"""Shared memory that one engine's processes may fill between them."""

_NUMBER_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Findings:
    """What the check found.

    Attributes:
        problems: Why it cannot run; one line each, naming the field and the remedy.
        notes: What will not be as written: fields that only mean something in a cluster, shared cores.
    """

    problems: tuple[str, ...]
    notes: tuple[str, ...]


def check(spec: CodaClusterSpec, machine: Machine, port: int) -> Findings:
    """Return what keeps ``spec`` from running on ``machine`` with its router at ``port``."""
    problems = [
        *_software_problems(machine),
        *_port_problems(machine, port),
        *_model_problems(spec, machine),
        *_device_problems(spec, machine),
        *_memory_problems(spec, machine),
    ]
    return Findings(tuple(problems), tuple(_notes(spec, machine)))


def context_problems(spec: CodaClusterSpec, config: dict[str, object]) -> list[str]:
    """Return what a model's own configuration says against the specification's context window and KV cache."""
    problems = []
    own_tokens = config.get("max_position_embeddings")
    asked_tokens = spec.model.max_context_tokens
    overridden = any("hf-overrides" in argument.replace("_", "-") for argument in spec.engine.extra_args)
    if isinstance(own_tokens, int) and asked_tokens and asked_tokens > own_tokens and not overridden:
        problems.append(
            f"spec.model.maxContextTokens: {asked_tokens} is more than the model's own {own_tokens}; set at most "
            f"{own_tokens}, or a rope override in spec.engine.extraArgs (--hf-overrides)"
        )
    token_bytes = _kv_token_bytes(config, spec.model.dtype)
    context_tokens = asked_tokens or (own_tokens if isinstance(own_tokens, int) else None)
    if token_bytes and context_tokens and spec.engine.kv_cache_size and spec.model.kv_cache_dtype == "auto":
        held_tokens = quantity_bytes(spec.engine.kv_cache_size) // token_bytes
        if held_tokens < context_tokens:
            problems.append(
                f"spec.engine.kvCacheSize: {spec.engine.kv_cache_size} holds {held_tokens} tokens, less than one "
                f"request of {context_tokens} (spec.model.maxContextTokens); set at least "
                f"{-(-context_tokens * token_bytes // 1_000_000) + 1}M, or fewer maxContextTokens"
            )
    return problems


def _software_problems(machine: Machine) -> list[str]:
    if machine.vllm_version is None:
        return [
            "vLLM is not installed beside this command; run scripts/install (CPU), or "
            "pip install '.[engine,router]' in Coda's folder (GPU)"
        ]
    if not machine.vllm_version.startswith(VLLM_VERSION_FAMILY):
        return [f"vLLM {machine.vllm_version} is installed; this version of Coda runs with {VLLM_VERSION_FAMILY}*"]
    return []


def _port_problems(machine: Machine, port: int) -> list[str]:
    if port not in machine.busy_ports:
        return []
    return [
        f"spec.router.port: {LOOPBACK}:{port} is in use; stop what listens there (ss -ltnp 'sport = :{port}'), or "
        "choose another port with --port or in the file"
    ]


def _model_problems(spec: CodaClusterSpec, machine: Machine) -> list[str]:
    host_path = spec.model.source.host_path
    if host_path is None:
        return []
    field = "spec.model.source.hostPath"
    if machine.model is None:
        there = "is a file" if Path(host_path).exists() else "does not exist"
        return [f"{field}: {host_path} {there}; name a folder with a Hugging Face model (config.json and weights)"]
    if machine.model.config is None:
        return [f"{field}: {host_path} has no readable config.json; name a folder with a Hugging Face model"]
    return context_problems(spec, machine.model.config)


def _device_problems(spec: CodaClusterSpec, machine: Machine) -> list[str]:
    if spec.engine.device is not Device.CUDA:
        return []
    wanted = spec.engine.replicas * spec.engine.device_count
    if machine.gpus == 0:
        return ["spec.engine.device: cuda needs an NVIDIA GPU and driver, and nvidia-smi lists none; set device: cpu"]
    if wanted > machine.gpus:
        return [
            f"spec.engine.gpus: {spec.engine.replicas} engines of {spec.engine.device_count} GPUs need {wanted}, this "
            f"machine has {machine.gpus}; set fewer replicas or gpus"
        ]
    return []


def _memory_problems(spec: CodaClusterSpec, machine: Machine) -> list[str]:
    engine = spec.engine
    problems = []
    weight_bytes = machine.model.weight_bytes if machine.model else 0
    kv_bytes = quantity_bytes(engine.kv_cache_size) if engine.kv_cache_size else DEFAULT_CPU_KV_CACHE_BYTES
    if engine.device is Device.CUDA:
        weight_bytes, kv_bytes = 0, 0  # on the GPU, where vLLM checks them itself
    shadows = 1 if spec.kv_shadow.scope is ShadowScope.NODE else engine.replicas
    shadow_bytes = shadows * shadow_space_bytes(spec)
    needed = engine.replicas * (ENGINE_BASE_BYTES + weight_bytes + kv_bytes) + shadow_bytes
    if needed > machine.memory_bytes:
        problems.append(
            f"spec.engine.kvCacheSize, spec.engine.replicas{_and_shadow_size(spec)}: {engine.replicas} engines need "
            f"about {_gb(needed)} of memory ({_gb(ENGINE_BASE_BYTES)} each, {_gb(weight_bytes)} weights, "
            f"{_gb(kv_bytes)} KV cache{f', {_gb(shadow_bytes)} CPU shadow in all' if shadow_bytes else ''}), "
            f"{_gb(machine.memory_bytes)} are available; set a smaller kvCacheSize or fewer replicas, or free memory"
        )
    needed_shared = engine.replicas * ENGINE_SHARED_MEMORY_BYTES + shadow_bytes
    if needed_shared > machine.shared_memory_bytes:
        problems.append(
            f"spec.engine.replicas{_and_shadow_size(spec)}: {engine.replicas} engines need "
            f"{_gb(needed_shared)} in /dev/shm, {_gb(machine.shared_memory_bytes)} are free; enlarge it (mount -o "
            "remount,size=2G /dev/shm; in a container --shm-size=2g), remove old files there, or set fewer replicas"
            f"{' or a smaller shadow' if shadow_bytes else ''}"
        )
    return problems


def _and_shadow_size(spec: CodaClusterSpec) -> str:
    return ", spec.kvShadow.size" if spec.kv_shadow.size_bytes else ""


def _notes(spec: CodaClusterSpec, machine: Machine) -> list[str]:
    engine, router = spec.engine, spec.router
    notes = [
        f"{field} means something only in a cluster; it is not used here"
        for field, given in (
            ("spec.engine.image", engine.image),
            ("spec.engine.memory", engine.memory),
            ("spec.engine.podTemplate", engine.pod_template),
            ("spec.engine.gpuProduct", engine.gpu_product),
            ("spec.router.image", router.image),
            ("spec.router.apiKeySecret", router.api_key_secret),
            ("spec.engine.gpuResource", "gpu_resource" in engine.model_fields_set),
            ("spec.profiling.timeoutSeconds", "timeout_seconds" in spec.profiling.model_fields_set),
        )
        if given
    ]
    if router.replicas > 1:
        notes.append(f"spec.router.replicas: {router.replicas} in a cluster; one router runs here")
    threads = engine.replicas * engine.device_count
    if engine.device is Device.CPU and threads > len(machine.cores):
        notes.append(
            f"spec.engine.replicas, spec.engine.cpus: {threads} threads on {len(machine.cores)} cores: engines share "
            "cores and slow each other down"
        )
    return notes


def _kv_token_bytes(config: dict[str, object], dtype: str) -> int | None:
    """Return the KV bytes of one token of a plain transformer; None where the configuration does not say."""
    number_bytes = _NUMBER_BYTES.get(
        str(config.get("dtype") or config.get("torch_dtype")) if dtype == "auto" else dtype
    )
    layers, heads = config.get("num_hidden_layers"), config.get("num_attention_heads")
    kv_heads, hidden = config.get("num_key_value_heads", heads), config.get("hidden_size")
    if not (
        isinstance(layers, int) and isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(hidden, int)
    ):
        return None
    if number_bytes is None:
        return None
    head_size = config.get("head_dim")
    if not isinstance(head_size, int):
        head_size = hidden // heads
    return 2 * layers * kv_heads * head_size * number_bytes


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / 1e9:.1f} GB"
