"""The one form of all benchmarks: a figure is one JSON object a line, and a row of a table for people."""

import json
import math
import platform
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import IO

BOOTSTRAP_DRAWS = 2_000
INTERVAL = (0.025, 0.975)


class Kind(StrEnum):
    """How a figure came about."""

    MEASURED_CPU = "measured-cpu"
    MEASURED_GPU = "measured-gpu"
    MODELLED = "modelled"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure.

    Attributes:
        bench: The benchmark, for example ``router``.
        case: What was measured, for example ``2KB/c20``.
        metric: The quantity, for example ``added_ttft_p50``.
        system: Whose figure it is.
        value: The figure, in ``unit``.
        unit: For example ``ms``.
        ratio_to: System that the ratio compares with; None = no ratio.
        ratio: This system's figure over that one's, from paired repetitions of one run.
        ratio_low: Lower end of its 95% interval.
        ratio_high: Upper end.
        reps: Repetitions behind the figure.
        kind: Measured or modelled.
        model: Model served; ``""`` where none is.
        machine: What it ran on.
    """

    bench: str
    case: str
    metric: str
    system: str
    value: float
    unit: str
    ratio_to: str | None = None
    ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    reps: int = 1
    kind: Kind = Kind.MEASURED_CPU
    model: str = ""
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio with its 95% interval."""

    ratio: float
    low: float
    high: float


def paired_ratio(values: Sequence[float], base_values: Sequence[float], seed: int = 0) -> Ratio:
    """Return the geometric mean of pairwise ratios and its bootstrap interval.

    Args:
        values: One figure for each repetition; > 0.
        base_values: The other system's, of the same repetitions; > 0.
        seed: Of the bootstrap, so that equal figures give an equal interval.

    Raises:
        ValueError: Not the same number of figures, none, or one that is not positive.
    """
    if not values or len(values) != len(base_values) or min(*values, *base_values) <= 0:
        raise ValueError("a paired ratio needs equally many positive figures of both systems")
    logs = [math.log(value / base) for value, base in zip(values, base_values, strict=True)]
    draw = random.Random(seed)
    means = sorted(sum(draw.choices(logs, k=len(logs))) / len(logs) for _ in range(BOOTSTRAP_DRAWS))
    low, high = (math.exp(means[round(share * (BOOTSTRAP_DRAWS - 1))]) for share in INTERVAL)
    return Ratio(math.exp(sum(logs) / len(logs)), low, high)


def write_jsonl(rows: Iterable[Row], path: Path) -> None:
    """Write one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))


def table(rows: Iterable[Row]) -> str:
    """Return the rows as text for a terminal: a line for each figure, ratios where there are any."""
    lines = [("case", "metric", "system", "value", "unit", "ratio (95%)")]
    for row in rows:
        shown = (
            "" if row.ratio is None else f"{row.ratio:.2f} ({row.ratio_low:.2f}-{row.ratio_high:.2f}) x {row.ratio_to}"
        )
        lines.append((row.case, row.metric, row.system, _figure(row.value), row.unit, shown))
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if column == 3 else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def machine_description(cpuinfo: Path = Path("/proc/cpuinfo"), meminfo: Path = Path("/proc/meminfo")) -> str:
    """Return the machine in words: CPU model, logical CPUs, memory, Python."""
    fields = _first_fields(cpuinfo)
    cpus = sum(line.startswith("processor") for line in _lines(cpuinfo))
    memory_kib = int(_first_fields(meminfo).get("MemTotal", "0 kB").split()[0])
    name = fields.get("model name") or platform.machine()
    return f"{name}, {cpus} CPUs, {memory_kib / 2**20:.0f} GiB, Python {platform.python_version()}"


def show(rows: Sequence[Row], out: IO[str]) -> None:
    """Print the table and what it was measured on."""
    out.write(table(rows) + "\n")
    if rows:
        out.write(f"\n{rows[0].kind.value}; {rows[0].machine}\n")


def _figure(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1_000 else f"{value:.3g}"


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _first_fields(path: Path) -> Mapping[str, str]:
    fields: dict[str, str] = {}
    for line in _lines(path):
        name, separator, value = line.partition(":")
        if separator:
            fields.setdefault(name.strip(), value.strip())
    return fields
