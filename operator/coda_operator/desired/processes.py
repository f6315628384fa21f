"""The command lines of engine, router and profiler, the same in a pod and on one machine.

``coda up`` spawns what these functions return; the operator wraps the same into containers. The two
differ only in the places (ports, folders) that they pass in.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from coda_engine.contract.identity import Isolation
from coda_engine.contract.interface import (
    ENV_CLUSTER_SECRET_FILE,
    ENV_INTERNAL_TOKEN_FILE,
    ENV_ISOLATION,
    ENV_PAGE_DIR,
    ENV_PROFILE_FILE,
    ENV_SETTINGS_FILE,
    ENV_SHADOW_BYTES,
    ENV_SHADOW_DIR,
    ENV_SHADOW_EVICTION,
    ENV_SPEC_KEY,
    VLLM_PLUGIN_NAMES,
)
from coda_engine.contract.profile import SpecKey
from coda_operator.spec import CodaClusterSpec, Device, quantity_bytes

CPU_BATCHED_TOKENS = 512
"""Default step size on CPU: a larger one makes aborts and live settings wait seconds for one step."""

CPU_BLOCK_TOKENS = 32
"""KV block on CPU: vLLM's kernels want multiples of 32; its default of 128 wastes reuse at block ends."""

DRAIN_S = 20
"""How long an engine that is told to end works on what it has; below a pod's default grace of 30 s."""

SHADOW_MARGIN_BYTES = 64 * 2**20
"""What a CPU shadow's index and page headers take beside its pages; with another 1/32 of its size on top."""

DEFAULT_CPU_KV_CACHE_BYTES = 2 * 2**30
"""vLLM on CPU would otherwise take a share of the whole machine's memory."""


def shadow_space_bytes(spec: CodaClusterSpec) -> int:
    """Return the shared memory that one CPU shadow takes, its index included; 0 without one."""
    size_bytes = spec.kv_shadow.size_bytes
    return size_bytes + size_bytes // 32 + SHADOW_MARGIN_BYTES if size_bytes else 0


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process to run.

    Attributes:
        name: For logs and container names.
        argv: Command line; argv[0] is an interpreter or program.
        env: Variables to set on top of the surroundings.
        port: TCP port on which the process answers ``ready_path``.
        ready_path: HTTP path that answers 200 once the process can serve.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    port: int
    ready_path: str


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """Where an engine runs.

    Attributes:
        name: Process name, for example ``engine-0``.
        python: Interpreter that has vLLM.
        host: Address to bind.
        port: Port to bind.
        model_path: Folder with the model's files; None for a hub model.
        settings_file: Settings document at start.
        profile_file: Profile to start with; may not exist yet.
        cluster_secret_file: Secret that signs identities; None = no router in front.
        internal_token_file: Token of internal endpoints; None = open.
        page_dir: Folder of shared-memory pages.
        shadow_dir: Folder of the CPU shadow, where the specification asks for one; the engine makes it.
        cores: CPUs to bind, for example ``0`` or ``0-3``; None = vLLM decides.
    """

    name: str
    python: str
    host: str
    port: int
    model_path: str | None
    settings_file: str
    profile_file: str
    cluster_secret_file: str | None = None
    internal_token_file: str | None = None
    page_dir: str = "/dev/shm"  # noqa: S108 - shared memory, not a temporary file
    shadow_dir: str | None = None
    cores: str | None = None


@dataclass(frozen=True, slots=True)
class RouterPlace:
    """Where a router runs.

    Attributes:
        name: Process name.
        python: Interpreter that has Coda's router.
        host: Address to bind.
        port: Port to bind.
        workers: Engines' base URLs; empty when discovered.
        discover: ``NAMESPACE/SERVICE`` whose EndpointSlices name the engines; None = static workers.
        settings_file: Settings document, followed while running.
        api_keys_dir: Folder of API keys (file name = tenant); None = open, on loopback only.
        cluster_secret_file: Secret that signs identities.
        internal_token_file: Token of the engines' internal endpoints.
    """

    name: str
    python: str
    host: str
    port: int
    settings_file: str
    workers: tuple[str, ...] = field(default=())
    discover: str | None = None
    api_keys_dir: str | None = None
    cluster_secret_file: str | None = None
    internal_token_file: str | None = None


def engine_process(spec: CodaClusterSpec, key: SpecKey, place: EnginePlace) -> ProcessSpec:
    """Return the engine's process: stock vLLM with Coda's plug-ins loaded by entry point."""
    # The module, not the `vllm` program: the CPU distribution's program does not start (it looks up its version
    # under the name of the CUDA distribution).
    argv = [place.python, "-m", "vllm.entrypoints.openai.api_server", *_model_args(spec, place)]
    argv += ["--host", place.host, "--port", str(place.port)]
    argv += ["--enable-prefix-caching", "--enable-prompt-tokens-details", "--disable-uvicorn-access-log"]
    argv += ["--shutdown-timeout", str(DRAIN_S)]
    argv += _capacity_args(spec)
    if spec.model.tool_parser:
        argv += ["--enable-auto-tool-choice", "--tool-call-parser", spec.model.tool_parser]
    argv += spec.engine.extra_args
    return ProcessSpec(place.name, tuple(argv), _engine_env(spec, key, place), place.port, "/health")


def router_process(place: RouterPlace) -> ProcessSpec:
    """Return the router's process."""
    argv = [place.python, "-m", "coda_router", "--host", place.host, "--port", str(place.port)]
    for worker in place.workers:
        argv += ["--workers", worker]
    for option, value in (
        ("--discover", place.discover),
        ("--settings-file", place.settings_file),
        ("--api-keys-dir", place.api_keys_dir),
        ("--cluster-secret-file", place.cluster_secret_file),
        ("--internal-token-file", place.internal_token_file),
    ):
        if value is not None:
            argv += [option, value]
    return ProcessSpec(place.name, tuple(argv), {}, place.port, "/readyz")


def _model_args(spec: CodaClusterSpec, place: EnginePlace) -> list[str]:
    model = spec.model
    args = ["--model", place.model_path or model.source.hub or ""]
    args += ["--served-model-name", model.name, *model.served_names]
    if model.revision and model.source.hub:
        args += ["--revision", model.revision]
    args += ["--dtype", model.dtype, "--kv-cache-dtype", model.kv_cache_dtype]
    if model.quantization:
        args += ["--quantization", model.quantization]
    if model.max_context_tokens is not None:
        args += ["--max-model-len", str(model.max_context_tokens)]
    return args


def _capacity_args(spec: CodaClusterSpec) -> list[str]:
    engine = spec.engine
    on_cpu = engine.device is Device.CPU
    args: list[str] = []
    batched_tokens = engine.max_batched_tokens or (CPU_BATCHED_TOKENS if on_cpu else None)
    if batched_tokens is not None:
        args += ["--max-num-batched-tokens", str(batched_tokens)]
    if engine.max_running is not None:
        args += ["--max-num-seqs", str(engine.max_running)]
    kv_cache_bytes = quantity_bytes(engine.kv_cache_size) if engine.kv_cache_size else None
    if kv_cache_bytes is None and on_cpu:
        kv_cache_bytes = DEFAULT_CPU_KV_CACHE_BYTES
    if kv_cache_bytes is not None:
        args += ["--kv-cache-memory-bytes", str(kv_cache_bytes)]
    if on_cpu:
        args += ["--block-size", str(CPU_BLOCK_TOKENS), "--enforce-eager"]
    elif engine.device_count > 1:
        args += ["--tensor-parallel-size", str(engine.device_count)]
    return args


def _engine_env(spec: CodaClusterSpec, key: SpecKey, place: EnginePlace) -> dict[str, str]:
    env = {
        "VLLM_PLUGINS": ",".join(VLLM_PLUGIN_NAMES),
        # Block hashes must agree between engines and restarts; a random hash seed would make every prefix new.
        "PYTHONHASHSEED": "0",
        ENV_SPEC_KEY: json.dumps(key.model_dump(mode="json"), sort_keys=True),
        ENV_SETTINGS_FILE: place.settings_file,
        ENV_PROFILE_FILE: place.profile_file,
        ENV_ISOLATION: Isolation.TENANT.value,
        ENV_PAGE_DIR: place.page_dir,
    }
    if place.cluster_secret_file is not None:
        env[ENV_CLUSTER_SECRET_FILE] = place.cluster_secret_file
    if place.internal_token_file is not None:
        env[ENV_INTERNAL_TOKEN_FILE] = place.internal_token_file
    if spec.kv_shadow.size_bytes and place.shadow_dir is not None:
        env[ENV_SHADOW_BYTES] = str(spec.kv_shadow.size_bytes)
        env[ENV_SHADOW_DIR] = place.shadow_dir
        env[ENV_SHADOW_EVICTION] = spec.kv_shadow.eviction
    if spec.model.source.hub is None:
        env["HF_HUB_OFFLINE"] = "1"
    if spec.engine.device is Device.CPU:
        env["OMP_NUM_THREADS"] = str(spec.engine.device_count)
        if place.cores is not None:
            env["VLLM_CPU_OMP_THREADS_BIND"] = place.cores
    return env
