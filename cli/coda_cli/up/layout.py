"""From a specification to processes on this machine: folders, ports, cores, environment."""

import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from coda_cli.up.machine import LOOPBACK, SHARED_MEMORY_DIR, core_list
from coda_cli.up.run_record import internal_token_file
from coda_engine.contract.interface import SHADOW_FOLDER_PREFIX
from coda_engine.contract.profile import SpecKey
from coda_operator.desired.processes import (
    EnginePlace,
    ProcessSpec,
    RouterPlace,
    engine_process,
    router_process,
)
from coda_operator.spec import CodaClusterSpec, Device, ProfilingMode, ShadowScope

_PRIVATE_PREFIX = "coda-"


@dataclass(frozen=True, slots=True)
class Folders:
    """A run's private folders, gone when it ends.

    Attributes:
        scratch: Temporary files of every process, secrets, the settings document. Its path is short, since vLLM
            puts sockets there and a socket's path has at most 107 characters.
        pages: Shared-memory pages between an engine's processes.
        shadow: The CodaCluster's CPU shadow. Its name is not random and it stays when a run is killed: the next run
            finds its sessions' KV in it.
    """

    scratch: Path
    pages: Path
    shadow: Path

    @property
    def temporary(self) -> Path:
        """The processes' TMPDIR."""
        return self.scratch / "tmp"

    @property
    def settings_file(self) -> Path:
        """The settings document in force at start."""
        return self.scratch / "settings.json"

    @property
    def cluster_secret_file(self) -> Path:
        """The secret that signs identity values between router and engines."""
        return self.internal_token_file.with_name("cluster-secret")

    @property
    def internal_token_file(self) -> Path:
        """The token of the engines' internal endpoints."""
        return internal_token_file(self.scratch)


def shadow_folder(name: str) -> Path:
    """Return the folder of the CPU shadow of the CodaCluster ``name`` on this machine."""
    return SHARED_MEMORY_DIR / f"{SHADOW_FOLDER_PREFIX}{name}"


def remove_shadow(folder: Path) -> None:
    """Remove a CPU shadow, if it is this user's; nobody may be using it any more."""
    if folder.is_dir() and folder.stat().st_uid == os.getuid():
        shutil.rmtree(folder, ignore_errors=True)


def make_folders(name: str, spec: CodaClusterSpec) -> Folders:
    """Make a run's private folders, with new secrets and the specification's settings in them."""
    folders = Folders(
        shadow=shadow_folder(name),
        scratch=Path(tempfile.mkdtemp(prefix=_PRIVATE_PREFIX)),
        pages=Path(tempfile.mkdtemp(prefix=_PRIVATE_PREFIX, dir=SHARED_MEMORY_DIR)),
    )
    folders.temporary.mkdir()
    if spec.kv_shadow.size_bytes:
        # Not made anew, and not given away: an engine that finds a folder of somebody else's goes without.
        folders.shadow.mkdir(mode=0o700, exist_ok=True)
    folders.cluster_secret_file.parent.mkdir(mode=0o700)
    for file in (folders.cluster_secret_file, folders.internal_token_file):
        file.touch(mode=0o600)
        file.write_text(secrets.token_hex(32), encoding="ascii")
    folders.settings_file.write_text(spec.settings().model_dump_json(by_alias=True), encoding="utf-8")
    return folders


def engine_processes(
    spec: CodaClusterSpec,
    key: SpecKey,
    folders: Folders,
    ports: list[int],
    model_path: Path | None,
    profile_file: Path,
    cores: tuple[int, ...],
) -> list[ProcessSpec]:
    """Return the engines' processes, one for each port; each on cores, or GPUs, of its own while there are enough."""
    no_profile = folders.scratch / "no-profile.json"
    measured = spec.profiling.mode is ProfilingMode.REQUIRED
    processes = []
    for number, port in enumerate(ports):
        place = EnginePlace(
            name=f"engine-{number}",
            python=sys.executable,
            host=LOOPBACK,
            port=port,
            model_path=str(model_path) if model_path else None,
            settings_file=str(folders.settings_file),
            profile_file=str(profile_file if measured else no_profile),
            cluster_secret_file=str(folders.cluster_secret_file),
            internal_token_file=str(folders.internal_token_file),
            page_dir=str(folders.pages),
            shadow_dir=str(_shadow_of(number, spec, folders)),
            cores=_cores_of(number, spec.engine.device_count, cores) if spec.engine.device is Device.CPU else None,
        )
        process = engine_process(spec, key, place)
        if spec.engine.device is Device.CUDA:
            first = number * spec.engine.device_count
            gpus = ",".join(str(gpu) for gpu in range(first, first + spec.engine.device_count))
            process = ProcessSpec(
                process.name,
                process.argv,
                {**process.env, "CUDA_VISIBLE_DEVICES": gpus},
                process.port,
                process.ready_path,
            )
        processes.append(process)
    return processes


def router_process_here(folders: Folders, port: int, engine_ports: list[int]) -> ProcessSpec:
    """Return the router's process; it listens on the loopback address only, so it needs no keys."""
    return router_process(
        RouterPlace(
            name="router",
            python=sys.executable,
            host=LOOPBACK,
            port=port,
            settings_file=str(folders.settings_file),
            workers=tuple(f"http://{LOOPBACK}:{engine_port}" for engine_port in engine_ports),
            cluster_secret_file=str(folders.cluster_secret_file),
            internal_token_file=str(folders.internal_token_file),
        )
    )


def child_environment(surroundings: Mapping[str, str], temporary: Path, cache: Path) -> dict[str, str]:
    """Return the environment that every process of the run starts from.

    Args:
        surroundings: This process's own environment.
        temporary: The run's TMPDIR.
        cache: Coda's folder in the user's cache.
    """
    # What another engine's processes were told is not for these; ProcessSpec.env says all that they need.
    own = {name: value for name, value in surroundings.items() if not name.startswith("CODA_")}
    environment = kept_byte_code(own, cache)
    environment["TMPDIR"] = str(temporary)
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("VLLM_NO_USAGE_STATS", "1")
    environment.setdefault("VLLM_HOST_IP", LOOPBACK)  # its processes talk to each other on this machine only
    return environment


def kept_byte_code(surroundings: Mapping[str, str], cache: Path) -> dict[str, str]:
    """Return an environment in which byte code is kept: beside the modules where that is allowed, else in the cache.

    vLLM takes a minute longer to start when its modules must be compiled each time.
    """
    environment = dict(surroundings)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    if not os.access(Path(os.__file__).parent, os.W_OK) or not os.access(sys.prefix, os.W_OK):
        environment.setdefault("PYTHONPYCACHEPREFIX", str(cache / "pyc"))
    return environment


def _shadow_of(number: int, spec: CodaClusterSpec, folders: Folders) -> Path:
    """Return the folder of engine ``number``: the shared one, or one of its own that it finds again."""
    return folders.shadow / ("node" if spec.kv_shadow.scope is ShadowScope.NODE else f"engine-{number}")


def _cores_of(number: int, threads: int, cores: tuple[int, ...]) -> str:
    """Return the cores of engine ``number``: from the last ones down, shared only when there are too few."""
    wanted = [cores[-1 - (number * threads + offset) % len(cores)] for offset in range(min(threads, len(cores)))]
    return core_list(wanted)
