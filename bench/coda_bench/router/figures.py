"""From samples to rows: medians over repetitions, and ratios of paired ones."""

from collections.abc import Callable, Sequence
from statistics import median

from coda_bench.report import Kind, Ratio, Row, paired_ratio
from coda_bench.router.measure import MODEL, Sample

_PLAIN: tuple[tuple[str, str, Callable[[Sample], float]], ...] = (
    ("req_per_s", "1/s", lambda sample: sample.req_per_s),
    ("cpu_s_per_1k", "s", lambda sample: sample.cpu_s_per_1k),
    ("rss_mb", "MB", lambda sample: sample.rss_mb),
)
_ADDED: tuple[tuple[str, Callable[[Sample], float]], ...] = (
    ("added_ttft_p50", lambda sample: sample.ttft_p50_ms),
    ("added_ttft_p99", lambda sample: sample.ttft_p99_ms),
)


def rows_of(samples: Sequence[Sample], *, base: str | None, machine: str) -> list[Row]:
    """Return the rows of all cases.

    Args:
        samples: Of all systems, with those of ``direct`` among them.
        base: System that ratios compare with; None = no ratios.
        machine: What they were measured on.
    """
    rows = []
    for case in dict.fromkeys(sample.case for sample in samples):
        of_case = [sample for sample in samples if sample.case == case]
        direct = _of(of_case, "direct")
        for system in dict.fromkeys(sample.system for sample in of_case):
            own = _of(of_case, system)
            if system != "direct":
                for metric, figure in _ADDED:
                    added = [figure(a) - figure(b) for a, b in zip(own, direct, strict=True)]
                    rows.append(_row(case, metric, system, median(added), "ms", len(own), machine))
            for metric, unit, figure in _PLAIN:
                if system == "direct" and metric != "req_per_s":
                    continue
                values = [figure(sample) for sample in own]
                ratio = _ratio(values, [figure(sample) for sample in _of(of_case, base)]) if base else None
                compared = base if ratio is not None and system not in {base, "direct"} else None
                rows.append(_row(case, metric, system, median(values), unit, len(own), machine, compared, ratio))
            rows.append(_row(case, "errors", system, sum(s.errors for s in own), "1", len(own), machine))
    return rows


def _of(samples: Sequence[Sample], system: str | None) -> list[Sample]:
    return sorted((s for s in samples if s.system == system), key=lambda sample: sample.repetition)


def _ratio(values: Sequence[float], base_values: Sequence[float]) -> Ratio | None:
    if not base_values or min(*values, *base_values) <= 0:
        return None
    return paired_ratio(values, base_values)


def _row(
    case: str,
    metric: str,
    system: str,
    value: float,
    unit: str,
    reps: int,
    machine: str,
    compared: str | None = None,
    ratio: Ratio | None = None,
) -> Row:
    return Row(
        bench="router",
        case=case,
        metric=metric,
        system=system,
        value=round(value, 4),
        unit=unit,
        ratio_to=compared,
        ratio=round(ratio.ratio, 4) if compared and ratio else None,
        ratio_low=round(ratio.low, 4) if compared and ratio else None,
        ratio_high=round(ratio.high, 4) if compared and ratio else None,
        reps=reps,
        kind=Kind.MEASURED_CPU,
        model=MODEL,
        machine=machine,
    )
