"""Case ``fleet2``: two engines behind Coda's router, each placement with admission on and off."""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp

from coda_bench.engine.cases import FleetCase
from coda_bench.engine.replay import Target
from coda_bench.engine.server import START_LIMIT_S, EngineStartError, EngineUnderTest, running_engine
from coda_bench.engine.session_case import arrival_rate
from coda_bench.engine.session_rows import fleet_bases, session_rows
from coda_bench.engine.session_runs import SessionRun, measure_run
from coda_bench.engine.systems import system
from coda_bench.engine.workbench import Workbench
from coda_bench.ports import free_ports
from coda_bench.report import Row
from coda_engine.contract.profile import Profile
from coda_engine.contract.settings import PlacementPolicyName, Settings
from coda_operator.desired.processes import RouterPlace, router_process

_ROUTER_START_LIMIT_S = 60.0
_STOP_LIMIT_S = 10.0
_SPARE_S = 120.0


def known_placements(case: FleetCase) -> tuple[list[str], list[str]]:
    """Return the case's placements that this version's router has, and those that it does not have."""
    known = {name.value for name in PlacementPolicyName}
    return [name for name in case.placements if name in known], [name for name in case.placements if name not in known]


def expected_s(case: FleetCase) -> float:
    """Return about how long the case takes, seconds."""
    one_s = case.run.expected_s(case.run.seeds[0]) + 10
    return len(known_placements(case)[0]) * len(case.admissions) * len(case.run.seeds) * one_s


async def run_fleet_case(bench: Workbench, case: FleetCase) -> list[Row]:
    """Return the rows of the case; systems are called ``placement/admission``.

    Raises:
        EngineStartError: An engine or the router did not start.
        ReplayError: A request failed.
        TimeoutError: A run took far longer than it can.
    """
    placements, missing = known_placements(case)
    for name in missing:
        bench.progress.tell(f"{case.name}: this version's router has no placement {name}; left out")
    profile = await bench.profile()
    per_s, rate_rows = await arrival_rate(bench, case.run, engines=len(bench.engine_cores(2)))
    runs: dict[str, list[SessionRun]] = {f"{p}/{a}": [] for p in placements for a in case.admissions}
    for repetition, seed in enumerate(case.run.seeds):
        names = list(runs)
        for name in names[repetition % len(names) :] + names[: repetition % len(names)]:
            runs[name].append(await _run_once(bench, case, name, seed, per_s, profile))
    return [*rate_rows, *session_rows(case.run, runs, fleet_bases)]


async def _run_once(
    bench: Workbench, case: FleetCase, name: str, seed: int, per_s: float, profile: Profile | None
) -> SessionRun:
    placement, _, admission = name.partition("/")

    async def measure() -> dict[str, Any]:
        run = case.run
        chosen = system(admission)
        limit_s = 2 * START_LIMIT_S + run.warm_s + run.window_s + run.drain_limit_s + _SPARE_S
        async with asyncio.timeout(limit_s), AsyncExitStack() as stack:
            setups = [bench.setup(chosen, core, run.kv_blocks, {"policy": placement}) for core in bench.engine_cores(2)]
            engines = [await stack.enter_async_context(running_engine(setup)) for setup in setups]
            for engine in engines:
                await bench.deliver(profile, engine, chosen)
            url = await stack.enter_async_context(_running_router(setups[0].spec.settings(), engines))
            target = Target(url, engines[0].model)
            return (await measure_run(target, engines, run, seed, per_s, _at_once)).to_document()

    what = {
        "measurement": "fleet",
        "placement": placement,
        "system": system(admission).describe(),
        "cores": bench.engine_cores(2),
        "seed": seed,
        "sessions_per_s": per_s,
        "kv_blocks": case.run.kv_blocks,
        "warm_s": case.run.warm_s,
        "window_s": case.run.window_s,
    }
    text = f"{case.name}: {name} (arrivals {seed})"
    return SessionRun.from_document(await bench.once(what, text, case.run.expected_s(seed) + 10, measure))


async def _at_once() -> None:
    """Nothing is measured beside a fleet."""


@asynccontextmanager
async def _running_router(settings: Settings, engines: Sequence[EngineUnderTest]) -> AsyncIterator[str]:
    """Start a router in front of ``engines``, yield its URL once it can place requests, and end it after."""
    folder = Path(tempfile.mkdtemp(prefix="coda-bench-router-"))
    try:
        (folder / "settings.json").write_text(settings.model_dump_json(by_alias=True))
        place = RouterPlace(
            name="router",
            python=sys.executable,
            host="127.0.0.1",
            port=free_ports(1)[0],
            settings_file=str(folder / "settings.json"),
            workers=tuple(engine.url for engine in engines),
        )
        process = router_process(place)
        with (folder / "log").open("wb") as log:
            child = await asyncio.create_subprocess_exec(
                *("setpriv", "--pdeathsig", "TERM"), *process.argv, stdout=log, stderr=log,
                env={**os.environ, **process.env}, start_new_session=True,
            )  # fmt: skip
        try:
            url = f"http://127.0.0.1:{process.port}"
            await _wait_ready(url + process.ready_path, child, folder / "log")
            yield url
        finally:
            with suppress(ProcessLookupError, TimeoutError):
                child.terminate()
                await asyncio.wait_for(child.wait(), _STOP_LIMIT_S)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _wait_ready(url: str, child: asyncio.subprocess.Process, log: Path) -> None:
    deadline_s = time.monotonic() + _ROUTER_START_LIMIT_S
    async with aiohttp.ClientSession() as client:
        while child.returncode is None and time.monotonic() < deadline_s:
            with suppress(aiohttp.ClientError):
                async with client.get(url) as reply:
                    if reply.status == 200:
                        return
            await asyncio.sleep(0.2)
    raise EngineStartError(f"the router did not become ready:\n{_tail(log)}")


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-1_500:]
