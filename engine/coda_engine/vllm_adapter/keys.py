"""The keys of this engine's configuration, as a profile must carry them to be accepted."""

import hashlib
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from vllm.config import VllmConfig

from coda_engine.contract.errors import DocumentError
from coda_engine.contract.interface import ENV_SPEC_KEY, VLLM_DISTRIBUTIONS
from coda_engine.contract.profile import FullKey, SpecKey
from coda_engine.vllm_adapter.kv_facts import KvFacts, gpu_driver
from coda_engine.vllm_adapter.log import logger

_ADAPTER_FOLDER = Path(__file__).parent
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".gguf")


def full_key(vllm_config: VllmConfig, spec_key_json: str, kv: KvFacts) -> FullKey:
    """Return the engine's own full key.

    Args:
        vllm_config: The engine's configuration, as resolved.
        spec_key_json: The spec key that it was started for; "" = derive one.
        kv: What its KV cache and shadow are made of.

    Raises:
        DocumentError: ``spec_key_json`` cannot be read.
    """
    return FullKey(
        spec=SpecKey.from_json(spec_key_json) if spec_key_json else derived_spec_key(vllm_config),
        model_digest=model_digest(vllm_config),
        hardware=_hardware(vllm_config),
        vllm_version=vllm_distribution()[1],
        adapter_digest=_adapter_digest(),
        block_size=kv.block_tokens,
        kv_block_bytes=kv.block_bytes,
        attention_backend=_attention_backend(vllm_config),
        graph_mode=_graph_mode(vllm_config),
        max_batched_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        max_context_tokens=vllm_config.model_config.max_model_len,
        shadow_layout=kv.shadow_layout,
        transfer_topology=kv.transfer_topology,
        driver=_driver(vllm_config),
        runtime=_runtime(vllm_config),
    )


def full_key_or_derived(vllm_config: VllmConfig, spec_key_json: str, kv: KvFacts) -> tuple[FullKey, str]:
    """Return the full key and "", or the next best one and why.

    With an unreadable spec key one is derived; an engine that cannot tell its configuration gets a key that
    no profile matches, so that everything that needs no profile goes on.
    """
    try:
        try:
            return full_key(vllm_config, spec_key_json, kv), ""
        except DocumentError as error:
            return full_key(vllm_config, "", kv), f"{ENV_SPEC_KEY}: {error}"
    except Exception as error:
        logger.exception("coda: the engine's key cannot be told, no profile will match")
        return _unknown_key(kv), f"the engine's key cannot be told: {type(error).__name__}: {error}"


def _unknown_key(kv: KvFacts) -> FullKey:
    unknown = "unknown"
    return FullKey(
        spec=SpecKey(
            model=unknown, model_revision="", weights_dtype=unknown, quantization="", kv_dtype=unknown,
            device="cpu", device_count=1, engine=unknown,
        ),
        model_digest=unknown,
        hardware=unknown,
        vllm_version=unknown,
        adapter_digest=unknown,
        block_size=kv.block_tokens,
        attention_backend=unknown,
        graph_mode=unknown,
        max_batched_tokens=0,
        max_context_tokens=0,
    )  # fmt: skip


def derived_spec_key(vllm_config: VllmConfig) -> SpecKey:
    """Return a spec key for an engine that nobody started for a specification."""
    model, cuda = vllm_config.model_config, not _is_cpu(vllm_config)
    return SpecKey(
        model=str(model.model),
        model_revision=model.revision or "",
        weights_dtype=str(model.dtype).removeprefix("torch."),
        quantization=model.quantization or "",
        kv_dtype=vllm_config.cache_config.cache_dtype,
        device="cuda" if cuda else "cpu",
        device_count=vllm_config.parallel_config.tensor_parallel_size if cuda else cpu_threads(),
        engine=" ".join(vllm_distribution()),
    )


def vllm_distribution() -> tuple[str, str]:
    """Return name and version of the installed vLLM distribution; version "" when there is none."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return "vllm", ""


def cpu_threads() -> int:
    """Return how many CPUs vLLM's CPU worker binds its threads to."""
    bind = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "auto")
    if bind in ("auto", "nobind", ""):
        return len(os.sched_getaffinity(0))
    return sum(_range_size(part) for part in bind.split("|")[0].split(","))


def _range_size(part: str) -> int:
    first, _, last = part.strip().partition("-")
    return int(last) - int(first) + 1 if last else 1


def _is_cpu(vllm_config: VllmConfig) -> bool:
    return str(vllm_config.device_config.device_type) == "cpu"


def _hardware(vllm_config: VllmConfig) -> str:
    if _is_cpu(vllm_config):
        return f"{_cpu_model()}, {cpu_threads()} threads"
    from vllm.platforms import current_platform

    memory_gib = current_platform.get_device_total_memory() / 2**30
    return f"{current_platform.get_device_name()}, {memory_gib:.0f} GiB"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def _driver(vllm_config: VllmConfig) -> str:
    """Return the versions under the runtime: the kernel's and, with a GPU, its driver's."""
    kernel = f"{platform.system()} {platform.release()}"
    return kernel if _is_cpu(vllm_config) else f"{kernel}, {gpu_driver()}"


def _runtime(vllm_config: VllmConfig) -> str:
    """Return the patch versions of what vLLM computes with."""
    return (
        f"torch {torch.__version__}"
        if _is_cpu(vllm_config)
        else f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    )


def _attention_backend(vllm_config: VllmConfig) -> str:
    if _is_cpu(vllm_config):
        return "CPU_ATTN"
    backend = vllm_config.attention_config.backend
    return backend.name if backend is not None else "auto"


def _graph_mode(vllm_config: VllmConfig) -> str:
    mode = vllm_config.compilation_config.cudagraph_mode
    return mode.name if mode is not None and not _is_cpu(vllm_config) else "NONE"


def model_digest(vllm_config: VllmConfig) -> str:
    """Return a digest of the model's configuration and its weights' names and sizes (hub: their commit)."""
    config = vllm_config.model_config.hf_config
    digest = hashlib.sha256(config.to_json_string(use_diff=False).encode())
    folder = Path(str(vllm_config.model_config.model))
    if folder.is_dir():
        for path in sorted(folder.iterdir()):
            if path.suffix in WEIGHT_SUFFIXES:
                digest.update(f"{path.name} {path.stat().st_size}".encode())
    else:
        digest.update(str(getattr(config, "_commit_hash", "")).encode())
    return digest.hexdigest()[:16]


def _adapter_digest() -> str:
    digest = hashlib.sha256()
    for path in sorted(_ADAPTER_FOLDER.rglob("*.py")):
        digest.update(path.relative_to(_ADAPTER_FOLDER).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
