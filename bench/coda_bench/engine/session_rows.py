"""Rows of the cases that play sessions: sums over arrival seeds, ratios of sums with their interval."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

from coda_bench.engine.cases import SessionsCase
from coda_bench.engine.intervals import percentile, ratio_of_statistics, ratio_of_sums
from coda_bench.engine.session_runs import SessionRun
from coda_bench.engine.slo import OTHERS, STANDARD
from coda_bench.engine.window import WindowFigures, figures_of
from coda_bench.report import Ratio, Row

Bases = Callable[[str], Sequence[str]]
"""The systems that a system's ratios compare with."""

_RIVALS = ("stock", "fifo", "cachewise")

Runs = Mapping[str, Sequence[SessionRun]]
"""By system, one run for each arrival seed, in the same order for all."""

_SUMS: tuple[tuple[str, str, Callable[[WindowFigures], Sequence[float]]], ...] = (
    ("output_tps", "tokens/s", lambda figures: figures.output_tokens),
    ("slo_tps", "tokens/s", lambda figures: figures.slo_tokens[STANDARD.ttft_s]),
    *(
        (f"slo{slo.ttft_s:g}s_tps", "tokens/s", partial(lambda limit, figures: figures.slo_tokens[limit], slo.ttft_s))
        for slo in OTHERS
    ),
    ("useful_tps", "tokens/s", lambda figures: figures.useful_tokens),
    ("completed_rps", "requests/s", lambda figures: figures.completed),
)

_PERCENTILES: tuple[tuple[str, float, Callable[[WindowFigures], Sequence[float]]], ...] = (
    ("ttft_p50", 0.50, lambda figures: figures.ttft_s),
    ("ttft_p95", 0.95, lambda figures: figures.ttft_s),
    ("tbt_p50", 0.50, lambda figures: figures.tbt_s),
    ("tbt_p95", 0.95, lambda figures: figures.tbt_s),
    ("e2e_p50", 0.50, lambda figures: figures.e2e_s),
    ("e2e_p95", 0.95, lambda figures: figures.e2e_s),
)


def engine_bases(system: str) -> Sequence[str]:
    """Return stock vLLM and the rivals: of a rival those before it, of changed constants also the usual ones."""
    if system in _RIVALS:
        return _RIVALS[: _RIVALS.index(system)]
    usual, changed, _ = system.partition("+")
    return (*_RIVALS, usual) if changed else _RIVALS


def fleet_bases(system: str) -> Sequence[str]:
    """Return the corner without placement and admission, then the two that lack one of both."""
    placement, _, admission = system.partition("/")
    corners = (
        "round-robin/fifo",
        f"{placement}/fifo",
        f"round-robin/{admission}",
        f"smetric/{admission}",
        "smetric/fifo",
    )
    return [corner for corner in dict.fromkeys(corners) if corner != system]


def session_rows(case: SessionsCase, runs: Runs, bases_of: Bases = engine_bases) -> list[Row]:
    """Return every figure of the case: values of each system, and their ratios to each of its bases that was run."""
    figures = {system: [figures_of(run.records, case.window) for run in some] for system, some in runs.items()}
    rows: list[Row] = []
    for system in runs:
        bases: list[str | None] = [base for base in bases_of(system) if base in runs]
        for base in bases or [None]:
            rows += _compared(case.name, system, base, figures)
        rows += _single(case.name, system, figures[system], runs[system])
    return rows


def _compared(case: str, system: str, base: str | None, figures: Mapping[str, Sequence[WindowFigures]]) -> list[Row]:
    rows = []
    ours, theirs = figures[system], figures[base] if base is not None else None
    for metric, unit, blocks in _SUMS:
        amounts = [blocks(run) for run in ours]
        per_s = sum(map(sum, amounts)) / sum(len(run) * one.block_s for run, one in zip(amounts, ours, strict=True))
        ratio = ratio_of_sums(amounts, [blocks(run) for run in theirs]) if theirs is not None else None
        rows.append(_row(case, metric, system, per_s, unit, len(ours), base, ratio))
    for metric, share, samples in _PERCENTILES:
        pooled = [samples(run) for run in ours]
        everything = [sample for run in pooled for sample in run]
        if not everything:
            continue
        statistic = partial(percentile, share=share)
        against = ratio_of_statistics(pooled, [samples(run) for run in theirs], statistic) if theirs else None
        rows.append(_row(case, metric, system, statistic(everything), "s", len(ours), base, against))
    longest = [[run.longest_wait_s] for run in ours]
    against = ratio_of_statistics(longest, [[run.longest_wait_s] for run in theirs], max) if theirs else None
    rows.append(_row(case, "max_wait", system, max(map(max, longest)), "s", len(ours), base, against))
    return rows


def _single(case: str, system: str, figures: Sequence[WindowFigures], runs: Sequence[SessionRun]) -> list[Row]:
    """Return the figures that have no ratio: what the window has put off, reuse, decisions, the drained trace."""
    count = len(figures)
    prompt = sum(run.prompt_tokens for run in figures)
    values = [
        ("unserved_at_end", sum(run.unserved for run in figures) / count, "requests"),
        ("deferred_prefill", sum(run.deferred_prefill_tokens for run in figures) / count, "tokens"),
        ("reuse", sum(run.cached_tokens for run in figures) / prompt if prompt else 0.0, "of prompt tokens"),
    ]
    admissions = sum(run.counters.admissions for run in runs)
    if admissions:
        reordered = sum(run.counters.reordered for run in runs)
        values += [
            ("admissions", float(admissions), "decisions"),
            ("reordered", float(reordered), "decisions"),
            ("reordered_share", reordered / admissions, "of decisions"),
            ("refused_after_feasible", float(sum(run.counters.refused for run in runs)), "decisions"),
        ]
    rows = [Row("engine", case, metric, system, value, unit, reps=count) for metric, value, unit in values]
    drained = [run.drained for run in runs if run.drained is not None]
    if drained:
        requests = sum(one.requests for one in drained)
        rows += [
            Row("engine", case, metric, system, value, unit, reps=len(drained))
            for metric, value, unit in (
                (
                    "drained_slo_share",
                    sum(one.slo_share * one.requests for one in drained) / requests,
                    "of requests",
                ),
                ("drained_tps", sum(one.output_tps for one in drained) / len(drained), "tokens/s"),
                ("drained_max_wait", max(one.longest_wait_s for one in drained), "s"),
                ("drained_unfinished", float(sum(one.unfinished for one in drained)), "requests"),
            )
        ]
    return rows


def _row(
    case: str, metric: str, system: str, value: float, unit: str, reps: int, base: str | None, ratio: Ratio | None
) -> Row:
    if ratio is None:
        return Row("engine", case, metric, system, value, unit, reps=reps)
    return Row("engine", case, metric, system, value, unit, base, ratio.ratio, ratio.low, ratio.high, reps)
