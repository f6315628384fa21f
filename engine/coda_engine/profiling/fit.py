"""From samples to costs, and whether they may be used: purely, so that every refusal can be tested.

Held-out points are predicted by the very functions with which the engine later counts.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from coda_engine.contract.measured import (
    MIN_MEASURED_MS,
    CheckedCosts,
    CostCurve,
    CurvePoint,
    GridRow,
    HeldOutPoint,
    PrefillGrid,
    RestoreCurve,
    RestoreProfile,
)
from coda_engine.contract.profile import describe_miss
from coda_engine.policy.cost import prefill_surface, restore_cost
from coda_engine.policy.curves import PiecewiseLinear
from coda_engine.profiling.errors import MeasurementError
from coda_engine.profiling.plan import MeasurementPlan, Part, Spot

Samples = Mapping[Spot, Sequence[float]]
"""What was measured for each spot, milliseconds, in order."""

_NOISE_SPREADS = 3 * 1.253 * 1.483
"""Three standard errors of a median, in spreads (median absolute deviations) over the root of the repetitions."""

_QUIET = "something else uses this machine, measure again when it is quiet"


def fit_prefill(plan: MeasurementPlan, samples: Samples) -> CostCurve:
    """Return the prefill curve through the medians, with its held-out check passed.

    Raises:
        MeasurementError: A sample is missing or no time; a median is not above the one of the next smaller
            size; or a held-out point is predicted worse than the plan's bound allows.
    """
    points = {spot: _point(spot, spot.tokens, samples) for spot in plan.of(Part.PREFILL)}
    built = [spot for spot in points if not spot.held_out]
    for smaller, larger in pairwise(built):
        _require_longer(larger, smaller, points)
    curve = PiecewiseLinear.growing((float(points[spot].x), points[spot].ms) for spot in built)
    held_out = [_held_out(spot, points[spot], curve.at(spot.tokens)) for spot in points if spot.held_out]
    bound = plan.effort.error_bound
    costs = CostCurve(points=[points[spot] for spot in built], held_out=held_out, error_bound=bound)
    _require_held(Part.PREFILL, costs)
    return costs


def fit_grid(plan: MeasurementPlan, samples: Samples, prefill: CostCurve) -> PrefillGrid:
    """Return the prefill grid, with its held-out check passed.

    Raises:
        MeasurementError: As for :func:`fit_prefill`; falls within noise and bound are taken.
    """
    points = {spot: _point(spot, spot.tokens, samples) for spot in plan.of(Part.GRID)}
    noise_ms, bound = _resolution_ms(Part.GRID, points.values(), plan.effort.most_noise), plan.effort.error_bound
    by_context: dict[int, list[Spot]] = {}
    for spot in points:
        if not spot.held_out:
            by_context.setdefault(spot.context_tokens, []).append(spot)
    for row in by_context.values():
        for smaller, larger in pairwise(row):
            # A step has a least duration, so that few tokens more may cost nothing.
            _require_longer(larger, smaller, points, noise_ms + bound * points[smaller].ms)
    rows = [
        GridRow(context_tokens=context, points=[points[spot] for spot in row]) for context, row in by_context.items()
    ]
    surface = prefill_surface(prefill, rows)
    held_out = [
        _held_out(spot, points[spot], surface.at(spot.tokens, spot.context_tokens)) for spot in points if spot.held_out
    ]
    grid = PrefillGrid(rows=rows, held_out=held_out, error_bound=bound, resolution_ms=noise_ms)
    _require_held(Part.GRID, grid)
    return grid


def fit_restore(plan: MeasurementPlan, samples: Samples, bytes_per_token: float) -> RestoreProfile:
    """Return the restore curves by outstanding depth, with their held-out check passed.

    A sample is the first token after a restore less the first token of the same prompts' HBM hits; among the
    smallest ones noise may make it negative, which counts as 0.

    Raises:
        MeasurementError: As for :func:`fit_prefill`, or the noise hides the largest restore.
    """
    points = {
        spot: _point(spot, round(spot.tokens * bytes_per_token), samples, difference=True)
        for spot in plan.of(Part.RESTORE)
    }
    noise_ms = _resolution_ms(Part.RESTORE, points.values(), plan.effort.most_noise)
    by_depth: dict[int, list[Spot]] = {}
    for spot in points:
        if not spot.held_out:
            by_depth.setdefault(spot.outstanding, []).append(spot)
    for smaller, larger in pairwise(by_depth[0]):
        _require_longer(larger, smaller, points, noise_ms)
    first, last = by_depth[0][0], by_depth[0][-1]
    _require_longer(last, first, points)
    curves = [
        RestoreCurve(outstanding=depth, points=[points[spot] for spot in spots]) for depth, spots in by_depth.items()
    ]
    cost = restore_cost(curves)
    held_out = [
        _held_out(spot, point, cost.at(point.x, point.x * spot.outstanding))
        for spot, point in points.items()
        if spot.held_out
    ]
    bound = plan.effort.error_bound
    restore = RestoreProfile(curves=curves, held_out=held_out, error_bound=bound, resolution_ms=noise_ms)
    _require_held(Part.RESTORE, restore)
    return restore


def sample_median_ms(spot: Spot, samples: Samples, *, difference: bool = False) -> float:
    """Return the median of a spot's samples, milliseconds.

    Args:
        spot: Whose.
        samples: Of every spot.
        difference: The samples are differences of two times, which noise may make negative: then 0.

    Raises:
        MeasurementError: There is none, or one is no time.
    """
    values = samples.get(spot, ())
    if not values:
        raise MeasurementError(f"{spot.part}: no sample of {spot}")
    if not all(math.isfinite(value) and (difference or value > 0) for value in values):
        raise MeasurementError(f"{spot.part}: a sample of {spot} is not a positive time: {list(values)}")
    return max(0.0, median(values))


def measured_again(spot: Spot, point: HeldOutPoint, samples_ms: Sequence[float]) -> HeldOutPoint:
    """Return a held-out point with what it took now beside what was predicted then.

    Raises:
        MeasurementError: A sample is no time.
    """
    now_ms = sample_median_ms(spot, {spot: samples_ms}, difference=spot.part is Part.RESTORE)
    return point.model_copy(update={"measured_ms": max(round(now_ms, 3), MIN_MEASURED_MS)})


def _point(spot: Spot, x: int, samples: Samples, *, difference: bool = False) -> CurvePoint:
    middle_ms = sample_median_ms(spot, samples, difference=difference)
    values = samples[spot]
    spread_ms = median(abs(value - middle_ms) for value in values)
    return CurvePoint(x=x, ms=round(middle_ms, 3), spread_ms=round(spread_ms, 3), repetitions=len(values))


def _held_out(spot: Spot, point: CurvePoint, predicted_ms: float) -> HeldOutPoint:
    return HeldOutPoint(
        x=point.x,
        context_tokens=spot.context_tokens,
        outstanding=spot.outstanding,
        measured_ms=max(point.ms, MIN_MEASURED_MS),
        predicted_ms=round(predicted_ms, 3),
    )


def _resolution_ms(part: Part, points: Iterable[CurvePoint], most_noise: float) -> float:
    """Return the noise of a part's medians, milliseconds; more repetitions make it smaller.

    Raises:
        MeasurementError: It hides what is to be measured.
    """
    measured = list(points)
    noise_ms = median(_NOISE_SPREADS * point.spread_ms / math.sqrt(point.repetitions) for point in measured)
    largest_ms = max(point.ms for point in measured)
    if noise_ms > most_noise * largest_ms:
        raise MeasurementError(
            f"{part}: times of at most {largest_ms:.1f} ms are measured to no better than {noise_ms:.1f} ms; {_QUIET}"
        )
    return round(noise_ms, 3)


def _require_longer(larger: Spot, smaller: Spot, points: Mapping[Spot, CurvePoint], slack_ms: float = 0.0) -> None:
    larger_ms, smaller_ms = points[larger].ms, points[smaller].ms
    if larger_ms + slack_ms <= smaller_ms:
        raise MeasurementError(
            f"{larger.part}: {larger} took {larger_ms:.1f} ms, not longer than {smaller} with {smaller_ms:.1f} ms; "
            f"{_QUIET}"
        )


def _require_held(part: Part, costs: CheckedCosts) -> None:
    misses = costs.misses()
    if misses:
        worst = max(misses, key=lambda point: point.relative_error)
        raise MeasurementError(f"{describe_miss(part.value, costs, worst)}; {_QUIET}")
