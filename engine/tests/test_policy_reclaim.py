"""Survival curves and victim orders: against numeric integration, published statistics and by hand."""

from math import inf, isclose

import numpy as np
import pytest

from coda_engine.policy.reclaim import CacheWise, Cycle, FixedPrior, Idleness, IdleSession, ToolAware
from coda_engine.policy.tool_gaps import GAP_BOUNDS_S, HUMAN_PRIOR, TOOL_PRIOR, GapCounts, SurvivalCurve
from coda_engine.policy.tool_use import ToolKind, ToolUse

CURVES = {**{kind.value: curve for kind, curve in TOOL_PRIOR.items()}, "human": HUMAN_PRIOR}

MIX = {
    ToolKind.READ: 0.242, ToolKind.EDIT: 0.110, ToolKind.SEARCH: 0.114, ToolKind.VCS: 0.090, ToolKind.RUN: 0.167,
    ToolKind.TEST: 0.084, ToolKind.BUILD: 0.061, ToolKind.INSTALL: 0.023, ToolKind.NETWORK: 0.028,
    ToolKind.AGENT: 0.005, ToolKind.PLAN: 0.010, ToolKind.ASK: 0.003, ToolKind.OTHER: 0.063,
}  # fmt: skip
"""The published mix (execute 76%, write 11, read 9, others 4), its execute part divided by assumption."""


def numeric_rest_s(curve: SurvivalCurve, elapsed_s: float) -> float:
    """Return the mean rest by the trapezoidal rule, far out into the tail."""
    grid = np.concatenate(
        [np.linspace(elapsed_s, elapsed_s + curve.times_s[0], 2_000), np.geomspace(1e-3, 1e12, 400_000) + elapsed_s]
    )
    grid = np.unique(grid)
    times, levels = np.array(curve.times_s), np.array(curve.survival)
    log_survival = np.interp(np.log(np.maximum(grid, 1e-12)), np.log(times), np.log(levels))
    survival = np.exp(log_survival)
    survival = np.where(grid > times[-1], levels[-1] * (np.maximum(grid, 1e-12) / times[-1]) ** -1.5, survival)
    survival = np.where(grid < times[0], 1 - (1 - levels[0]) * grid / times[0], survival)
    return float(np.trapezoid(survival, grid) / survival[0])


@pytest.mark.parametrize("name", CURVES)
@pytest.mark.parametrize("elapsed_s", [0.0, 0.004, 0.03, 0.7, 12.0, 300.0, 5_000.0, 2_000_000.0])
def test_the_mean_rest_is_the_integral_of_survival(name, elapsed_s):
    assert isclose(CURVES[name].mean_rest_s(elapsed_s), numeric_rest_s(CURVES[name], elapsed_s), rel_tol=0.01)


@pytest.mark.parametrize("name", CURVES)
def test_survival_falls_from_one_and_is_continuous(name):
    grid = np.geomspace(1e-3, 1e7, 5_000)
    values = np.array([CURVES[name].at(time_s) for time_s in grid])
    assert CURVES[name].at(0.0) == 1.0
    assert np.all(np.diff(values) < 0)
    assert np.max(-np.diff(np.log(values))) < 0.2


@pytest.mark.parametrize("name", CURVES)
def test_once_a_gap_is_longer_than_usual_its_expected_rest_grows_with_it(name):
    curve = CURVES[name]
    rests = [curve.mean_rest_s(time_s) for time_s in np.geomspace(curve.times_s[2], 1e8, 60)]
    assert rests[-1] > 10 * rests[0]
    assert curve.mean_rest_s(1e8) == pytest.approx(2e8)


def test_the_curve_passes_through_its_points():
    curve = SurvivalCurve.through([(1.0, 0.8), (10.0, 0.2), (100.0, 0.02)])
    assert [curve.at(time_s) for time_s in (1.0, 10.0, 100.0)] == pytest.approx([0.8, 0.2, 0.02])
    assert curve.mean_rest_s(400.0) == pytest.approx(800.0)
    assert curve.mean_rest_s(-1.0) == curve.mean_rest_s(0.0)


def test_a_segment_that_falls_like_one_over_t_is_integrated_too():
    curve = SurvivalCurve.through([(1.0, 0.5), (100.0, 0.005)])
    assert curve.mean_rest_s(1.0) == pytest.approx((0.5 * np.log(100) + 0.005 * 100 / 0.5) / 0.5)


@pytest.mark.parametrize(
    "points",
    [
        [(1.0, 0.5)],
        [(0.0, 0.9), (1.0, 0.5)],
        [(2.0, 0.9), (1.0, 0.5)],
        [(1.0, 0.5), (2.0, 0.5)],
        [(1.0, 1.0), (2.0, 0.5)],
        [(1.0, 0.5), (2.0, 0.0)],
    ],
)
def test_impossible_curves_are_refused(points):
    with pytest.raises(ValueError, match="survival curve"):
        SurvivalCurve.through(points)


@pytest.mark.parametrize(
    ("time_s", "published"),
    [(0.02, 0.9), (0.06, 0.75), (0.209, 0.5), (1.5, 0.25), (8.866, 0.1), (30.013, 0.05), (180.0, 0.01), (1800, 0.001)],
)
def test_the_priors_together_give_the_published_distribution_of_tool_times(time_s, published):
    assert sum(MIX.values()) == pytest.approx(1.0)
    assert sum(share * TOOL_PRIOR[kind].at(time_s) for kind, share in MIX.items()) == pytest.approx(published, rel=0.15)


def test_the_priors_together_give_the_published_mean_and_share_beyond_a_minute():
    assert sum(share * TOOL_PRIOR[kind].at(60.0) for kind, share in MIX.items()) == pytest.approx(0.0397, rel=0.2)
    mean_s = sum(share * TOOL_PRIOR[kind].mean_rest_s(0.0) for kind, share in MIX.items())
    assert mean_s == pytest.approx(16.8, rel=0.2)


def test_every_kind_of_tool_has_a_prior():
    assert set(TOOL_PRIOR) == set(ToolKind)


def test_learnt_counts_move_the_curve_from_the_prior_to_what_was_seen():
    prior = TOOL_PRIOR[ToolKind.TEST]
    counts = GapCounts()
    unseen = counts.curve(prior)
    assert [unseen.at(bound_s) for bound_s in GAP_BOUNDS_S] == pytest.approx([prior.at(b) for b in GAP_BOUNDS_S])
    for _ in range(200):
        counts = counts.seen(30.0)
    learnt = counts.curve(prior)
    assert learnt.at(15.0) > 0.9 > 0.2 > learnt.at(60.0)
    assert 20 < learnt.mean_rest_s(0.0) < 60


def test_learnt_counts_fade_and_stay_bounded():
    counts = GapCounts()
    for _ in range(5_000):
        counts = counts.seen(1.0)
    for _ in range(1_500):
        counts = counts.seen(1e9)
    assert sum(counts.counts) <= 512
    assert counts.counts[-1] > 0.85 * sum(counts.counts)
    assert counts.curve(TOOL_PRIOR[ToolKind.READ]).at(1_000.0) > 0.8


def waiting(kind: ToolKind, idle_s: float) -> IdleSession:
    return IdleSession(idle_s, (ToolUse("tool", kind),))


def test_tool_aware_ranks_by_expected_rest_a_human_s_wait_included():
    order = ToolAware()
    quick, test = order.rank(waiting(ToolKind.READ, 0.1)), order.rank(waiting(ToolKind.TEST, 0.1))
    late, human = order.rank(waiting(ToolKind.READ, 400.0)), order.rank(IdleSession(0.1, ()))
    assert quick < test < late < human < inf
    assert order.rank(IdleSession(1e6, None)) is None


def test_of_parallel_tools_the_longest_counts():
    both = IdleSession(1.0, (ToolUse("a", ToolKind.READ), ToolUse("b", ToolKind.BUILD)))
    assert ToolAware().rank(both) == ToolAware().rank(waiting(ToolKind.BUILD, 1.0))


def test_tool_aware_takes_a_session_s_deepest_block_first_and_sessions_one_after_the_other():
    order = ToolAware()
    blocks = {
        "a3": order.place(5.0, 0, 0, 3), "a2": order.place(5.0, 0, 2, 2),
        "b9": order.place(5.0, 1, 1, 9), "c1": order.place(7.0, 3, 3, 1),
    }  # fmt: skip
    assert sorted(blocks, key=blocks.get) == ["c1", "a3", "a2", "b9"]


def test_cachewise_sends_humans_first_and_then_keeps_lru():
    order = CacheWise()
    assert order.rank(IdleSession(0.1, ())) == inf
    assert order.rank(waiting(ToolKind.TEST, 3.0)) == FixedPrior().mean_rest_s(ToolUse("t", ToolKind.TEST), 3.0)
    assert order.rank(IdleSession(5.0, None)) is None
    assert order.place(5.0, 0, 1, 9) < order.place(5.0, 0, 2, 10)
    assert not order.needs_publication
    assert ToolAware().needs_publication


def test_idleness_is_the_share_of_the_last_rounds_spent_away():
    order = Idleness()
    cycles = [Cycle(1_000.0, 0.0), Cycle(1.0, 1.0), Cycle(1.0, 1.0), Cycle(1.0, 1.0), Cycle(1.0, 1.0)]
    assert order.rank(IdleSession(5.0, None, reasoning_s=1.0, cycles=cycles)) == pytest.approx(9.0 / 14.0)
    assert order.rank(IdleSession(0.0)) == 0.0
    assert order.rank(IdleSession(3.0, None, reasoning_s=1.0)) == pytest.approx(0.75)
    assert order.place(0.5, 0, 1, 9) < order.place(0.5, 0, 2, 10)


def test_idleness_needs_no_tools_to_tell_busy_sessions_from_idle_ones():
    order = Idleness()
    busy = IdleSession(1.0, None, reasoning_s=10.0, cycles=[Cycle(10.0, 1.0)] * 4)
    idle = IdleSession(1.0, None, reasoning_s=1.0, cycles=[Cycle(1.0, 10.0)] * 4)
    assert order.rank(busy) < 0.2 < 0.8 < order.rank(idle)
