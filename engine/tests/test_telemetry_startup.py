"""Startup costs of resumed requests: who counts, on which path, and from when to when."""

import pytest
from hand_clock import HandClock

from coda_engine.contract.reasons import PreparationPath
from coda_engine.vllm_adapter.telemetry.histogram import Histogram
from coda_engine.vllm_adapter.telemetry.startup import STARTUP_BOUNDS_S, StartupCosts


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def costs(clock):
    return StartupCosts(clock)


def counted(costs: StartupCosts) -> dict[str, int]:
    return {path.value: sum(state["counts"]) for path, state in costs.states().items() if sum(state["counts"])}


def turn(
    costs: StartupCosts, clock: HandClock, name: str, hbm: int, shadow: int, prompt: int, seconds: float = 0.3
) -> None:
    costs.admitted(name, "s", hbm, shadow, prompt)
    clock.now_s += seconds
    costs.first_token(name)
    costs.over(name, "s", prompt + 10)


def test_a_session_s_first_request_is_not_resumed(costs, clock):
    turn(costs, clock, "one", 0, 0, 500)
    assert counted(costs) == {}


def test_a_request_of_no_session_is_never_resumed(costs, clock):
    for name in ("one", "two"):
        costs.admitted(name, "", 0, 0, 500)
        costs.first_token(name)
        costs.over(name, "", 510)
    assert counted(costs) == {}


@pytest.mark.parametrize(
    ("hbm", "shadow", "path"),
    [
        (480, 0, PreparationPath.HBM),
        (0, 480, PreparationPath.SHADOW),
        (128, 352, PreparationPath.SHADOW),
        (0, 0, PreparationPath.RECOMPUTE),
        (128, 64, PreparationPath.RECOMPUTE),
    ],
)
def test_the_path_is_told_by_what_the_session_had_before(costs, clock, hbm, shadow, path):
    turn(costs, clock, "one", 0, 0, 500)
    turn(costs, clock, "two", hbm, shadow, 2_000)
    assert counted(costs) == {path.value: 1}


def test_much_new_text_on_a_resident_history_is_the_hbm_path(costs, clock):
    turn(costs, clock, "one", 0, 0, 500)
    turn(costs, clock, "two", 500, 0, 60_000)
    assert counted(costs) == {PreparationPath.HBM.value: 1}


def test_the_cost_runs_from_admission_to_the_first_token(costs, clock):
    turn(costs, clock, "one", 0, 0, 500)
    clock.now_s += 40
    turn(costs, clock, "two", 480, 0, 600, seconds=0.3)
    state = costs.states()[PreparationPath.HBM]
    assert state["total"] == pytest.approx(0.3)
    assert state["counts"][STARTUP_BOUNDS_S.index(0.4)] == 1


def test_an_admission_after_a_preemption_does_not_start_the_clock_anew(costs, clock):
    turn(costs, clock, "one", 0, 0, 500)
    costs.admitted("two", "s", 480, 0, 600)
    clock.now_s += 1.0
    costs.admitted("two", "s", 0, 0, 600)
    clock.now_s += 1.0
    costs.first_token("two")
    assert costs.states()[PreparationPath.HBM]["total"] == pytest.approx(2.0)


def test_a_request_that_leaves_without_a_token_counts_for_nothing(costs, clock):
    turn(costs, clock, "one", 0, 0, 500)
    costs.admitted("two", "s", 480, 0, 600)
    costs.over("two", "s", 600)
    costs.first_token("two")
    assert counted(costs) == {}
    assert costs.starting == []


def test_the_least_recently_used_sessions_are_forgotten(clock):
    costs = StartupCosts(clock, max_sessions=2)
    for session in ("a", "b", "a", "c"):
        costs.over("r", session, 100)
    for session in ("a", "b", "c"):
        costs.admitted(session, session, 100, 0, 200)
        costs.first_token(session)
    assert counted(costs) == {PreparationPath.HBM.value: 2}


def test_a_histogram_s_bounds_are_inclusive_and_the_rest_has_a_bucket():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 2.0, 99.0):
        histogram.observe(value)
    assert histogram.state() == {"counts": [2, 2, 1], "total": pytest.approx(104.0)}
