"""The fleet as placement sees it: what is kept up to date step by step is what one would see afresh."""

from hypothesis import given, settings
from hypothesis import strategies as st

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.snapshot import Capability, EngineSnapshot
from coda_router.fleet.address import WorkerAddress
from coda_router.fleet.lineup import Lineup
from coda_router.fleet.worker import TELEMETRY_TIMEOUT_S, Worker
from coda_router.placement.candidates import Candidates

KNOWS_IDENTITY = {Feature.IDENTITY: Capability(enabled=True, reason=Reason.ENABLED)}


def lineup_of(count: int) -> tuple[Lineup, list[Worker]]:
    lineup = Lineup()
    workers = [
        Worker(WorkerAddress.parse(f"http://10.0.0.{n}:8000"), "me", on_changed=lineup.changed) for n in range(count)
    ]
    lineup.consist_of(workers)
    return lineup, workers


def snapshot(**fields: object) -> EngineSnapshot:
    return EngineSnapshot.model_validate(
        {"instance_id": "i", "version": 1, "published_at_s": 0.0, "started_at_s": 0.0, "served_models": ["m"]} | fields
    )


def figures(candidates: Candidates) -> tuple[object, ...]:
    return (
        list(candidates),
        list(candidates.loads),
        list(candidates.waiting),
        candidates.silent,
        candidates.unfit,
        [candidates.all_serve(model) for model in ("m", "m0", "m1")],
        [candidates.position(view.name) for view in candidates],
    )


EVENTS = st.lists(
    st.tuples(
        st.integers(0, 4),
        st.sampled_from(["snapshot", "begin", "end", "up", "down", "models", "time", "look"]),
        st.integers(0, 70),
    ),
    max_size=40,
)


@settings(deadline=None)
@given(EVENTS)
def test_what_is_brought_up_to_date_is_what_one_sees_afresh(events: list[tuple[int, str, int]]):
    lineup, workers = lineup_of(5)
    now_s = 100.0
    for number, event, amount in events:
        worker = workers[number]
        if event == "snapshot":
            worker.take_snapshot(snapshot(waiting_by_tier={0: amount}, draining=amount % 9 == 8), now_s)
        elif event == "begin":
            worker.begin_request(amount)
        elif event == "end" and worker.in_flight_requests:
            worker.end_request()
        elif event in {"up", "down"}:
            worker.set_health(event == "up")
        elif event == "models":
            worker.take_models(frozenset({"m", f"m{amount % 2}"}))
        elif event == "time":
            now_s += amount / 20
        assert figures(lineup.candidates(now_s)) == figures(Candidates([w.view(now_s) for w in workers]))


def test_a_decision_keeps_what_it_saw_while_the_fleet_moves_on():
    lineup, workers = lineup_of(3)
    seen = lineup.candidates(0.0)
    workers[1].begin_request()
    assert lineup.candidates(0.0).loads == [0, 1, 0]
    assert (list(seen.loads), seen[1].in_flight_requests) == ([0, 0, 0], 0)


def test_silence_is_noticed_without_any_event():
    lineup, workers = lineup_of(2)
    workers[0].take_snapshot(snapshot(), 10.0)
    workers[1].take_snapshot(snapshot(), 11.0)
    assert lineup.candidates(10.0 + TELEMETRY_TIMEOUT_S).silent == 0
    assert lineup.candidates(10.1 + TELEMETRY_TIMEOUT_S).silent == 1
    assert lineup.candidates(11.1 + TELEMETRY_TIMEOUT_S).silent == 2


def test_a_worker_that_left_changes_nothing_any_more():
    lineup, workers = lineup_of(3)
    lineup.candidates(0.0)
    lineup.consist_of(workers[:2])
    workers[2].begin_request()
    workers[0].begin_request()
    assert [view.name for view in lineup.candidates(0.0)] == ["10.0.0.0:8000", "10.0.0.1:8000"]
    assert lineup.candidates(0.0).loads == [1, 0]


def test_prefill_tokens_on_their_way_count_until_the_engine_counts_them():
    _, (worker, *_) = lineup_of(1)
    worker.take_snapshot(snapshot(capabilities=KNOWS_IDENTITY, pending_prefill_tokens=5_000), 0.0)
    for tokens in (1_000, 200, 30):
        worker.begin_request(tokens)
    assert worker.view(0.0).pending_prefill_tokens == 6_230
    counted = snapshot(
        capabilities=KNOWS_IDENTITY, pending_prefill_tokens=6_000, requests_by_router={"me": 2}, running_by_tier={0: 2}
    )
    worker.take_snapshot(counted, 0.0)
    assert worker.view(0.0).pending_prefill_tokens == 6_030
