"""The cost of state preparation (paper eq. 1, Appendix A)."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coda_engine.contract.measured import CurvePoint, RestoreCurve
from coda_engine.policy.cost import RestoreCost, StateCostModel, StateWork, cost_model, restore_cost
from coda_engine.policy.curves import PiecewiseLinear, PrefillSurface
from coda_engine.profiling.assumed import assumed_key, assumed_profile


def through(points: Sequence[tuple[float, float]]) -> PiecewiseLinear:
    return PiecewiseLinear(tuple(x for x, _ in points), tuple(ms for _, ms in points))


PREFILL = through([(100, 10.0), (1_000, 80.0), (2_000, 200.0)])


def test_a_measured_point_costs_what_was_measured():
    assert [PREFILL.at(x) for x in (100, 1_000, 2_000)] == [10.0, 80.0, 200.0]


def test_between_points_the_curve_is_linear():
    assert PREFILL.at(550) == pytest.approx(45.0)


def test_below_the_first_point_the_curve_goes_through_the_origin():
    assert PREFILL.at(50) == pytest.approx(5.0)
    assert PREFILL.at(0) == 0.0
    assert PREFILL.at(-5) == 0.0


def test_beyond_the_last_point_a_positive_slope_is_continued():
    assert PREFILL.at(3_000) == pytest.approx(320.0)


def test_beyond_a_falling_last_segment_more_work_still_costs_more():
    disturbed = through([(100, 10.0), (1_000, 100.0), (2_000, 90.0)])
    assert disturbed.at(4_000) == pytest.approx(90.0 + 2_000 * 90.0 / 2_000)


@pytest.mark.parametrize(
    "points", [[(100, 1.0)], [(100, 1.0), (100, 2.0)], [(200, 1.0), (100, 2.0)], [(0, 0.0), (100, 1.0)]]
)
def test_curves_that_are_none_are_refused(points):
    with pytest.raises(ValueError, match="curve"):
        through(points)


@given(st.integers(0, 100_000), st.integers(0, 100_000))
def test_more_tokens_never_cost_less_on_a_growing_curve(one, other):
    few, many = sorted((one, other))
    assert PREFILL.at(few) <= PREFILL.at(many)


def test_prefill_is_the_whole_cost_without_shadow_and_ssd():
    model = StateCostModel(PREFILL)
    work = StateWork(1_000, 500, restore_bytes=10**9, load_bytes=10**9, outstanding_restore_bytes=10**9)
    assert model.cost_ms(work) == 80.0


def test_restoring_waits_for_what_the_transfer_domain_already_has_to_do():
    alone = through([(1_000, 1.0), (2_000, 2.0)])
    waits = through([(1_000, 3.0), (2_000, 6.0)])
    model = StateCostModel(PREFILL, restore=RestoreCost(alone, waits))
    behind = StateWork(100, restore_bytes=2_000, outstanding_restore_bytes=1_000)
    assert model.cost_ms(behind) == pytest.approx(10.0 + 2.0 + 3.0)
    assert model.cost_ms(StateWork(100, outstanding_restore_bytes=1_000)) == pytest.approx(10.0)


def test_outstanding_bytes_take_what_they_take_alone_where_depths_were_not_measured():
    cost = RestoreCost(through([(1_000, 1.0), (2_000, 2.0)]))
    assert cost.at(1_000, 2_000) == pytest.approx(3.0)


def test_the_wait_for_outstanding_bytes_is_what_restores_beside_others_took_longer():
    def points(**ms_by_x: float) -> list[CurvePoint]:
        return [CurvePoint(x=int(x[1:]), ms=ms) for x, ms in ms_by_x.items()]

    cost = restore_cost(
        [
            RestoreCurve(outstanding=0, points=points(x1000=5.0, x2000=6.0)),
            RestoreCurve(outstanding=1, points=points(x1000=5.5, x2000=7.0)),
            RestoreCurve(outstanding=3, points=points(x1000=6.5)),
        ]
    )
    assert cost.at(1_000, 0) == pytest.approx(5.0)
    assert cost.at(1_000, 1_000) == pytest.approx(5.5)
    assert cost.at(2_000, 2_000) == pytest.approx(7.0)
    assert cost.at(1_000, 3_000) == pytest.approx(6.5)


def test_loading_from_ssd_adds_its_own_curve():
    model = StateCostModel(PREFILL, load=through([(1_000, 4.0), (2_000, 8.0)]))
    assert model.cost_ms(StateWork(100, load_bytes=1_000)) == pytest.approx(14.0)


SURFACE = PrefillSurface.through(
    {
        0: through([(100, 10.0), (1_000, 100.0), (8_000, 1_000.0)]),
        1_000: through([(100, 12.0), (1_000, 120.0)]),
        4_000: through([(100, 18.0), (1_000, 180.0)]),
    }
)


def test_a_surface_gives_back_its_points():
    assert SURFACE.at(1_000, 0) == 100.0
    assert SURFACE.at(100, 1_000) == 12.0
    assert SURFACE.at(1_000, 4_000) == 180.0


def test_between_points_a_surface_is_bilinear():
    assert SURFACE.at(550, 2_500) == pytest.approx((66.0 + 99.0) / 2)


def test_the_same_new_tokens_cost_more_on_more_context():
    assert SURFACE.at(900, 7_000) > SURFACE.at(900, 4_000) > SURFACE.at(900, 0)


def test_fewer_new_tokens_than_were_measured_cost_what_the_fewest_did():
    assert SURFACE.at(1, 1_000) == SURFACE.at(100, 1_000)
    assert SURFACE.at(0, 1_000) == 0.0


def test_beyond_its_rows_and_columns_a_surface_continues_the_last_segments():
    assert SURFACE.at(1_000, 7_000) == pytest.approx(180.0 + 3_000 * 60.0 / 3_000)
    assert SURFACE.at(9_000, 0) == pytest.approx(1_000.0 + 1_000 * 900.0 / 7_000)


@given(st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 50_000), st.integers(0, 50_000))
def test_more_work_never_costs_less_on_a_surface(new, context, more_new, more_context):
    few = SURFACE.at(new, context)
    assert SURFACE.at(new + more_new, context) >= few - 1e-9
    assert SURFACE.at(new, context + more_context) >= few - 1e-9


@given(
    st.lists(st.lists(st.floats(0.1, 1_000), min_size=3, max_size=3), min_size=3, max_size=3),
    st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)),
    st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)),
)
def test_a_disturbed_grid_still_never_makes_more_work_cheaper(rows, at, more):
    curves = {
        context: PiecewiseLinear.growing(zip((32.0, 256.0, 1_024.0), ms, strict=True))
        for context, ms in zip((0, 512, 2_048), rows, strict=True)
    }
    surface = PrefillSurface.through(curves)
    assert surface.at(at[0] + more[0], at[1] + more[1]) >= surface.at(*at) - 1e-6


def test_a_surface_needs_the_curve_without_context():
    with pytest.raises(ValueError, match="context 0"):
        PrefillSurface.through({512: PREFILL, 1_024: PREFILL})


def test_a_curve_through_disturbed_points_is_raised_where_it_would_fall():
    curve = PiecewiseLinear.growing([(300, 30.0), (100, 10.0), (200, 40.0), (100, 20.0)])
    assert (curve.xs, curve.ms) == ((100, 200, 300), (15.0, 40.0, 40.0))


def test_the_cost_model_of_a_profile_has_every_term_that_was_measured():
    profile = assumed_profile(assumed_key(), 0.5, ms_per_context_token=0.01, restore_ms_per_mb=2.0)
    model = cost_model(profile)
    assert model.cost_ms(StateWork(512)) == pytest.approx(256.0)
    assert model.cost_ms(StateWork(512, context_tokens=4_096)) == pytest.approx(256.0 + 40.96)
    work = StateWork(512, 4_096, restore_bytes=10_000_000, outstanding_restore_bytes=5_000_000)
    assert model.cost_ms(work) == pytest.approx(256.0 + 40.96 + 20.0 + 10.0)


def test_the_papers_cost_model_looks_at_no_context():
    profile = assumed_profile(assumed_key(), 0.5, ms_per_context_token=0.01, restore_ms_per_mb=2.0)
    model = cost_model(profile, by_context=False)
    assert model.cost_ms(StateWork(512, context_tokens=4_096)) == pytest.approx(256.0)
    assert model.cost_ms(StateWork(512, restore_bytes=10_000_000)) == pytest.approx(276.0)
