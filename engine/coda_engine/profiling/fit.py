"""From samples to a curve, and whether it may be used: purely, so that every refusal can be tested."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median

from coda_engine.contract.profile import CurvePoint, HeldOutPoint, PrefillProfile
from coda_engine.policy.cost import PiecewiseLinear
from coda_engine.profiling.errors import MeasurementError
from coda_engine.profiling.plan import MeasurementPlan

Samples = Mapping[int, Sequence[float]]
"""Prompt size in tokens to the milliseconds measured for it, in order."""


def fit_prefill(plan: MeasurementPlan, samples: Samples) -> PrefillProfile:
    """Return the prefill curve through the medians, with its held-out check passed.

    Raises:
        MeasurementError: A sample is missing, not finite or not positive; a median is not above the one of the next
            smaller size; or a held-out point is predicted worse than the plan's bound allows.
    """
    points = [_point(tokens, samples.get(tokens, ())) for tokens in plan.curve_tokens]
    _require_growth(points)
    curve = PiecewiseLinear.through([(point.x, point.ms) for point in points])
    held_out = [
        HeldOutPoint(x=tokens, measured_ms=_point(tokens, samples.get(tokens, ())).ms, predicted_ms=curve.at(tokens))
        for tokens in plan.held_out_tokens
    ]
    profile = PrefillProfile(points=points, held_out=held_out, error_bound=plan.effort.error_bound)
    if profile.worst_error > profile.error_bound:
        worst = max(held_out, key=lambda point: point.relative_error)
        raise MeasurementError(
            f"the curve predicts {worst.predicted_ms:.1f} ms for {worst.x} tokens, measured were "
            f"{worst.measured_ms:.1f} ms: off by {worst.relative_error:.0%}, more than the bound of "
            f"{profile.error_bound:.0%}; something else uses this machine, measure again when it is quiet"
        )
    return profile


def _point(tokens: int, samples_ms: Sequence[float]) -> CurvePoint:
    if not samples_ms:
        raise MeasurementError(f"no sample of {tokens} tokens")
    if not all(math.isfinite(sample_ms) and sample_ms > 0 for sample_ms in samples_ms):
        raise MeasurementError(f"a sample of {tokens} tokens is not a positive time: {list(samples_ms)}")
    middle_ms = median(samples_ms)
    spread_ms = median(abs(sample_ms - middle_ms) for sample_ms in samples_ms)
    return CurvePoint(x=tokens, ms=round(middle_ms, 3), spread_ms=round(spread_ms, 3), repetitions=len(samples_ms))


def _require_growth(points: Sequence[CurvePoint]) -> None:
    for smaller, larger in pairwise(points):
        if larger.ms <= smaller.ms:
            raise MeasurementError(
                f"{larger.x} tokens took {larger.ms:.1f} ms, not longer than {smaller.x} tokens with "
                f"{smaller.ms:.1f} ms; something else uses this machine, measure again when it is quiet"
            )
