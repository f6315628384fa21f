"""``coda up``, ``coda down`` and ``coda status``."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from coda_cli.errors import CliError, PreflightError
from coda_cli.model.catalog import BUILTIN_MODELS, cache_dir, default_model_dir
from coda_cli.model.folder import ensure_model, folder_problem
from coda_cli.up.byte_code import compiling_vllm
from coda_cli.up.cluster_file import ClusterFile, read_cluster_file
from coda_cli.up.layout import kept_byte_code, shadow_folder
from coda_cli.up.leftovers import clean_up_after_killed_runs
from coda_cli.up.machine import look_at_machine, model_folder
from coda_cli.up.preflight import check, context_problems
from coda_cli.up.process_table import executable
from coda_cli.up.report import Report, timed_report
from coda_cli.up.run_record import RunRecord, StateDir, boot_id, state_root
from coda_cli.up.stack import Place, Stack

SERVING = " serves at "
"""Part of the line that says that requests are served."""

_LOCK_WAIT_S = 15.0
_DOWN_WAIT_S = 15.0
_FILE = click.Path(dir_okay=False, path_type=Path)


@click.command()
@click.option("-f", "--file", "file", required=True, type=_FILE, help="YAML file with one CodaCluster.")
@click.option("--port", type=click.IntRange(1, 65_535), help="Port of the router instead of spec.router.port.")
@click.option("--profile", "profile_file", type=_FILE, help="Profile to use instead of a stored or measured one.")
@click.option("--stop-with-stdin", is_flag=True, hidden=True, help="End when standard input does.")
def up(file: Path, port: int | None, profile_file: Path | None, stop_with_stdin: bool) -> None:
    """Run a CodaCluster on this machine until Ctrl-C.

    Engines and router are processes of this machine on its loopback address; what dies is started again.
    """
    _end_on_sigterm()
    cluster = read_cluster_file(file)
    report = timed_report()
    root = state_root(os.environ)
    for name in clean_up_after_killed_runs(root):
        report(f"cleaned up what a killed `coda up` of {name} had left")
    with _sole_run(StateDir(root / cluster.name)) as state:
        place = _checked_place(cluster, port, profile_file, state, report)
        stack = Stack(cluster, place, report)
        asyncio.run(_until_stopped(stack, cluster, place, report, stop_with_stdin))
    report("stopped; nothing is left running")


@click.command()
@click.argument("name", required=False)
def down(name: str | None) -> None:
    """End the CodaCluster NAME that `coda up` runs on this machine (the only one, when no name is given)."""
    record = _running(name)
    os.kill(record.pid, signal.SIGTERM)
    state = StateDir(state_root(os.environ) / record.name)
    deadline_s = time.monotonic() + _DOWN_WAIT_S
    while state.read() is not None:
        if time.monotonic() > deadline_s:
            raise CliError(f"{record.name} (pid {record.pid}) is still ending after {_DOWN_WAIT_S:.0f} s")
        time.sleep(0.1)
    click.echo(f"{record.name} is stopped")


@click.command()
def status() -> None:
    """List the CodaClusters that `coda up` runs on this machine."""
    records = _all_running()
    if not records:
        click.echo("nothing runs here; start something with coda up -f FILE")
    for record in records:
        click.echo(f"{record.name}  {record.url}  pid {record.pid}  {len(record.groups)} processes")


def _checked_place(
    cluster: ClusterFile, port: int | None, profile_file: Path | None, state: StateDir, report: Report
) -> Place:
    """Return where ``cluster`` runs, with its model in place, after every check has passed."""
    spec = cluster.spec
    router_port = port or spec.router.port
    machine = look_at_machine(spec, router_port, shadow_folder(cluster.name))
    findings = check(spec, machine, router_port)
    if findings.problems:
        raise PreflightError("\n".join(f"{cluster.path}: {problem}" for problem in findings.problems))
    for note in findings.notes:
        report(f"note: {note}")
    model_path = Path(spec.model.source.host_path) if spec.model.source.host_path else None
    if spec.model.source.builtin is not None:
        model_path = _builtin_model(spec.model.source.builtin, report)
        made = model_folder(model_path)
        problems = context_problems(spec, made.config) if made is not None and made.config is not None else []
        if problems:
            raise PreflightError("\n".join(f"{cluster.path}: {problem}" for problem in problems))
    return Place(machine, router_port, model_path, state, cache_dir(os.environ), os.environ, profile_file)


def _builtin_model(name: str, report: Report) -> Path:
    """Return the folder of a built-in model; while it is being made, vLLM's modules are compiled beside it."""
    model, model_dir = BUILTIN_MODELS[name], default_model_dir(os.environ)
    folder = model_dir / model.name
    if folder_problem(folder, model, verify=False) is None:
        return folder
    with compiling_vllm(kept_byte_code(os.environ, cache_dir(os.environ))):
        return ensure_model(model, model_dir, report)


async def _until_stopped(
    stack: Stack, cluster: ClusterFile, place: Place, report: Report, stop_with_stdin: bool
) -> None:
    stop, ready = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stop.set)
    if stop_with_stdin:
        loop.add_reader(sys.stdin.fileno(), lambda: stop.set() if not os.read(sys.stdin.fileno(), 4096) else None)
    announcing = asyncio.create_task(_announce(ready, cluster, place, report))
    try:
        await stack.serve(stop, ready)
    finally:
        announcing.cancel()
        if stop_with_stdin:
            loop.remove_reader(sys.stdin.fileno())


async def _announce(ready: asyncio.Event, cluster: ClusterFile, place: Place, report: Report) -> None:
    await ready.wait()
    report(f"{cluster.name}{SERVING}{place.url}/v1 (model {cluster.spec.model.name}); end it with Ctrl-C or:")
    report(f"  coda down {cluster.name}")


@contextmanager
def _sole_run(state: StateDir) -> Iterator[StateDir]:
    """Hold the state folder; a guardian that is just cleaning up is waited for, another `coda up` is not."""
    deadline_s = time.monotonic() + _LOCK_WAIT_S
    while True:
        with state.lock(wait=False) as locked:
            if locked:
                yield state
                return
        record = state.read()
        if record is not None and _alive(record):
            raise PreflightError(
                f"metadata.name: {record.name} runs here already (pid {record.pid}, {record.url}); end it with "
                f"coda down {record.name}, or give this one another name"
            )
        if time.monotonic() > deadline_s:
            raise PreflightError(f"{state.path}: is locked by another process since {_LOCK_WAIT_S:.0f} s; try again")
        time.sleep(0.2)


def _running(name: str | None) -> RunRecord:
    running = [record for record in _all_running() if name in (None, record.name)]
    if len(running) == 1:
        return running[0]
    if not running:
        raise CliError(f"{name or 'nothing'} does not run here" if name else "nothing runs here")
    raise CliError(f"name one of: {', '.join(record.name for record in running)}")


def _all_running() -> list[RunRecord]:
    root = state_root(os.environ)
    states = [StateDir(path) for path in sorted(root.iterdir())] if root.is_dir() else []
    records = [record for state in states if (record := state.read()) is not None and state.is_locked()]
    return [record for record in records if _alive(record)]


def _alive(record: RunRecord) -> bool:
    """Return whether the run's ``coda up`` lives; another boot's, or another program's, process id is not it."""
    return record.boot_id == boot_id() and executable(record.pid) == record.python


def _end_on_sigterm() -> None:
    """Treat SIGTERM like Ctrl-C until the stack has handlers of its own, so that no child survives it."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
