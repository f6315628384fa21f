import pytest

from coda_engine.profiling.errors import MeasurementError
from coda_engine.profiling.fit import fit_prefill
from coda_engine.profiling.plan import QUICK, MeasurementPlan

PLAN = MeasurementPlan(curve_tokens=(64, 256, 512, 1024), held_out_tokens=(384, 768), effort=QUICK)
LINEAR = {tokens: [float(tokens), float(tokens) + 2, float(tokens) + 1] for tokens in (64, 256, 384, 512, 768, 1024)}


def test_points_are_medians_with_their_spread_and_repetitions() -> None:
    point = fit_prefill(PLAN, LINEAR).points[1]
    assert (point.x, point.ms, point.spread_ms, point.repetitions) == (256, 257.0, 1.0, 3)


def test_one_disturbed_repetition_does_not_move_the_median() -> None:
    samples = LINEAR | {512: [513.0, 9_000.0, 513.0]}
    assert fit_prefill(PLAN, samples).points[2].ms == 513.0


def test_held_out_points_are_predicted_by_the_curve_and_are_not_in_it() -> None:
    profile = fit_prefill(PLAN, LINEAR)
    assert [point.x for point in profile.held_out] == [384, 768]
    assert [point.x for point in profile.points] == [64, 256, 512, 1024]
    assert profile.worst_error < 0.001


def test_a_held_out_point_beyond_the_bound_is_refused_with_both_times() -> None:
    with pytest.raises(MeasurementError, match=r"predicts 769\.0 ms for 768 tokens, measured were 1200\.0 ms"):
        fit_prefill(PLAN, LINEAR | {768: [1_200.0]})


def test_a_curve_that_does_not_grow_is_refused() -> None:
    with pytest.raises(MeasurementError, match="512 tokens took 100"):
        fit_prefill(PLAN, LINEAR | {512: [100.0]})


@pytest.mark.parametrize("sample_ms", [float("nan"), float("inf"), 0.0, -3.0])
def test_a_sample_that_is_no_time_is_refused(sample_ms: float) -> None:
    with pytest.raises(MeasurementError, match="not a positive time"):
        fit_prefill(PLAN, LINEAR | {256: [257.0, sample_ms]})


def test_a_size_without_samples_is_refused() -> None:
    with pytest.raises(MeasurementError, match="no sample of 384 tokens"):
        fit_prefill(PLAN, {tokens: samples for tokens, samples in LINEAR.items() if tokens != 384})
