"""A real engine as a child process, stock or with Coda's plug-ins, otherwise with the same arguments."""

import asyncio
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from coda_bench.ports import free_ports
from coda_engine.contract.interface import KEYS_PATH, PROFILE_PATH
from coda_engine.contract.profile import (
    CurvePoint,
    FullKey,
    HeldOutPoint,
    PrefillProfile,
    Profile,
    Provenance,
)
from coda_operator.desired.processes import EnginePlace, ProcessSpec, engine_process
from coda_operator.spec import CodaClusterSpec

START_LIMIT_S = 300.0
STOP_LIMIT_S = 15.0


class EngineStartError(RuntimeError):
    """An engine did not become healthy; the message ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class EngineUnderTest:
    """A running engine.

    Attributes:
        system: ``stock`` or ``coda``.
        url: Base URL on loopback.
        model: Name to ask for.
        pid: Process id of the API server, leader of the engine's process group.
    """

    system: str
    url: str
    model: str
    pid: int


def bench_spec(model_path: Path, *, kv_cache: str, max_running: int) -> CodaClusterSpec:
    """Return the specification of the engine that every case runs: one core, 512-token steps.

    float32, because CPUs without instructions for bfloat16 take many times longer with it.
    """
    return CodaClusterSpec.parse(
        {
            "model": {
                "name": "bench",
                "source": {"hostPath": str(model_path)},
                "dtype": "float32",
                "maxContextTokens": 8192,
            },
            "engine": {"device": "cpu", "cpus": 1, "kvCacheSize": kv_cache, "maxRunning": max_running},
        }
    )


@asynccontextmanager
async def running_engine(spec: CodaClusterSpec, system: str, *, core: int) -> AsyncIterator[EngineUnderTest]:
    """Start an engine bound to ``core``, yield it once healthy, and end its whole process group after.

    Args:
        spec: What to serve.
        system: ``stock`` starts the same command line without Coda's plug-ins.
        core: CPU that the model's computation is bound to.

    Raises:
        EngineStartError: Not healthy within START_LIMIT_S.
    """
    folder = Path(tempfile.mkdtemp(prefix="coda-bench-"))
    try:
        (folder / "settings.json").write_text(spec.settings().model_dump_json(by_alias=True))
        process = _process(spec, system, folder, core)
        with (folder / "log").open("wb") as log:
            child = await asyncio.create_subprocess_exec(
                # A benchmark that is killed takes its engines along.
                "setpriv",
                "--pdeathsig",
                "TERM",
                *process.argv,
                stdout=log,
                stderr=log,
                env=_environment(process.env, folder),
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{process.port}"
            await _wait_healthy(url, child, folder / "log")
            yield EngineUnderTest(system, url, spec.model.name, child.pid)
        finally:
            await _end(child)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def accept_profile(engine: EngineUnderTest, ms_per_token: float = 1.0) -> None:
    """Give the engine a profile with its own key and a straight cost curve, so that admission decides.

    The curve is assumed, not measured: benchmarks of overhead need decisions, not true costs.
    """
    async with aiohttp.ClientSession(engine.url) as client:
        async with client.get(KEYS_PATH) as reply:
            key = FullKey.model_validate((await reply.json())["full_key"])
        points = [CurvePoint(x=tokens, ms=tokens * ms_per_token) for tokens in (128, 512, 2048)]
        profile = Profile(
            full_key=key,
            prefill=PrefillProfile(
                points=points,
                held_out=[HeldOutPoint(x=256, measured_ms=256 * ms_per_token, predicted_ms=256 * ms_per_token)],
                error_bound=0.25,
            ),
            provenance=Provenance(measured_at="", duration_s=0, coda_version="", quick=True),
        )
        async with client.put(PROFILE_PATH, data=profile.to_json()) as reply:
            if reply.status != 200:
                raise EngineStartError(f"the engine refused the benchmark's profile: {await reply.text()}")


def _process(spec: CodaClusterSpec, system: str, folder: Path, core: int) -> ProcessSpec:
    place = EnginePlace(
        name=system,
        python=sys.executable,
        host="127.0.0.1",
        port=free_ports(1)[0],
        model_path=spec.model.source.host_path,
        settings_file=str(folder / "settings.json"),
        profile_file=str(folder / "profile.json"),
        cores=str(core),
    )
    process = engine_process(spec, spec.spec_key("bench"), place)
    if system == "stock":
        # An empty value loads no plug-in at all; leaving the variable out would load every installed one.
        return dataclasses.replace(process, env={**process.env, "VLLM_PLUGINS": ""})
    return process


def _environment(extra: Mapping[str, str], folder: Path) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**inherited, **extra, "TMPDIR": str(folder)}


async def _wait_healthy(url: str, child: asyncio.subprocess.Process, log: Path) -> None:
    deadline_s = asyncio.get_running_loop().time() + START_LIMIT_S
    async with aiohttp.ClientSession() as client:
        while child.returncode is None and asyncio.get_running_loop().time() < deadline_s:
            try:
                async with client.get(f"{url}/health") as reply:
                    if reply.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.5)
    raise EngineStartError(f"the engine did not become healthy:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])


async def _end(child: asyncio.subprocess.Process) -> None:
    """Let the API server end its own children and shared memory; then end whatever is left of the group."""
    with suppress(ProcessLookupError, TimeoutError):
        child.terminate()
        await asyncio.wait_for(child.wait(), STOP_LIMIT_S)
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    await child.wait()
