"""The cohort planner's gates and ties (paper section 4.3, Appendix A)."""

import math

from hypothesis import given
from hypothesis import strategies as st

from coda_engine.contract.reasons import PlanReason
from coda_engine.contract.settings import ExecutionAdmissionSettings
from coda_engine.policy.execution_admission import CohortPlan, CompatibilityAware
from coda_engine.policy.selection import execution_admission_policy

PLANNER = CompatibilityAware()


class Gains:
    """An attention profile that gives each cut a fixed gain."""

    def __init__(self, gains, *, covered=True, default=0.0):
        self.gains, self.covered, self.default = gains, covered, default

    def covers(self, contexts):
        return self.covered

    def conservative_gain(self, ordered_contexts, cut, launch_allowance_ms):
        assert list(ordered_contexts) == sorted(ordered_contexts)
        return self.gains.get(cut, self.default)


def test_fewer_than_four_requests_stay_together():
    assert PLANNER.plan([10, 500, 9_000], Gains({}, default=1.0)) == CohortPlan(0, PlanReason.TOO_FEW_REQUESTS)


def test_similar_contexts_stay_together():
    assert PLANNER.plan([1_000, 1_100, 1_200, 1_499], Gains({})).reason is PlanReason.TOO_UNIFORM


def test_the_ratio_is_reached_at_exactly_one_and_a_half():
    assert PLANNER.plan([1_000, 1_100, 1_200, 1_500], None).reason is PlanReason.NO_ATTENTION_PROFILE


def test_shapes_outside_the_measured_domain_stay_together():
    assert PLANNER.plan([1, 1, 9, 9], Gains({2: 1.0}, covered=False)).reason is PlanReason.OUT_OF_DOMAIN


def test_a_gain_below_gamma_stays_together_and_is_told():
    plan = PLANNER.plan([9, 1, 9, 1], Gains({2: 0.049}))
    assert plan == CohortPlan(0, PlanReason.GAIN_TOO_SMALL, 0.049)


def test_a_gain_of_gamma_splits():
    assert PLANNER.plan([9, 1, 9, 1], Gains({2: 0.05})) == CohortPlan(2, PlanReason.COHORTS, 0.05)


def test_the_best_gain_wins():
    assert PLANNER.plan([1] * 5 + [9] * 5, Gains({4: 0.1, 5: 0.2, 6: 0.3})).cut == 6


def test_equal_gains_favour_the_balanced_cut():
    assert PLANNER.plan([1] * 5 + [9] * 5, Gains({4: 0.2, 5: 0.2, 6: 0.2})).cut == 5


def test_equally_balanced_cuts_favour_the_smaller():
    assert PLANNER.plan([1] * 5 + [9] * 4, Gains({4: 0.2, 5: 0.2})).cut == 4


def test_no_cut_leaves_enough_on_both_sides():
    planner = CompatibilityAware(min_requests=4, min_cohort=3)
    assert planner.plan([1, 1, 9, 9], Gains({2: 1.0})).reason is PlanReason.NO_BALANCED_CUT


@given(st.integers(4, 300))
def test_every_cut_leaves_m_requests_on_both_sides(population):
    smallest = max(2, math.ceil(0.35 * population))
    cuts = PLANNER.cuts(population)
    assert all(cut >= smallest and population - cut >= smallest for cut in cuts)
    assert population // 2 in cuts


@given(st.lists(st.integers(1, 100_000), min_size=0, max_size=64), st.floats(-1, 1))
def test_a_plan_is_the_complete_population_or_a_partition_of_it(contexts, gain):
    plan = PLANNER.plan(contexts, Gains({}, default=gain))
    assert (plan.cut in PLANNER.cuts(len(contexts))) == (plan.reason is PlanReason.COHORTS)
    assert plan.cut == 0 or plan.gain >= PLANNER.min_gain


def test_settings_become_the_planner():
    settings = ExecutionAdmissionSettings(min_requests=8, min_cohort=3, min_gain=0.1)
    assert execution_admission_policy(settings) == CompatibilityAware(min_requests=8, min_cohort=3, min_gain=0.1)
    assert execution_admission_policy(ExecutionAdmissionSettings()) == PLANNER
