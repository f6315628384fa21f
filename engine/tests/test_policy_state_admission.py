"""Tiered-Aging and FIFO as pure decisions (paper section 4.2, Appendix A)."""

import pytest

from coda_engine.contract.reasons import AdmissionReason
from coda_engine.contract.settings import StateAdmissionPolicyName, StateAdmissionSettings
from coda_engine.policy.selection import state_admission_policy
from coda_engine.policy.state_admission import Fifo, ReadyRequest, TieredAging
from coda_engine.policy.state_admission_coda import Coda
from coda_engine.policy.state_admission_rivals import CacheWise, ShortestPreparation

POLICY = TieredAging(tau_ms=5_000.0, max_wait_ms=20_000.0)
NOW_MS = 100_000.0


def ready(name: str, *, waited_ms: float = 0.0, cost_ms: float = 0.0, blocks: int = 0, feasible: bool = True):
    return ReadyRequest(name, NOW_MS - waited_ms, cost_ms, blocks, feasible)


def test_the_cheapest_preparation_goes_first():
    selection = POLICY.select([ready("long", cost_ms=900), ready("resident", cost_ms=30)], NOW_MS)
    assert (selection.request_id, selection.reason) == ("resident", AdmissionReason.LOWEST_AGED_COST)
    assert selection.state_cost_ms == 30


def test_waiting_tau_halves_the_cost():
    assert POLICY.aged_cost_ms(ready("r", waited_ms=5_000, cost_ms=800), NOW_MS) == pytest.approx(400)
    assert POLICY.aged_cost_ms(ready("r", waited_ms=15_000, cost_ms=800), NOW_MS) == pytest.approx(200)


def test_age_makes_an_expensive_request_win_before_the_guard():
    old, new = ready("old", waited_ms=15_000, cost_ms=390), ready("new", cost_ms=100)
    assert POLICY.select([new, old], NOW_MS).request_id == "old"


def test_a_request_from_the_future_has_age_zero():
    assert POLICY.aged_cost_ms(ready("r", waited_ms=-60_000, cost_ms=800), NOW_MS) == 800


def test_past_max_wait_the_oldest_feasible_request_goes_first():
    costly = ready("oldest", waited_ms=20_000, cost_ms=1_000_000)
    selection = POLICY.select([ready("cheap", cost_ms=1), ready("old", waited_ms=19_000, cost_ms=1), costly], NOW_MS)
    assert (selection.request_id, selection.reason) == ("oldest", AdmissionReason.MAX_WAIT_REACHED)
    assert selection.wait_ms == 20_000


def test_just_below_max_wait_costs_still_decide():
    costly = ready("oldest", waited_ms=19_999, cost_ms=1_000_000)
    assert POLICY.select([costly, ready("cheap", cost_ms=1)], NOW_MS).request_id == "cheap"


def test_the_guard_never_promotes_what_does_not_fit():
    stuck = ready("stuck", waited_ms=60_000, cost_ms=1, feasible=False)
    selection = POLICY.select([stuck, ready("fits", waited_ms=10, cost_ms=500)], NOW_MS)
    assert (selection.request_id, selection.reason) == ("fits", AdmissionReason.LOWEST_AGED_COST)


def test_nothing_feasible_is_no_decision():
    selection = POLICY.select([ready("a", feasible=False), ready("b", feasible=False)], NOW_MS)
    assert (selection.request_id, selection.reason) == (None, AdmissionReason.NOTHING_FEASIBLE)


@pytest.mark.parametrize("policy", [POLICY, Fifo()])
def test_nothing_waiting_is_no_decision(policy):
    selection = policy.select([], NOW_MS)
    assert (selection.request_id, selection.reason) == (None, AdmissionReason.NOTHING_WAITING)


def test_a_single_candidate_is_named_as_such():
    assert POLICY.select([ready("only", cost_ms=5)], NOW_MS).reason is AdmissionReason.ONLY_CANDIDATE


def test_equal_aged_costs_are_resolved_by_raw_cost():
    aged = ready("aged", waited_ms=5_000, cost_ms=200)
    fresh = ready("fresh", cost_ms=100)
    assert POLICY.select([aged, fresh], NOW_MS).request_id == "fresh"


def test_equal_costs_are_resolved_by_fewer_additional_blocks():
    more, fewer = ready("more", cost_ms=100, blocks=9), ready("fewer", cost_ms=100, blocks=3)
    assert POLICY.select([more, fewer], NOW_MS).request_id == "fewer"


def test_equal_costs_and_blocks_are_resolved_by_ready_time():
    # Cost 0 keeps the aged costs equal although the ages differ.
    later, earlier = ready("later", waited_ms=10), ready("earlier", waited_ms=20)
    assert POLICY.select([later, earlier], NOW_MS).request_id == "earlier"


def test_fifo_takes_the_native_head_and_looks_at_nothing():
    selection = Fifo().select([ready("head", cost_ms=9e9, feasible=False), ready("cheap")], NOW_MS)
    assert (selection.request_id, selection.reason) == ("head", AdmissionReason.READY_ORDER)
    assert not Fifo().needs_inspection
    assert POLICY.needs_inspection


@pytest.mark.parametrize(("tau_ms", "max_wait_ms"), [(0, 1), (-1, 1), (1, 0)])
def test_impossible_constants_are_refused(tau_ms, max_wait_ms):
    with pytest.raises(ValueError, match="must be positive"):
        TieredAging(tau_ms=tau_ms, max_wait_ms=max_wait_ms)


def test_settings_name_the_policy_and_its_constants():
    paper = StateAdmissionSettings(policy=StateAdmissionPolicyName.TIERED_AGING)
    assert state_admission_policy(paper) == TieredAging(5_000, 20_000)
    assert state_admission_policy(paper.model_copy(update={"tau_ms": 7, "max_wait_ms": 11})) == TieredAging(7, 11)
    assert state_admission_policy(StateAdmissionSettings(policy=StateAdmissionPolicyName.FIFO)) == Fifo()
    assert state_admission_policy(StateAdmissionSettings(policy=StateAdmissionPolicyName.CACHEWISE)) == CacheWise()
    shortest = StateAdmissionSettings(policy=StateAdmissionPolicyName.SHORTEST_PREPARATION)
    assert state_admission_policy(shortest) == ShortestPreparation()
    assert state_admission_policy(StateAdmissionSettings()) == Coda()
    own = StateAdmissionSettings(tau_ms=7, on_time_ms=0, reserve_for_oldest=False)
    assert state_admission_policy(own) == Coda(TieredAging(7, 70_000), on_time_ms=0, reserve=False)
