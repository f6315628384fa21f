"""What this machine has, as one value; nothing is decided here."""

import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coda_engine.contract.interface import VLLM_DISTRIBUTIONS
from coda_operator.spec import CodaClusterSpec, Device

LOOPBACK = "127.0.0.1"
SHARED_MEMORY_DIR = Path("/dev/shm")  # noqa: S108 - shared memory, not a temporary file

_MEMORY_LIMIT_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A local model's folder.

    Attributes:
        path: The folder.
        config: Its ``config.json``; None when there is none that can be read.
        weight_bytes: Size of its weights' files.
    """

    path: Path
    config: dict[str, Any] | None
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """One look at the machine.

    Attributes:
        cores: CPUs that this process may use.
        memory_bytes: Memory that can be had without swapping.
        shared_memory_bytes: Free bytes in /dev/shm, with those that this CodaCluster's CPU shadow holds from before.
        gpus: GPUs that the driver lists.
        vllm_version: Version of the installed vLLM; None when there is none.
        busy_ports: Those of the ports asked about that something listens on.
        model: The model's folder when it is a local one.
    """

    cores: tuple[int, ...]
    memory_bytes: int
    shared_memory_bytes: int
    gpus: int
    vllm_version: str | None
    busy_ports: frozenset[int]
    model: ModelFolder | None


def look_at_machine(spec: CodaClusterSpec, port: int, shadow: Path | None = None) -> Machine:
    """Return what ``spec`` will find on this machine.

    Args:
        spec: The specification.
        port: The router's.
        shadow: Folder of the CodaCluster's CPU shadow, whether it exists or not.
    """
    host_path = spec.model.source.host_path
    held_bytes = _allocated_bytes(shadow) if shadow is not None else 0
    return Machine(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        memory_bytes=_memory_bytes() + held_bytes,
        shared_memory_bytes=shutil.disk_usage(SHARED_MEMORY_DIR).free + held_bytes,
        gpus=_gpus() if spec.engine.device is Device.CUDA else 0,
        vllm_version=installed_vllm_version(),
        busy_ports=frozenset(candidate for candidate in (port,) if not port_is_free(candidate)),
        model=model_folder(Path(host_path)) if host_path else None,
    )


def installed_vllm_version() -> str | None:
    """Return the version of the installed vLLM, whichever distribution it came in."""
    for distribution in VLLM_DISTRIBUTIONS:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def model_folder(path: Path) -> ModelFolder | None:
    """Return what is in a model's folder; None when it is not a folder."""
    if not path.is_dir():
        return None
    config: dict[str, Any] | None = None
    try:
        loaded = json.loads((path / "config.json").read_bytes())
        config = loaded if isinstance(loaded, dict) else None
    except (OSError, ValueError):
        pass  # reported as a missing configuration
    weights = [file for pattern in ("*.safetensors", "*.bin", "*.gguf") for file in path.glob(pattern)]
    return ModelFolder(path, config, sum(file.stat().st_size for file in weights))


def free_ports(first: int, count: int) -> list[int]:
    """Return ``count`` free ports from ``first`` upwards; they stay outside the kernel's pool for outgoing ones."""
    found: list[int] = []
    for port in range(first, 65_536):
        if len(found) == count:
            break
        if port_is_free(port):
            found.append(port)
    return found


def port_is_free(port: int) -> bool:
    """Return whether this machine's loopback address can be bound at ``port``."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
    return True


def core_list(cores: Iterable[int]) -> str:
    """Return CPUs as OpenMP and taskset write them: ``0-2,5``."""
    parts: list[list[int]] = []
    for core in sorted(cores):
        if parts and core == parts[-1][-1] + 1:
            parts[-1].append(core)
        else:
            parts.append([core])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _memory_bytes() -> int:
    available = 0
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) * 1024
    for file in _MEMORY_LIMIT_FILES:
        try:
            limit = int(file.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue  # no such controller, or "max"
        available = min(available, limit)
    return available


def _allocated_bytes(folder: Path) -> int:
    """Return the bytes that the files below a folder hold; 0 when there is none, or it is somebody else's."""
    files = (file for file in folder.rglob("*") if file.is_file()) if os.access(folder, os.R_OK | os.X_OK) else ()
    return sum(file.stat().st_blocks * 512 for file in files)


def _gpus() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, check=False, timeout=60)
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) if listed.returncode == 0 else 0
