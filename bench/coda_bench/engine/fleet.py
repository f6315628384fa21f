"""Case ``fleet2``: two engines behind Coda's router, each placement with admission on and off."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from coda_bench.engine.cases import FleetCase
from coda_bench.engine.replay import Target
from coda_bench.engine.router_process import running_router
from coda_bench.engine.server import START_LIMIT_S, running_engine
from coda_bench.engine.session_case import arrival_rate
from coda_bench.engine.session_rows import fleet_bases, session_rows
from coda_bench.engine.session_runs import SessionRun, measure_run
from coda_bench.engine.systems import system
from coda_bench.engine.workbench import Workbench
from coda_bench.report import Row
from coda_engine.contract.profile import Profile
from coda_engine.contract.settings import PlacementPolicyName

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
    per_s, rate_rows = await arrival_rate(bench, case.run, engines=len(set(bench.engine_cores(2))))
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
            url = await stack.enter_async_context(
                running_router(setups[0].spec.settings(), [engine.url for engine in engines])
            )
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
        "shadow_times_hbm": bench.shadow_times_hbm,
        "warm_s": case.run.warm_s,
        "window_s": case.run.window_s,
    }
    text = f"{case.name}: {name} (arrivals {seed})"
    return SessionRun.from_document(await bench.once(what, text, case.run.expected_s(seed) + 10, measure))


async def _at_once() -> None:
    """Nothing is measured beside a fleet."""
