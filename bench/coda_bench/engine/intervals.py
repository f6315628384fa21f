"""Ratios with intervals for figures that are summed over arrival patterns: sums first, then one ratio."""

import random
from collections.abc import Callable, Sequence

from coda_bench.report import BOOTSTRAP_DRAWS, INTERVAL, Ratio

_MOST_SAMPLES = 8_000

Blocks = Sequence[Sequence[float]]
"""By arrival seed, then by block of the window."""


def ratio_of_sums(values: Blocks, base_values: Blocks, seed: int = 0) -> Ratio | None:
    """Return the ratio of both systems' totals with its bootstrap interval; None when the base has nothing.

    Seeds are drawn anew, and within each the window's blocks, the same ones for both systems: arrival patterns differ
    a lot, and a mean of ratios would give a quiet one the weight of a busy one.

    Args:
        values: One system's amounts.
        base_values: The other's, of the same seeds and blocks.
        seed: Of the bootstrap, so that equal figures give an equal interval.

    Raises:
        ValueError: Not the same seeds and blocks, or none.
    """
    if not values or [len(blocks) for blocks in values] != [len(blocks) for blocks in base_values]:
        raise ValueError("a ratio of sums needs the same seeds and blocks of both systems")
    total, base_total = (sum(sum(blocks) for blocks in side) for side in (values, base_values))
    if base_total <= 0:
        return None
    draw = random.Random(seed)
    ratios = []
    for _ in range(BOOTSTRAP_DRAWS):
        drawn, base_drawn = 0.0, 0.0
        for run in draw.choices(range(len(values)), k=len(values)):
            for block in draw.choices(range(len(values[run])), k=len(values[run])):
                drawn += values[run][block]
                base_drawn += base_values[run][block]
        if base_drawn > 0:
            ratios.append(drawn / base_drawn)
    return _with_interval(total / base_total, ratios)


def ratio_of_statistics(
    values: Sequence[Sequence[float]],
    base_values: Sequence[Sequence[float]],
    statistic: Callable[[Sequence[float]], float],
    seed: int = 0,
) -> Ratio | None:
    """Return the ratio of a statistic over all seeds' samples, for example a percentile, with its interval.

    Args:
        values: One system's samples by arrival seed.
        base_values: The other's, of the same seeds.
        statistic: Of the pooled samples; not called without any.
        seed: Of the bootstrap.

    Raises:
        ValueError: Not the same number of seeds.
    """
    if len(values) != len(base_values):
        raise ValueError("a ratio needs the same seeds of both systems")
    point = _ratio(values, base_values, range(len(values)), statistic)
    if point is None:
        return None
    draw = random.Random(seed)
    draws = (draw.choices(range(len(values)), k=len(values)) for _ in range(BOOTSTRAP_DRAWS // 4))
    few, base_few = _thinned(values), _thinned(base_values)
    ratios = [ratio for runs in draws if (ratio := _ratio(few, base_few, runs, statistic)) is not None]
    return _with_interval(point, ratios)


def percentile(samples: Sequence[float], share: float) -> float:
    """Return the percentile of ``samples``, linear between neighbours.

    Raises:
        ValueError: There are no samples.
    """
    if not samples:
        raise ValueError("no samples")
    ordered = sorted(samples)
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def _ratio(
    values: Sequence[Sequence[float]],
    base_values: Sequence[Sequence[float]],
    runs: Sequence[int],
    statistic: Callable[[Sequence[float]], float],
) -> float | None:
    pooled, base_pooled = ([sample for run in runs for sample in side[run]] for side in (values, base_values))
    if not pooled or not base_pooled:
        return None
    base = statistic(base_pooled)
    return statistic(pooled) / base if base > 0 else None


def _thinned(values: Sequence[Sequence[float]]) -> list[list[float]]:
    """Return every n-th of each seed's ordered samples, the same n for all: enough for an interval's percentiles."""
    step = max(1, sum(map(len, values)) // _MOST_SAMPLES)
    return [sorted(samples)[step // 2 :: step] for samples in values]


def _with_interval(point: float, ratios: list[float]) -> Ratio:
    ordered = sorted(ratios) or [point]
    low, high = (ordered[round(share * (len(ordered) - 1))] for share in INTERVAL)
    return Ratio(point, low, high)
