"""``coda bench router``."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import click

from coda_bench.report import Row, machine_description, show, write_jsonl
from coda_bench.router.cases import FULL, QUICK, Case
from coda_bench.router.figures import rows_of
from coda_bench.router.measure import measure
from coda_bench.router.placement import CASE as PLACEMENT_CASE
from coda_bench.router.placement import placement_rows
from coda_bench.router.sessions import CASE as SESSIONS_CASE
from coda_bench.router.sessions import session_rows
from coda_bench.router.systems import DIRECT, System, coda, vllm_router

_QUICK_REPETITIONS, _QUICK_S = 3, 3.0
_FULL_REPETITIONS, _FULL_S = 7, 4.0

PARTS: Mapping[str, Callable[[str], list[Row]]] = {SESSIONS_CASE: session_rows, PLACEMENT_CASE: placement_rows}
"""Cases that measure a part of the router by itself, without requests: name to what measures it on a named machine."""


@click.command("router")
@click.option("--quick/--full", "is_quick", default=True, show_default=True, help="About a minute, or about an hour.")
@click.option("--case", "case_names", help="Only these cases, separated by commas, for example 2KB/c20,sessions.")
@click.option(
    "--systems",
    default="direct,coda,vllm-router",
    show_default=True,
    help="Systems to compare; direct is always among them, and a peer that is not installed is left out.",
)
@click.option("--vllm-router-binary", help="Where vllm-router is, if not on the PATH.")
@click.option("--repetitions", type=click.IntRange(1, 100), help="Repetitions of each case.")
@click.option("--out", type=click.Path(path_type=Path), help="File for the figures, one JSON object a line.")
def router(
    is_quick: bool,
    case_names: str | None,
    systems: str,
    vllm_router_binary: str | None,
    repetitions: int | None,
    out: Path | None,
) -> None:
    """Measure what the router adds: latency to the first token, CPU, memory.

    Requests go through each system to mock workers on this machine, in turn with requests straight to them.
    """
    machine = machine_description()
    names = case_names.split(",") if case_names is not None else None
    cases = _cases(QUICK if is_quick else FULL, names)
    try:
        rows = [row for name in names or () if name in PARTS for row in PARTS[name](machine)]
        if cases:
            chosen = _systems(systems, vllm_router_binary)
            samples = measure(
                cases,
                chosen,
                repetitions=repetitions or (_QUICK_REPETITIONS if is_quick else _FULL_REPETITIONS),
                duration_s=_QUICK_S if is_quick else _FULL_S,
                tell=lambda line: click.echo(line, err=True),
            )
            peers = [system.name for system in chosen if system.name not in {"direct", "coda"}]
            rows += rows_of(samples, base=peers[0] if peers else None, machine=machine)
    except RuntimeError as error:
        raise click.ClickException(str(error)) from error
    if out is not None:
        write_jsonl(rows, out)
    show(rows, sys.stdout)


def _cases(default: tuple[Case, ...], names: Sequence[str] | None) -> list[Case]:
    if names is None:
        return list(default)
    known = {case.name: case for case in (*QUICK, *FULL)}
    unknown = [name for name in names if name not in known and name not in PARTS]
    if unknown:
        there_are = ", ".join([*known, *PARTS])
        raise click.BadParameter(f"unknown: {', '.join(unknown)}; there are: {there_are}", param_hint="--case")
    return [known[name] for name in names if name in known]


def _systems(names: str, binary: str | None) -> list[System]:
    chosen = [DIRECT]
    for name in names.split(","):
        if name == "coda":
            chosen.append(coda())
        elif name == "vllm-router":
            peer = vllm_router(binary)
            if peer is None:
                click.echo("vllm-router is not installed and left out (pip install vllm-router==0.1.17)", err=True)
            else:
                chosen.append(peer)
        elif name != "direct":
            raise click.BadParameter(f"unknown: {name}; there are: direct, coda, vllm-router", param_hint="--systems")
    return chosen
