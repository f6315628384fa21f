"""The cases that play sessions against one engine each: m3, m3-tight, m3-2.7x, m1, ablation and sweep."""

import asyncio
from collections.abc import Sequence
from typing import Any

from coda_bench.engine.cases import MAX_CONTEXT_TOKENS, MAX_RUNNING, SessionsCase
from coda_bench.engine.lanes import Job, jobs, side_by_side
from coda_bench.engine.replay import Target
from coda_bench.engine.server import START_LIMIT_S, running_engine
from coda_bench.engine.session_rows import session_rows
from coda_bench.engine.session_runs import SessionRun, measure_run, uncompressed_sessions_per_s
from coda_bench.engine.systems import System
from coda_bench.engine.workbench import Workbench
from coda_bench.report import Row
from coda_engine.contract.profile import Profile

_SPARE_S = 120.0


def expected_s(case: SessionsCase, systems: Sequence[System], cores: Sequence[int]) -> float:
    """Return about how long the case takes, seconds."""
    groups = side_by_side(jobs(systems, case.seeds, cores), cores)
    return sum(_group_expected_s(case, group) for group in groups)


async def run_sessions_case(bench: Workbench, case: SessionsCase, systems: Sequence[System]) -> list[Row]:
    """Run every system with every arrival seed, and return the figures.

    Raises:
        EngineStartError: An engine did not start.
        ReplayError: A request failed.
        TimeoutError: A run took far longer than it can.
    """
    profile = await bench.profile()
    per_s, rate_rows = await arrival_rate(bench, case)
    planned = jobs(systems, case.seeds, bench.cores)
    runs: dict[tuple[str, int], SessionRun] = {}
    waiting = []
    for job in planned:
        kept = bench.finished.get(_describe(bench, case, job, per_s))
        if kept is None:
            waiting.append(job)
        else:
            runs[job.system.name, job.seed] = SessionRun.from_document(kept)
    _plan_less(bench, case, planned, waiting)
    for group in side_by_side(waiting, bench.cores):
        text = " beside ".join(f"{job.system.name} on core {job.core} (arrivals {job.seed})" for job in group)
        bench.progress.begin(f"{case.name}: {text}", _group_expected_s(case, group))
        for job, run in zip(group, await _run_group(bench, case, group, per_s, profile), strict=True):
            runs[job.system.name, job.seed] = run
            bench.finished.put(_describe(bench, case, job, per_s), run.to_document())
    by_system = {chosen.name: [runs[chosen.name, seed] for seed in case.seeds] for chosen in systems}
    return [*rate_rows, *session_rows(case, by_system)]


async def arrival_rate(bench: Workbench, case: SessionsCase, engines: int = 1) -> tuple[float, list[Row]]:
    """Return the sessions/s of the case with the rows that say so."""
    if case.load is None:
        per_s = uncompressed_sessions_per_s(case.requests_per_s)
        return per_s, [Row("engine", case.name, "arrivals", "all", per_s, "sessions/s, uncompressed")]
    capacity, how = await bench.fifo_capacity()
    per_s = round(case.load * capacity * engines, 4)
    return per_s, [
        Row("engine", case.name, "fifo_capacity", "fifo", capacity, f"sessions/s an engine, {how}"),
        Row("engine", case.name, "arrivals", "all", per_s, f"sessions/s, {case.load:g} x capacity"),
    ]


async def _run_group(
    bench: Workbench, case: SessionsCase, group: Sequence[Job], per_s: float, profile: Profile | None
) -> list[SessionRun]:
    """Run the group's jobs at the same time: nobody's window begins before every engine is ready."""
    barrier = asyncio.Barrier(len(group))
    limit_s = START_LIMIT_S + case.warm_s + case.window_s + case.drain_limit_s + _SPARE_S
    try:
        async with asyncio.timeout(limit_s), asyncio.TaskGroup() as together:
            tasks = [together.create_task(_run_job(bench, case, job, per_s, profile, barrier)) for job in group]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None  # the others were ended because of it
    return [task.result() for task in tasks]


async def _run_job(
    bench: Workbench, case: SessionsCase, job: Job, per_s: float, profile: Profile | None, barrier: asyncio.Barrier
) -> SessionRun:
    async with running_engine(bench.setup(job.system, job.core, case.kv_blocks)) as engine:
        await bench.deliver(profile, engine, job.system)
        target = Target(engine.url, engine.model, tells_turns=job.system.plugins)
        return await measure_run(target, [engine], case, job.seed, per_s, barrier.wait)


def _describe(bench: Workbench, case: SessionsCase, job: Job, per_s: float) -> dict[str, Any]:
    """Return everything that a run depends on; the case's name is not among it, so cases share their runs."""
    return {
        "measurement": "sessions",
        "system": job.system.describe(),
        "seed": job.seed,
        "core": job.core,
        "sessions_per_s": per_s,
        "kv_blocks": case.kv_blocks,
        "shadow_times_hbm": bench.shadow_times_hbm,
        "max_running": MAX_RUNNING,
        "max_context_tokens": MAX_CONTEXT_TOKENS,
        "warm_s": case.warm_s,
        "window_s": case.window_s,
        "drained_arrivals_s": case.drained_arrivals_s if case.drains(job.seed) else 0,
    }


def _plan_less(bench: Workbench, case: SessionsCase, planned: Sequence[Job], waiting: Sequence[Job]) -> None:
    if len(waiting) < len(planned):
        left, all_ = (
            sum(_group_expected_s(case, group) for group in side_by_side(some, bench.cores))
            for some in (waiting, planned)
        )
        bench.progress.skip(f"{case.name}: {len(planned) - len(waiting)} of {len(planned)} runs", all_ - left)


def _group_expected_s(case: SessionsCase, group: Sequence[Job]) -> float:
    return max((case.expected_s(job.seed) for job in group), default=0.0)
