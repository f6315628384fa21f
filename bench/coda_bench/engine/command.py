"""``coda bench engine``."""

import asyncio
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import aiohttp
import click

from coda_bench.engine.idle import IdleLoad, alternate
from coda_bench.engine.selection import measure
from coda_bench.engine.server import EngineStartError, accept_profile, bench_spec, running_engine
from coda_bench.report import Row, machine_description, paired_ratio, show, write_jsonl

CASES = ("idle", "selection")
CORE = 0
BUILTIN_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured.

    Attributes:
        idle: Load of one idle measurement.
        idle_repetitions: Pairs of idle measurements in each of the two blocks.
        selection_window_s: Window of each selection measurement.
        selection_churn: Also measure selection while blocks are evicted and inserted all the time.
    """

    idle: IdleLoad
    idle_repetitions: int
    selection_window_s: float
    selection_churn: bool


QUICK = Size(IdleLoad(output_tokens=48), idle_repetitions=3, selection_window_s=15, selection_churn=False)
FULL = Size(IdleLoad(output_tokens=128), idle_repetitions=16, selection_window_s=60, selection_churn=True)


@click.command()
@click.option("--case", "cases", default=",".join(CASES), show_default=True, help="Cases, separated by commas.")
@click.option("--quick/--full", default=True, show_default=True, help="Some minutes, or half an hour.")
@click.option("--model", "model_path", type=click.Path(path_type=Path, exists=True, file_okay=False), default=None,
              help="Folder of the model; default: the built-in one, made when absent.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), default=None, help="JSON lines go here.")
def engine(cases: str, quick: bool, model_path: Path | None, out: Path | None) -> None:
    """Measure what Coda's plug-ins cost on a real engine, against stock vLLM in the same run."""
    chosen = [case.strip() for case in cases.split(",") if case.strip()]
    unknown = sorted(set(chosen) - set(CASES))
    if unknown:
        raise click.BadParameter(f"no case {', '.join(unknown)}; there are: {', '.join(CASES)}", param_hint="--case")
    size = QUICK if quick else FULL
    try:
        rows = asyncio.run(_run(chosen, size, model_path or _builtin_model()))
    except (EngineStartError, TimeoutError, aiohttp.ClientError) as error:
        click.echo(f"coda bench engine: {error or type(error).__name__}", err=True)
        sys.exit(1)
    if out is not None:
        write_jsonl(rows, out)
    show(rows, sys.stdout)


async def _run(cases: list[str], size: Size, model_path: Path) -> list[Row]:
    rows: list[Row] = []
    if "idle" in cases:
        rows += await _idle(size, model_path)
    if "selection" in cases:
        rows += await _selection(size, model_path, "selection", kv_cache="1400M")
        if size.selection_churn:
            rows += await _selection(size, model_path, "selection-churn", kv_cache="400M")
    return [replace(row, model=model_path.name, machine=machine_description()) for row in rows]


async def _idle(size: Size, model_path: Path) -> list[Row]:
    """Measure in two blocks, in which the other system starts first.

    Two equal engines on one core differ by a tenth and more with the order of their start (memory placement); the
    geometric mean of both orders does not.
    """
    spec = bench_spec(model_path, kv_cache="400M", max_running=8)
    blocks = []
    for order in (("stock", "coda"), ("coda", "stock")):
        _say(
            f"idle: starting {order[0]}, then {order[1]}, on the same core; then {size.idle_repetitions} pairs in turn"
        )
        async with running_engine(spec, order[0], core=CORE) as one, running_engine(spec, order[1], core=CORE) as other:
            await accept_profile(one if one.system == "coda" else other)
            blocks.append(await alternate((one, other), size.idle, size.idle_repetitions))
    stock_tps, coda_tps = (
        [math.sqrt(first[system] * second[system]) for first, second in zip(*blocks, strict=True)]
        for system in ("stock", "coda")
    )
    ratio = paired_ratio(coda_tps, stock_tps)
    repetitions = len(stock_tps)
    return [
        Row("engine", "idle", "output_tps", "stock", median(stock_tps), "tokens/s", reps=repetitions),
        Row("engine", "idle", "output_tps", "coda", median(coda_tps), "tokens/s", "stock", ratio.ratio, ratio.low,
            ratio.high, repetitions),
    ]  # fmt: skip


async def _selection(size: Size, model_path: Path, case: str, kv_cache: str) -> list[Row]:
    spec = bench_spec(model_path, kv_cache=kv_cache, max_running=4)
    _say(f"{case}: filling the queue, then {size.selection_window_s:.0f} s")
    async with running_engine(spec, "coda", core=CORE) as coda:
        await accept_profile(coda)
        cost = await measure(coda, size.selection_window_s)
    figures = (
        ("selection_p50_ms", cost.p50_ms, "ms"),
        ("selection_p99_ms", cost.p99_ms, "ms"),
        ("selection_share", cost.share, "of engine time"),
        ("candidates_p50", float(cost.candidates), "requests"),
    )
    return [Row("engine", case, metric, "coda", value, unit, reps=cost.selections) for metric, value, unit in figures]


def _builtin_model() -> Path:
    """Return the built-in model's folder, made by the command line (a layer above this one) when absent."""
    command = [sys.executable, "-m", "coda_cli", "model", BUILTIN_MODEL]
    made = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if made.returncode != 0:
        raise click.ClickException(f"`coda model {BUILTIN_MODEL}` failed; give a model's folder with --model")
    return Path(made.stdout.strip())


def _say(text: str) -> None:
    click.echo(f"── {text}", err=True)
