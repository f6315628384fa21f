"""The cost of state preparation (paper eq. 1, Appendix A)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coda_engine.policy.cost import PiecewiseLinear, StateCostModel, StateWork

PREFILL = PiecewiseLinear.through([(100, 10.0), (1_000, 80.0), (2_000, 200.0)])


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
    disturbed = PiecewiseLinear.through([(100, 10.0), (1_000, 100.0), (2_000, 90.0)])
    assert disturbed.at(4_000) == pytest.approx(90.0 + 2_000 * 90.0 / 2_000)


@pytest.mark.parametrize(
    "points", [[(100, 1.0)], [(100, 1.0), (100, 2.0)], [(200, 1.0), (100, 2.0)], [(0, 0.0), (100, 1.0)]]
)
def test_curves_that_are_none_are_refused(points):
    with pytest.raises(ValueError, match="curve"):
        PiecewiseLinear.through(points)


@given(st.integers(0, 100_000), st.integers(0, 100_000))
def test_more_tokens_never_cost_less_on_a_growing_curve(one, other):
    few, many = sorted((one, other))
    assert PREFILL.at(few) <= PREFILL.at(many)


def test_prefill_is_the_whole_cost_without_shadow_and_ssd():
    model = StateCostModel(PREFILL)
    assert model.cost_ms(StateWork(1_000, restore_bytes=10**9, load_bytes=10**9, outstanding_restore_ms=50)) == 80.0


def test_restoring_waits_for_what_the_transfer_domain_already_has_to_do():
    model = StateCostModel(PREFILL, restore=PiecewiseLinear.through([(1_000, 1.0), (2_000, 2.0)]))
    assert model.cost_ms(StateWork(100, restore_bytes=2_000, outstanding_restore_ms=7.0)) == pytest.approx(19.0)
    assert model.cost_ms(StateWork(100, restore_bytes=0, outstanding_restore_ms=7.0)) == pytest.approx(10.0)


def test_loading_from_ssd_adds_its_own_curve():
    model = StateCostModel(PREFILL, load=PiecewiseLinear.through([(1_000, 4.0), (2_000, 8.0)]))
    assert model.cost_ms(StateWork(100, load_bytes=1_000)) == pytest.approx(14.0)
