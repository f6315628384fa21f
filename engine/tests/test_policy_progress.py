"""Orders simulated to the end: nobody is lost, nobody is served twice, nobody is bypassed for ever."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coda_engine.contract.reasons import AdmissionReason
from coda_engine.policy.state_admission import ReadyRequest, StateAdmissionPolicy, TieredAging
from coda_engine.policy.state_admission_coda import Coda
from coda_engine.policy.state_admission_rivals import CacheWise, ShortestPreparation

POLICY = TieredAging(tau_ms=500.0, max_wait_ms=2_000.0)
CODA = Coda(POLICY, on_time_ms=800.0)


@dataclass(frozen=True)
class Job:
    """A request of the simulation: when it becomes ready, what it costs, how many blocks it holds and for how long."""

    ready_at_ms: int
    cost_ms: int
    blocks: int
    runs_ms: int


@dataclass(frozen=True)
class Served:
    """One admission of the simulation: who, when, why, and who else was ready and would have fitted."""

    name: int
    at_ms: float
    reason: AdmissionReason
    feasible_others: tuple[int, ...]


CAPACITY_BLOCKS = 64

jobs_strategy = st.lists(
    st.builds(
        Job, st.integers(0, 20_000), st.integers(1, 3_000), st.integers(1, CAPACITY_BLOCKS), st.integers(1, 2_000)
    ),
    min_size=1,
    max_size=40,
)


def simulate(jobs: list[Job], policy: StateAdmissionPolicy = POLICY, frontier: int = 64) -> list[Served]:
    """Serve every job: preparations one after the other, blocks held while a job runs.

    As in vLLM, nobody is admitted behind a head that does not fit.
    """
    waiting = sorted(range(len(jobs)), key=lambda name: jobs[name].ready_at_ms)
    holding: list[tuple[float, int]] = []
    served: list[Served] = []
    now_ms = 0.0
    while waiting:
        holding = [(until_ms, blocks) for until_ms, blocks in holding if until_ms > now_ms]
        free = CAPACITY_BLOCKS - sum(blocks for _, blocks in holding)
        ready = [name for name in waiting if jobs[name].ready_at_ms <= now_ms][:frontier]
        candidates = [
            ReadyRequest(str(n), jobs[n].ready_at_ms, jobs[n].cost_ms, jobs[n].blocks, jobs[n].blocks <= free)
            for n in ready
        ]
        selection = policy.select(candidates, now_ms)
        if selection.request_id is None or selection.reserves:
            moments = [jobs[name].ready_at_ms for name in waiting] + [until_ms for until_ms, _ in holding]
            now_ms = min(moment for moment in moments if moment > now_ms)
            continue
        winner = int(selection.request_id)
        others = tuple(n for n, c in zip(ready, candidates, strict=True) if c.feasible and n != winner)
        served.append(Served(winner, now_ms, selection.reason, others))
        waiting.remove(winner)
        now_ms += jobs[winner].cost_ms
        holding.append((now_ms + jobs[winner].runs_ms, jobs[winner].blocks))
    return served


@pytest.mark.parametrize("policy", [POLICY, CODA, Coda(POLICY, reserve=False), CacheWise(), ShortestPreparation()])
@settings(deadline=None)
@given(jobs_strategy)
def test_every_request_is_served_exactly_once(policy, jobs):
    assert sorted(event.name for event in simulate(jobs, policy)) == list(range(len(jobs)))


@settings(deadline=None)
@given(jobs_strategy)
def test_codas_waits_are_bounded_whether_a_request_fits_or_not(jobs):
    drain_ms = max(job.cost_ms for job in jobs) + max(job.runs_ms for job in jobs)
    for event in simulate(jobs, CODA):
        older = sum(job.ready_at_ms <= jobs[event.name].ready_at_ms for job in jobs)
        # Once the guard is reached everything that holds blocks drains, for the older ones and then for this one.
        assert event.at_ms - jobs[event.name].ready_at_ms <= POLICY.max_wait_ms + older * drain_ms


def test_a_stream_of_small_requests_starves_a_large_one_unless_blocks_are_kept_for_it():
    large = Job(0, 100, CAPACITY_BLOCKS, 100)
    stream = [Job(300 * number, 50, 20, 900) for number in range(100)]
    waits_ms = {
        policy: next(event.at_ms for event in simulate([*stream, large], policy) if event.name == len(stream))
        for policy in (POLICY, CODA)
    }
    assert waits_ms[POLICY] > 25_000
    assert waits_ms[CODA] <= POLICY.max_wait_ms + 50 + 900


@settings(deadline=None)
@given(jobs_strategy)
def test_past_max_wait_no_younger_feasible_request_overtakes(jobs):
    for event in simulate(jobs):
        for other in event.feasible_others:
            waited_ms = event.at_ms - jobs[other].ready_at_ms
            if waited_ms >= POLICY.max_wait_ms:
                assert jobs[event.name].ready_at_ms <= jobs[other].ready_at_ms


@settings(deadline=None)
@given(jobs_strategy)
def test_a_request_that_always_fits_waits_at_most_the_guard_and_the_older_ones(jobs):
    small = [Job(job.ready_at_ms, job.cost_ms, 1, job.runs_ms) for job in jobs]
    costs_ms = [job.cost_ms for job in small]
    for event in simulate(small):
        older_ms = sum(job.cost_ms for job in small if job.ready_at_ms <= small[event.name].ready_at_ms)
        # The guard's bound: what runs when it is reached, then everybody who became ready earlier.
        bound_ms = POLICY.max_wait_ms + max(costs_ms) + older_ms
        assert event.at_ms - small[event.name].ready_at_ms <= bound_ms


@settings(deadline=None)
@given(jobs_strategy)
def test_reasons_tell_which_rule_decided(jobs):
    for event in simulate(jobs):
        waited_ms = [event.at_ms - jobs[name].ready_at_ms for name in (event.name, *event.feasible_others)]
        assert (event.reason is AdmissionReason.MAX_WAIT_REACHED) == (max(waited_ms) >= POLICY.max_wait_ms)
