"""Coda's own order and its rivals' as pure decisions, each against a plain reference."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coda_engine.contract.reasons import AdmissionReason
from coda_engine.policy.state_admission import ReadyRequest, StateAdmissionPolicy, TieredAging
from coda_engine.policy.state_admission_coda import Coda
from coda_engine.policy.state_admission_rivals import CacheWise, Oracle, ShortestPreparation

NOW_MS = 100_000.0
CODA = Coda(TieredAging(tau_ms=20_000, max_wait_ms=60_000), on_time_ms=4_000)
EVERY = (CODA, Coda(reserve=False), Coda(on_time_ms=0), TieredAging(), CacheWise(), ShortestPreparation(), Oracle())


def ready(name: str, *, waited_ms: float = 0.0, cost_ms: float = 0.0, feasible: bool = True, **fields: int):
    return ReadyRequest(name, NOW_MS - waited_ms, cost_ms, feasible=feasible, **fields)


def chosen(policy: StateAdmissionPolicy, *candidates: ReadyRequest):
    selection = policy.select(candidates, NOW_MS)
    return selection.request_id, selection.reason


frontiers = st.lists(
    st.builds(
        ReadyRequest,
        st.uuids().map(str),
        st.floats(0, NOW_MS),
        st.floats(0, 5_000),
        st.integers(0, 90),
        st.booleans(),
        st.integers(0, 90),
        st.integers(1, 100),
    ),
    max_size=12,
)


@pytest.mark.parametrize("policy", EVERY)
@given(frontiers)
def test_only_a_reservation_puts_first_what_does_not_fit(policy, candidates):
    selection = policy.select(candidates, NOW_MS)
    by_name = {request.request_id: request for request in candidates}
    if selection.request_id is not None:
        assert by_name[selection.request_id].feasible != selection.reserves
    elif candidates:
        assert selection.reason is AdmissionReason.NOTHING_FEASIBLE
        assert not any(request.feasible for request in candidates)


@given(frontiers)
def test_cachewise_takes_the_fewest_blocks_in_no_tier_then_the_earliest_then_the_id(candidates):
    expected = sorted((r.blocks_to_compute, r.ready_at_ms, r.request_id) for r in candidates if r.feasible)
    assert CacheWise().select(candidates, NOW_MS).request_id == (expected[0][2] if expected else None)


@given(frontiers)
def test_shortest_preparation_takes_the_lowest_cost_whatever_the_age(candidates):
    selection = ShortestPreparation().select(candidates, NOW_MS)
    feasible = [request for request in candidates if request.feasible]
    if feasible:
        assert selection.state_cost_ms == min(request.state_cost_ms for request in feasible)


def test_ties_of_cachewise_are_resolved_by_arrival_then_id():
    same = [ready("b", waited_ms=5, blocks_to_compute=3), ready("a", waited_ms=5, blocks_to_compute=3)]
    assert chosen(CacheWise(), *same, ready("c", waited_ms=4, blocks_to_compute=3))[0] == "a"


def test_the_oracle_adds_the_output_s_time():
    talker, worker = ready("talker", cost_ms=10, output_tokens=90), ready("worker", cost_ms=900, output_tokens=4)
    assert chosen(Oracle(token_ms=25), talker, worker) == ("worker", AdmissionReason.SHORTEST_JOB)
    assert chosen(Oracle(token_ms=0), talker, worker)[0] == "talker"


def test_who_can_still_be_on_time_goes_before_a_cheaper_one_that_is_late():
    on_time, late = ready("on-time", waited_ms=1_000, cost_ms=2_900), ready("late", waited_ms=4_500, cost_ms=10)
    assert chosen(CODA, late, on_time) == ("on-time", AdmissionReason.CHEAPEST_ON_TIME)
    assert chosen(Coda(on_time_ms=0), late, on_time) == ("late", AdmissionReason.LOWEST_AGED_COST)


def test_who_would_be_late_by_its_own_preparation_is_late():
    hopeless, late = ready("hopeless", cost_ms=4_001), ready("late", waited_ms=4_500, cost_ms=10)
    assert chosen(CODA, hopeless, late) == ("late", AdmissionReason.LOWEST_AGED_COST)


def test_freed_blocks_are_kept_for_the_oldest_once_it_has_waited_max_wait():
    oldest = ready("oldest", waited_ms=60_000, cost_ms=900, feasible=False)
    small = ready("small", cost_ms=1)
    assert chosen(CODA, small, oldest) == ("oldest", AdmissionReason.RESERVED_FOR_OLDEST)
    assert chosen(Coda(reserve=False), small, oldest) == ("small", AdmissionReason.CHEAPEST_ON_TIME)
    assert chosen(TieredAging(), small, oldest)[0] == "small"


def test_just_before_max_wait_nothing_is_kept():
    oldest = ready("oldest", waited_ms=59_999, cost_ms=900, feasible=False)
    assert chosen(CODA, ready("small", cost_ms=1), oldest)[0] == "small"


def test_an_oldest_request_that_fits_goes_first_by_the_guard():
    oldest = ready("oldest", waited_ms=60_000, cost_ms=900)
    assert chosen(CODA, ready("small", cost_ms=1), oldest) == ("oldest", AdmissionReason.MAX_WAIT_REACHED)


def test_without_the_reservation_the_guard_takes_the_oldest_that_fits():
    stuck = ready("stuck", waited_ms=90_000, feasible=False)
    old, young = ready("old", waited_ms=70_000, cost_ms=900), ready("young", cost_ms=1)
    assert chosen(Coda(reserve=False), young, old, stuck) == ("old", AdmissionReason.MAX_WAIT_REACHED)


@given(frontiers)
def test_without_its_own_rules_coda_is_tiered_aging(candidates):
    aging = TieredAging(tau_ms=5_000, max_wait_ms=20_000)
    plain = Coda(aging, on_time_ms=0, reserve=False)
    assert plain.select(candidates, NOW_MS) == aging.select(candidates, NOW_MS)


def test_impossible_constants_are_refused():
    with pytest.raises(ValueError, match="on_time_ms"):
        Coda(on_time_ms=-1)
    with pytest.raises(ValueError, match="token_ms"):
        Oracle(token_ms=-1)
