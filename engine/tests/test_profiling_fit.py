import pytest

from coda_engine.policy.cost import prefill_surface
from coda_engine.profiling.errors import MeasurementError
from coda_engine.profiling.fit import fit_grid, fit_prefill, fit_restore
from coda_engine.profiling.plan import QUICK, MeasurementPlan, Part, Spot

CURVE = [Spot(Part.PREFILL, tokens, held_out=tokens in (384, 768)) for tokens in (64, 256, 384, 512, 768, 1_024)]
GRID = [
    Spot(Part.GRID, 64, 512), Spot(Part.GRID, 256, 512),
    Spot(Part.GRID, 128, 768, held_out=True),
    Spot(Part.GRID, 64, 1_024), Spot(Part.GRID, 256, 1_024),
]  # fmt: skip
RESTORES = [
    Spot(Part.RESTORE, 128), Spot(Part.RESTORE, 512), Spot(Part.RESTORE, 768, held_out=True), Spot(Part.RESTORE, 1_024),
    Spot(Part.RESTORE, 256, outstanding=1), Spot(Part.RESTORE, 256, outstanding=2, held_out=True),
    Spot(Part.RESTORE, 256, outstanding=3),
]  # fmt: skip
PLAN = MeasurementPlan((*CURVE, *GRID, *RESTORES), tokens_per_s=1_000.0, effort=QUICK)


def around(ms: float, spread_ms: float = 1.0) -> list[float]:
    return [ms - spread_ms, ms + spread_ms, ms]


LINEAR = {spot: around(spot.tokens + 1.0) for spot in CURVE}
BY_CONTEXT = LINEAR | {spot: around(spot.tokens * (1 + spot.context_tokens / 2_000)) for spot in GRID}
RESTORED = {spot: around(4.0 + spot.tokens / 20 * (1 + spot.outstanding), 0.2) for spot in RESTORES}


def spot(part: Part, tokens: int, context_tokens: int = 0, outstanding: int = 0) -> Spot:
    return next(
        spot
        for spot in PLAN.of(part)
        if (spot.tokens, spot.context_tokens, spot.outstanding) == (tokens, context_tokens, outstanding)
    )


def test_points_are_medians_with_their_spread_and_repetitions() -> None:
    point = fit_prefill(PLAN, LINEAR).points[1]
    assert (point.x, point.ms, point.spread_ms, point.repetitions) == (256, 257.0, 1.0, 3)


def test_one_disturbed_repetition_does_not_move_the_median() -> None:
    samples = LINEAR | {spot(Part.PREFILL, 512): [513.0, 9_000.0, 513.0]}
    assert fit_prefill(PLAN, samples).points[2].ms == 513.0


def test_held_out_points_are_predicted_by_the_curve_and_are_not_in_it() -> None:
    curve = fit_prefill(PLAN, LINEAR)
    assert [point.x for point in curve.held_out] == [384, 768]
    assert [point.x for point in curve.points] == [64, 256, 512, 1_024]
    assert curve.worst_error < 0.001


def test_a_held_out_point_beyond_the_bound_is_refused_with_curve_point_both_times_and_remedy() -> None:
    with pytest.raises(MeasurementError) as refused:
        fit_prefill(PLAN, LINEAR | {spot(Part.PREFILL, 768): [1_200.0]})
    assert str(refused.value) == (
        "prefill: 769.0 ms are predicted for 768 tokens, 1200.0 ms were measured: off by 36%, more than the bound of "
        "25%; something else uses this machine, measure again when it is quiet"
    )


def test_a_curve_that_does_not_grow_is_refused() -> None:
    with pytest.raises(MeasurementError, match="prefill: 512 new tokens took 100"):
        fit_prefill(PLAN, LINEAR | {spot(Part.PREFILL, 512): [100.0]})


@pytest.mark.parametrize("sample_ms", [float("nan"), float("inf"), 0.0, -3.0])
def test_a_sample_that_is_no_time_is_refused(sample_ms: float) -> None:
    with pytest.raises(MeasurementError, match="not a positive time"):
        fit_prefill(PLAN, LINEAR | {spot(Part.PREFILL, 256): [257.0, sample_ms]})


def test_a_size_without_samples_is_refused() -> None:
    samples = {measured: values for measured, values in LINEAR.items() if measured.tokens != 384}
    with pytest.raises(MeasurementError, match="no sample of 384 new tokens"):
        fit_prefill(PLAN, samples)


def test_the_grid_has_a_row_for_each_context_and_predicts_between_them() -> None:
    grid = fit_grid(PLAN, BY_CONTEXT, fit_prefill(PLAN, BY_CONTEXT))
    assert [row.context_tokens for row in grid.rows] == [512, 1_024]
    (held_out,) = grid.held_out
    assert (held_out.x, held_out.context_tokens) == (128, 768)
    assert held_out.predicted_ms == pytest.approx(128 * (1 + 768 / 2_000), rel=0.01)


def test_a_grid_that_mispredicts_names_tokens_and_context() -> None:
    samples = BY_CONTEXT | {spot(Part.GRID, 128, 768): around(900.0)}
    with pytest.raises(MeasurementError, match=r"prefill_grid: .* for 128 tokens on 768 tokens of context"):
        fit_grid(PLAN, samples, fit_prefill(PLAN, samples))


def test_a_grid_row_that_falls_beyond_its_noise_is_refused() -> None:
    samples = BY_CONTEXT | {spot(Part.GRID, 256, 512): around(20.0)}
    with pytest.raises(MeasurementError, match="256 new tokens on 512 tokens of context took"):
        fit_grid(PLAN, samples, fit_prefill(PLAN, samples))


def test_a_grid_row_may_be_flat_because_a_step_has_a_least_duration() -> None:
    flat = {measured: around(260.0 if measured.tokens < 256 else 258.0, 0.01) for measured in GRID}
    grid = fit_grid(PLAN, BY_CONTEXT | flat, fit_prefill(PLAN, BY_CONTEXT))
    assert [[point.ms for point in row.points] for row in grid.rows] == [[260.0, 258.0]] * 2
    surface = prefill_surface(fit_prefill(PLAN, BY_CONTEXT), grid.rows)
    assert surface.at(256, 512) == surface.at(64, 512) == 260.0


def test_a_restore_profile_has_a_curve_for_each_depth_in_bytes() -> None:
    restore = fit_restore(PLAN, RESTORED, bytes_per_token=1_000.0)
    assert [curve.outstanding for curve in restore.curves] == [0, 1, 3]
    assert [point.x for point in restore.curves[0].points] == [128_000, 512_000, 1_024_000]
    assert restore.worst_error < 0.01


def test_a_restore_beside_others_that_is_mispredicted_names_how_many() -> None:
    samples = RESTORED | {spot(Part.RESTORE, 256, outstanding=2): around(200.0, 0.2)}
    with pytest.raises(MeasurementError, match=r"restore: .* for 256000 bytes beside 2 other restores"):
        fit_restore(PLAN, samples, bytes_per_token=1_000.0)


def test_differences_below_the_measurements_noise_are_no_misses() -> None:
    noisy = {measured: around(values[-1], 6.0) for measured, values in RESTORED.items()}
    noisy[spot(Part.RESTORE, 768)] = around(4.0 + 768 / 20 + 15.0, 6.0)
    assert fit_restore(PLAN, noisy, bytes_per_token=1_000.0).worst_error == 0.0


def test_a_tiny_restore_that_noise_makes_negative_counts_as_nothing() -> None:
    samples = RESTORED | {spot(Part.RESTORE, 128): around(-0.5, 0.2)}
    assert fit_restore(PLAN, samples, bytes_per_token=1_000.0).curves[0].points[0].ms == 0.0


def test_restores_that_do_not_grow_are_refused() -> None:
    flat = {measured: around(5.0, 0.5) for measured in RESTORES}
    with pytest.raises(MeasurementError, match=r"restoring 1024 tokens took 5\.0 ms, not longer than restoring 128"):
        fit_restore(PLAN, flat, bytes_per_token=1_000.0)


def test_noise_that_would_make_the_check_say_nothing_is_refused_and_more_repetitions_help() -> None:
    noisy = {measured: around(values[-1], 40.0) for measured, values in RESTORED.items()}
    with pytest.raises(
        MeasurementError, match=r"restore: times of at most 55\.2 ms are measured to no better than 128"
    ):
        fit_restore(PLAN, noisy, bytes_per_token=1_000.0)
    often = {measured: values * 40 for measured, values in noisy.items()}
    assert fit_restore(PLAN, often, bytes_per_token=1_000.0).resolution_ms == pytest.approx(20.35, abs=0.1)
