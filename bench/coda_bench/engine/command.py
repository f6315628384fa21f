"""``coda bench engine``."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import click

from coda_bench.engine import fleet, idle, paper, restart, restore, selection, session_case
from coda_bench.engine.cases import FULL, FleetCase, SessionsCase, quick
from coda_bench.engine.finished import Finished, surroundings
from coda_bench.engine.progress import Progress
from coda_bench.engine.replay import ReplayError
from coda_bench.engine.restore import NotRestoredError
from coda_bench.engine.server import EngineStartError, remove_abandoned_shadows
from coda_bench.engine.shallow import ShallowModelError, shallow_model
from coda_bench.engine.systems import UnknownSystemError, systems
from coda_bench.engine.workbench import Workbench
from coda_bench.report import Row, machine_description, show, write_jsonl
from coda_engine.contract.errors import DocumentError, ProfileRefusedError
from coda_engine.profiling import ProfilingError

DEFAULT_CASES = ("m3", "idle", "restore")
BUILTIN_MODEL = "smollm2-135m-instruct"

_ENGINES = 2
_EXPECTED_ERRORS = (
    EngineStartError,
    ReplayError,
    NotRestoredError,
    ProfilingError,
    ProfileRefusedError,
    DocumentError,
    TimeoutError,
    aiohttp.ClientError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class _Case:
    """A case that can be asked for: how long it takes, and how it is run."""

    name: str
    expected_s: float
    run: Callable[[Workbench], Awaitable[list[Row]]]
    prepared: bool = False


@click.command()
@click.option("--case", "cases", default=",".join(DEFAULT_CASES), show_default=True,
              help="Cases, separated by commas.")  # fmt: skip
@click.option("--quick/--full", "is_quick", default=False, show_default=True,
              help="The same work cut to minutes (its figures mean nothing), or about an hour and a half.")  # fmt: skip
@click.option("--systems", "system_names", default=None,
              help="Systems of the cases that play sessions, for example coda,fifo or coda+tauMs=20000.")  # fmt: skip
@click.option("--capacity", type=click.FloatRange(0.001, 1_000),
              help="Sessions/s that FIFO serves on one core; default: measured first.")  # fmt: skip
@click.option("--cores", help="CPUs for engines, for example 0,1; default: the first two that this process may use.")
@click.option("--model", "model_path", type=click.Path(path_type=Path, exists=True, file_okay=False), default=None,
              help="Folder of the model; default: the built-in one, made when absent.")  # fmt: skip
@click.option("--layers", type=click.IntRange(1, 1_000), default=None,
              help="Use only the model's first layers: orders are compared, not texts, and on a slow machine prefill "
              "then takes what it takes elsewhere.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=None,
              help="JSON lines go here; an interrupted run goes on from the folder FILE.state.")  # fmt: skip
@click.option("--fresh", is_flag=True, help="Measure everything again, also what an interrupted run had finished.")
def engine(
    cases: str,
    is_quick: bool,
    system_names: str | None,
    capacity: float | None,
    cores: str | None,
    model_path: Path | None,
    layers: int | None,
    out: Path | None,
    fresh: bool,
) -> None:
    """Measure a real engine: Coda's decisions against its rivals and stock vLLM, and what they cost."""
    chosen = _cases(cases, is_quick, system_names, _cores(cores))
    model = model_path or _builtin_model()
    if layers is not None:
        try:
            model = shallow_model(model, layers)
        except ShallowModelError as error:
            raise click.UsageError(str(error)) from error
    state = out.with_name(out.name + ".state") if out is not None else None
    finished = Finished(state, surroundings(model))
    if fresh:
        finished.forget()
    remove_abandoned_shadows()
    progress = Progress(lambda line: click.echo(f"── {line}", err=True))
    bench = Workbench(model, _cores(cores), finished, progress, capacity, is_quick)
    try:
        rows = asyncio.run(_run(bench, chosen))
    except _EXPECTED_ERRORS as error:
        click.echo(f"coda bench engine: {error or type(error).__name__}", err=True)
        for note in getattr(error, "__notes__", ()):
            click.echo(note, err=True)
        _say_what_is_kept(state)
        sys.exit(1)
    except (asyncio.CancelledError, KeyboardInterrupt):
        click.echo("coda bench engine: interrupted", err=True)
        _say_what_is_kept(state)
        sys.exit(130)
    if out is not None:
        write_jsonl(rows, out)
    show(rows, sys.stdout)
    beside = paper.beside(rows)
    if beside:
        click.echo("\nBeside the paper's own figures (its hardware, model and SLO are others):")
        click.echo("\n".join(f"  {line}" for line in beside))


async def _run(bench: Workbench, chosen: Sequence[_Case]) -> list[Row]:
    """Run the cases; SIGTERM ends them like Ctrl-C, so that engines and shared memory go with the benchmark."""
    task = asyncio.current_task()
    if task is not None:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    bench.progress.plan(sum(case.expected_s for case in chosen))
    if any(case.prepared for case in chosen):
        bench.progress.plan(bench.prepare_expected_s())
    rows: list[Row] = []
    for case in chosen:
        rows += await case.run(bench)
    bench.progress.end()
    return [replace(row, model=bench.model_path.name, machine=machine_description()) for row in rows]


def _say_what_is_kept(state: Path | None) -> None:
    if state is not None and state.is_dir():
        click.echo("What was finished is kept: the same command goes on from there.", err=True)


def _cases(names: str, is_quick: bool, system_names: str | None, cores: Sequence[int]) -> list[_Case]:
    known = {case.name: case for case in _all_cases(is_quick, system_names, cores)}
    wanted = list(dict.fromkeys(name.strip() for name in names.split(",") if name.strip()))
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise click.BadParameter(f"no case {', '.join(unknown)}; there are: {', '.join(known)}", param_hint="--case")
    return [known[name] for name in wanted]


def _all_cases(is_quick: bool, system_names: str | None, cores: Sequence[int]) -> list[_Case]:
    fleet_case = FleetCase()
    if is_quick:
        fleet_case = replace(fleet_case, admissions=("coda",), placements=("coda", "smetric"),
                             run=quick(fleet_case.run))  # fmt: skip
    restore_size, restart_size, idle_size, selection_size = (
        (size.QUICK if is_quick else size.FULL) for size in (restore, restart, idle, selection)
    )
    return [
        *(_sessions_case(quick(case) if is_quick else case, system_names, cores) for case in FULL),
        _Case("fleet2", fleet.expected_s(fleet_case), lambda bench: fleet.run_fleet_case(bench, fleet_case), True),
        _Case("restore", restore_size.expected_s(), lambda bench: restore.run_restore_case(bench, restore_size)),
        _Case("warm-restart", restart_size.expected_s(), lambda bench: restart.run_restart_case(bench, restart_size)),
        _Case("idle", idle_size.expected_s(), lambda bench: idle.run_idle_case(bench, idle_size)),
        _Case(
            "selection", selection_size.expected_s(), lambda bench: selection.run_selection_case(bench, selection_size)
        ),
    ]


def _sessions_case(case: SessionsCase, system_names: str | None, cores: Sequence[int]) -> _Case:
    try:
        chosen = systems(system_names if system_names is not None else ",".join(case.systems))
    except UnknownSystemError as error:
        raise click.BadParameter(str(error), param_hint="--systems") from error
    expected_s = session_case.expected_s(case, chosen, cores)
    return _Case(case.name, expected_s, lambda bench: session_case.run_sessions_case(bench, case, chosen), True)


def _cores(text: str | None) -> tuple[int, ...]:
    usable = sorted(os.sched_getaffinity(0))
    if text is None:
        return tuple(usable[:_ENGINES])
    try:
        cores = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a list of CPU numbers like 0,1", param_hint="--cores") from None
    missing = set(cores) - set(range(os.cpu_count() or 1))
    if missing:
        raise click.BadParameter(f"this machine has no CPU {min(missing)}", param_hint="--cores")
    return cores


def _builtin_model() -> Path:
    """Return the built-in model's folder, made by the command line (a layer above this one) when absent."""
    command = [sys.executable, "-m", "coda_cli", "model", BUILTIN_MODEL]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode != 0:
        raise click.ClickException(f"`coda model {BUILTIN_MODEL}` failed; give a model's folder with --model")
    return Path(made.stdout.strip())
