"""A real engine as a child process, stock or with Coda's plug-ins, otherwise with the same arguments."""

import asyncio
import dataclasses
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coda_bench.engine.child import end_group, wait_until_serving
from coda_bench.ports import free_ports
from coda_operator.desired.processes import CPU_BLOCK_TOKENS, EnginePlace, ProcessSpec, engine_process
from coda_operator.spec import CodaClusterSpec

START_LIMIT_S = 300.0
STOP_LIMIT_S = 15.0

_FLOAT32_BYTES = 4
_FIRST_ERRORS = 25
_LAST_LINES = 15
_SHADOW_PREFIX = "coda-bench-shadow-"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - shared memory, not a temporary file


class EngineStartError(RuntimeError):
    """An engine did not become healthy; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class EngineSetup:
    """How an engine is started.

    Attributes:
        name: ``stock``, ``coda`` or whatever the figures call it.
        spec: What to serve, with which settings.
        core: CPU that the model's computation is bound to.
        plugins: Whether Coda's plug-ins are loaded; False = the same command line as stock vLLM.
        whole_process: Bind API server and scheduler to ``core`` too, so that a neighbour on another core has it alone.
        shadow_folder: Where a CPU shadow is, if ``spec`` asks for one; None = a folder of its own, removed afterwards.
    """

    name: str
    spec: CodaClusterSpec
    core: int
    plugins: bool = True
    whole_process: bool = False
    shadow_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """A running engine.

    Attributes:
        system: As its setup names it.
        url: Base URL on loopback.
        model: Name to ask for.
        pid: Process id of the API server, leader of the engine's process group.
    """

    system: str
    url: str
    model: str
    pid: int

    def kill(self) -> None:
        """Kill every process of the engine at once, as a node's crash would."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


def bench_spec(
    model_path: Path,
    *,
    kv_cache: str,
    max_running: int,
    max_context_tokens: int = 8_192,
    shadow_bytes: int = 0,
    admission: Mapping[str, Any] | None = None,
    placement: Mapping[str, Any] | None = None,
) -> CodaClusterSpec:
    """Return the specification of the engine that every case runs: one core, 512-token steps.

    float32, because CPUs without instructions for bfloat16 take many times longer with it.

    Raises:
        DocumentError: ``admission`` or ``placement`` is not what this version's settings allow.
    """
    return CodaClusterSpec.parse(
        {
            "model": {
                "name": "bench",
                "source": {"hostPath": str(model_path)},
                "dtype": "float32",
                "maxContextTokens": max_context_tokens,
            },
            "engine": {"device": "cpu", "cpus": 1, "kvCacheSize": kv_cache, "maxRunning": max_running},
            "kvShadow": {"size": str(shadow_bytes)},
            "admission": dict(admission or {}),
            "router": {"placement": dict(placement or {})},
        }
    )


def kv_block_bytes(model_path: Path) -> int:
    """Return the bytes of one KV block of the model in ``model_path``, in float32.

    Raises:
        EngineStartError: The folder has no readable ``config.json`` of a model with plain attention.
    """
    try:
        config = json.loads((model_path / "config.json").read_text())
        heads = int(config["num_attention_heads"])
        head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        per_token = 2 * int(config["num_hidden_layers"]) * kv_heads * head_size * _FLOAT32_BYTES
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EngineStartError(f"{model_path}/config.json does not tell the size of the KV cache: {error!r}") from error
    return per_token * CPU_BLOCK_TOKENS


@asynccontextmanager
async def running_engine(setup: EngineSetup) -> AsyncIterator[EngineUnderTest]:
    """Start an engine, yield it once healthy, and end its whole process group after.

    An exception that passes through is given the last lines of the engine's log as a note.

    Raises:
        EngineStartError: Not healthy within START_LIMIT_S.
    """
    folder = Path(tempfile.mkdtemp(prefix="coda-bench-"))
    with _shadow_folder(setup) as shadow_folder:
        try:
            (folder / "settings.json").write_text(setup.spec.settings().model_dump_json(by_alias=True))
            process = _process(setup, folder, shadow_folder)
            with (folder / "log").open("wb") as log:
                child = await asyncio.create_subprocess_exec(
                    # A benchmark that is killed takes its engines along.
                    *("setpriv", "--pdeathsig", "TERM"),
                    *(("taskset", "-c", str(setup.core)) if setup.whole_process else ()),
                    *process.argv,
                    stdout=log,
                    stderr=log,
                    env=_environment(process.env, folder),
                    start_new_session=True,
                )
            try:
                url = f"http://127.0.0.1:{process.port}"
                if not await wait_until_serving(f"{url}/health", child, START_LIMIT_S):
                    raise EngineStartError(f"the engine did not become healthy:\n{_tail(folder / 'log')}")
                yield EngineUnderTest(setup.name, url, setup.spec.model.name, child.pid)
            except EngineStartError:
                raise
            except Exception as error:
                error.add_note(f"log of the engine {setup.name} on core {setup.core}:\n{_tail(folder / 'log')}")
                raise
            finally:
                await end_group(child, STOP_LIMIT_S)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _shadow_folder(setup: EngineSetup) -> Iterator[Path | None]:
    """Give an engine with a shadow a folder in shared memory that no other one has, and remove it afterwards."""
    if setup.spec.kv_shadow.size_bytes == 0 or setup.shadow_folder is not None:
        yield setup.shadow_folder
        return
    folder = new_shadow_folder()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def new_shadow_folder() -> Path:
    """Return a new folder in shared memory that only this user can open; whoever asked removes it."""
    return Path(tempfile.mkdtemp(prefix=f"{_SHADOW_PREFIX}{os.getpid()}-", dir=_SHARED_MEMORY))


def remove_abandoned_shadows(shared_memory: Path = _SHARED_MEMORY) -> None:
    """Remove what killed benchmarks have left in shared memory: gigabytes that nobody else would ever give back."""
    for folder in shared_memory.glob(f"{_SHADOW_PREFIX}*"):
        owner = folder.name.removeprefix(_SHADOW_PREFIX).partition("-")[0]
        if owner.isdigit() and not Path(f"/proc/{owner}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def _process(setup: EngineSetup, folder: Path, shadow_folder: Path | None) -> ProcessSpec:
    spec = setup.spec
    place = EnginePlace(
        name=setup.name,
        python=sys.executable,
        host="127.0.0.1",
        port=free_ports(1)[0],
        model_path=spec.model.source.host_path,
        settings_file=str(folder / "settings.json"),
        profile_file=str(folder / "profile.json"),
        shadow_dir=str(shadow_folder) if shadow_folder is not None else None,
        cores=str(setup.core),
    )
    process = engine_process(spec, spec.spec_key("bench"), place)
    if setup.plugins:
        return process
    # An empty value loads no plug-in at all; leaving the variable out would load every installed one.
    return dataclasses.replace(process, env={**process.env, "VLLM_PLUGINS": ""})


def _environment(extra: Mapping[str, str], folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **extra, "TMPDIR": str(folder)}


def _tail(log: Path) -> str:
    """Return the log's first errors, which vLLM's later ones only repeat in other words, and its last lines."""
    lines = log.read_text(errors="replace").splitlines()
    errors = [line for line in lines[:-_LAST_LINES] if " ERROR " in line or "] coda" in line]
    return "\n".join([*errors[:_FIRST_ERRORS], *lines[-_LAST_LINES:]])
