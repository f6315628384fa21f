"""The placement chain, pure: every stage and every fallback with its reason."""

from math import log2

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from coda_engine.contract.settings import PlacementPolicyName, PlacementSettings
from coda_router.placement.chain import PlacementChain, chain_for
from coda_router.placement.decoders import DecodeContexts, log2_tokens
from coda_router.placement.observations import PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason as R

CODA = chain_for(PlacementSettings())
ROUND_ROBIN = chain_for(PlacementSettings(policy=PlacementPolicyName.ROUND_ROBIN))
LEAST_LOADED = chain_for(PlacementSettings(policy=PlacementPolicyName.LEAST_LOADED))
SMETRIC = chain_for(PlacementSettings(policy=PlacementPolicyName.SMETRIC))
EVERY_CHAIN = [chain_for(PlacementSettings(policy=policy)) for policy in PlacementPolicyName]


def worker(name: str, load: int = 0, decoding: tuple[int, ...] = (), **fields: object) -> WorkerView:
    fields["decode_contexts"] = DecodeContexts(decoding)
    return replace(WorkerView(name, load_requests=load, in_flight_requests=load), **fields)


def placed(chain: PlacementChain, request: PlacementRequest, *workers: WorkerView) -> tuple[str | None, R]:
    placement = chain.place(request, workers)
    assert placement.trail[-1] == placement.reason
    return placement.worker, placement.reason


@pytest.mark.parametrize(
    ("workers", "reason"),
    [
        ((), R.NO_WORKERS),
        ((worker("a", is_healthy=False),), R.NONE_HEALTHY),
        ((worker("a", is_draining=True), worker("b", is_healthy=False)), R.ALL_DRAINING),
        ((worker("tried"),), R.ALL_TRIED),
        ((worker("a", models=frozenset({"other"})),), R.MODEL_NOT_SERVED),
        ((worker("a", waiting_requests=64), worker("b", waiting_requests=99)), R.ALL_AT_FRONTIER),
    ],
)
@pytest.mark.parametrize("chain", EVERY_CHAIN)
def test_nobody_can_take_the_request_and_the_reason_says_why(chain: PlacementChain, workers, reason: R):
    request = PlacementRequest(model="m", tried=frozenset({"tried"}))
    assert placed(chain, request, *workers) == (None, reason)


def test_a_worker_whose_models_are_unknown_is_asked_only_when_nobody_is_known_to_serve_the_model():
    known, unknown = worker("known", 9, models=frozenset({"m"})), worker("unknown")
    assert placed(LEAST_LOADED, PlacementRequest(model="m"), known, unknown) == ("known", R.ONLY_CANDIDATE)
    assert placed(LEAST_LOADED, PlacementRequest(model="new"), known, unknown) == ("unknown", R.ONLY_CANDIDATE)


def test_a_first_request_goes_to_the_least_loaded_worker():
    assert placed(CODA, PlacementRequest(), worker("a", 5), worker("b", 2), worker("c", 9))[0] == "b"
    assert placed(LEAST_LOADED, PlacementRequest(), worker("a", 5), worker("b", 4)) == ("b", R.LEAST_LOADED)


def test_a_continuation_goes_where_the_largest_prefix_is_resident():
    request = PlacementRequest(resident_tokens={"a": 900, "b": 4000})
    assert placed(CODA, request, worker("a"), worker("b", 1), worker("c")) == ("b", R.KV_RESIDENT)


def test_what_engines_report_beats_what_the_router_remembers():
    request = PlacementRequest(resident_tokens={"b": 10}, recent_worker="a")
    assert placed(CODA, request, worker("a"), worker("b")) == ("b", R.KV_RESIDENT)


def test_the_recent_placement_decides_while_engines_report_nothing():
    request = PlacementRequest(recent_worker="b")
    assert placed(CODA, request, worker("a"), worker("b", 1)) == ("b", R.RECENT_PLACEMENT)


def test_equal_prefixes_prefer_the_recent_worker():
    request = PlacementRequest(resident_tokens={"a": 10, "b": 10}, recent_worker="b")
    assert all(
        placed(CODA, replace(request, rotation=n), worker("a"), worker("b")) == ("b", R.KV_RESIDENT) for n in range(3)
    )


def test_an_overloaded_home_is_left_and_the_trail_says_so():
    request = PlacementRequest(resident_tokens={"a": 10_000})
    placement = CODA.place(request, (worker("a", 9), worker("b", 1), worker("c", 1)))
    assert placement.worker in {"b", "c"}
    assert R.HOME_OVERLOADED in placement.trail
    assert R.HOME_LOST in placement.trail


def test_a_home_within_the_bound_is_kept_however_idle_the_others_are():
    request = PlacementRequest(resident_tokens={"a": 10_000})
    assert placed(CODA, request, worker("a", 2), worker("b"), worker("c"), worker("d")) == ("a", R.KV_RESIDENT)


def test_an_overloaded_worker_that_is_nobody_s_home_is_removed_too():
    placement = CODA.place(PlacementRequest(), (worker("a", 9), worker("b", 1), worker("c", 1)))
    assert R.OVERLOADED_REMOVED in placement.trail


def test_of_two_workers_either_can_be_overloaded():
    request = PlacementRequest(resident_tokens={"a": 10_000})
    assert placed(CODA, request, worker("a", 4), worker("b", 2)) == ("a", R.KV_RESIDENT)
    assert placed(CODA, request, worker("a", 5), worker("b", 2))[0] == "b"


def test_the_overload_bound_is_the_setting():
    request = PlacementRequest(resident_tokens={"a": 10_000})
    workers = (worker("a", 9), worker("b", 1), worker("c", 1))
    generous = chain_for(PlacementSettings(overload_bound=9.0))
    assert placed(generous, request, *workers) == ("a", R.KV_RESIDENT)


def test_a_home_at_its_frontier_is_left_while_another_has_room():
    request = PlacementRequest(resident_tokens={"a": 10_000})
    placement = CODA.place(request, (worker("a", waiting_requests=64), worker("b", waiting_requests=3)))
    assert placement.worker == "b"
    assert R.HOME_AT_FRONTIER in placement.trail


def test_a_home_that_does_not_answer_is_left():
    request = PlacementRequest(resident_tokens={"a": 10_000})
    placement = CODA.place(request, (worker("a", is_healthy=False), worker("b"), worker("c")))
    assert placement.worker in {"b", "c"}
    assert R.HOME_UNFIT in placement.trail


def test_an_unfit_worker_that_is_not_the_home_is_only_noted():
    request = PlacementRequest(resident_tokens={"b": 10_000})
    placement = CODA.place(request, (worker("a", is_healthy=False), worker("b"), worker("c")))
    assert placement.trail[0] is R.SOME_UNFIT
    assert placement.worker == "b"


def test_a_session_whose_home_lost_everything_is_placed_like_a_new_one_with_its_reason():
    placement = CODA.place(PlacementRequest(has_lost_home=True), (worker("a"), worker("b", 3)))
    assert R.HOME_LOST in placement.trail
    assert placement.worker == "a"
    assert R.NEW_SESSION in CODA.place(PlacementRequest(), (worker("a"), worker("b"))).trail


def test_within_the_load_band_the_nearest_contexts_win():
    request = PlacementRequest(context_tokens=48_000)
    short = worker("short", 2, decoding=(2_000, 3_000))
    alike = worker("alike", 3, decoding=(40_000, 60_000, 50_000))
    far = worker("far", 9, decoding=(48_000,))
    assert placed(CODA, request, short, alike, far) == ("alike", R.CONTEXT_DISTANCE)


def test_a_worker_outside_the_load_band_is_not_considered_for_its_contexts():
    request = PlacementRequest(context_tokens=48_000)
    short = worker("short", 2, decoding=(2_000,))
    alike = worker("alike", 4, decoding=(48_000,))
    assert placed(CODA, request, short, alike) == ("short", R.LEAST_LOADED)


def test_an_idle_worker_mixes_no_contexts():
    request = PlacementRequest(context_tokens=1_000)
    busy = worker("busy", 1, decoding=(1_100,))
    assert placed(CODA, request, busy, worker("idle")) == ("idle", R.CONTEXT_DISTANCE)


def test_without_decoders_the_least_loaded_worker_stays():
    assert placed(CODA, PlacementRequest(), worker("a", 1), worker("b", 0)) == ("b", R.NO_DECODERS)


def test_without_telemetry_own_in_flight_counts_decide_with_that_reason():
    blind = worker("blind", 0, has_telemetry=False, in_flight_requests=3)
    seen = worker("seen", 50, in_flight_requests=2, decoding=(10,))
    assert placed(CODA, PlacementRequest(), blind, seen) == ("seen", R.NO_TELEMETRY)


def test_affinity_survives_lost_telemetry():
    blind = worker("blind", has_telemetry=False)
    request = PlacementRequest(recent_worker="blind")
    assert placed(CODA, request, blind, worker("seen")) == ("blind", R.RECENT_PLACEMENT)


def test_one_candidate_needs_no_comparison():
    assert placed(CODA, PlacementRequest(), worker("a", 7)) == ("a", R.ONLY_CANDIDATE)


def test_round_robin_takes_everybody_in_turn_whatever_the_load():
    workers = (worker("a", 9), worker("b"), worker("c", 3))
    chosen = [placed(ROUND_ROBIN, PlacementRequest(rotation=n), *workers)[0] for n in range(6)]
    assert chosen == ["a", "b", "c", "a", "b", "c"]


def test_equal_workers_take_turns():
    chosen = {placed(CODA, PlacementRequest(rotation=n), worker("a"), worker("b"))[0] for n in range(2)}
    assert chosen == {"a", "b"}


def distance(decoding: list[int], arriving: int) -> float:
    return DecodeContexts(decoding).distance_to(log2_tokens(arriving))


def test_context_distance_is_the_mean_absolute_log2_ratio():
    assert distance([1_000, 4_000], 2_000) == pytest.approx(1.0)
    assert distance([3_000], 2_000) == pytest.approx(abs(log2(3_000 / 2_000)))
    assert distance([], 2_000) == 0.0


CONTEXTS = st.lists(st.integers(0, 200_000), max_size=12)


@settings(deadline=None)
@given(CONTEXTS, st.integers(0, 200_000))
def test_prepared_contexts_say_what_eq_8_says_and_bound_it_from_below(decoding: list[int], arriving: int):
    contexts, arriving_log2 = DecodeContexts(decoding), log2_tokens(arriving)
    said = contexts.distance_to(arriving_log2)
    terms = [abs(log2(max(tokens, 1)) - arriving_log2) for tokens in decoding]
    assert said == pytest.approx(sum(terms) / len(terms) if terms else 0.0, abs=1e-9)
    mean_log2, weight, least = contexts.bounds
    assert said >= max(least, weight * abs(mean_log2 - arriving_log2)) - 1e-9


@settings(deadline=None)
@given(st.lists(CONTEXTS, min_size=2, max_size=9), st.integers(0, 200_000))
def test_the_nearest_of_many_workers_is_the_one_that_eq_8_names(populations: list[list[int]], arriving: int):
    workers = [worker(str(n), 0, tuple(decoding)) for n, decoding in enumerate(populations)]
    chosen = CODA.place(PlacementRequest(context_tokens=arriving), workers).worker
    distances = [distance(decoding, arriving) for decoding in populations]
    assert distances[int(chosen)] == pytest.approx(min(distances), abs=1e-9)


VIEWS = st.lists(
    st.builds(
        WorkerView,
        name=st.sampled_from("abcdefgh"),
        is_healthy=st.booleans(),
        is_draining=st.booleans(),
        has_telemetry=st.booleans(),
        models=st.frozensets(st.sampled_from(["m", "n"])),
        in_flight_requests=st.integers(0, 99),
        load_requests=st.integers(0, 200),
        waiting_requests=st.integers(0, 130),
        pending_prefill_tokens=st.integers(0, 10**6),
        prefill_tokens_per_s=st.none() | st.floats(0.1, 1e6),
        decode_contexts=st.lists(st.integers(0, 200_000), max_size=5).map(DecodeContexts),
    ),
    max_size=6,
    unique_by=lambda view: view.name,
)
REQUESTS = st.builds(
    PlacementRequest,
    model=st.sampled_from([None, "m", "x"]),
    context_tokens=st.integers(0, 200_000),
    resident_tokens=st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 10**6), max_size=3),
    recent_worker=st.none() | st.sampled_from("abcdefgh"),
    has_lost_home=st.booleans(),
    tried=st.frozensets(st.sampled_from("ab")),
    history_tokens=st.integers(0, 200_000),
    rotation=st.integers(0, 1000),
    newcomers=st.integers(0, 1000),
    session_hash=st.integers(0, 2**64 - 1),
)


@settings(deadline=None)
@given(VIEWS, REQUESTS, st.sampled_from(EVERY_CHAIN))
def test_only_a_worker_that_can_take_the_request_is_ever_chosen(views, request, chain):
    placement = chain.place(request, views)
    fit = {
        view.name
        for view in views
        if view.is_healthy
        and not view.is_draining
        and view.name not in request.tried
        and (request.model is None or not view.models or request.model in view.models)
        and (not view.has_telemetry or view.waiting_requests < 64)
    }
    assert placement.worker is None or placement.worker in fit
    if request.model is None:
        assert (placement.worker is None) == (not fit)


def trail_of(request: PlacementRequest, *workers: WorkerView) -> tuple[str | None, R]:
    """Return where SMetric places ``request``, and what its gate found."""
    placement = SMETRIC.place(request, workers)
    return placement.worker, placement.trail[3]


def test_smetric_returns_home_within_the_bound_while_half_of_the_history_is_there():
    request = PlacementRequest(resident_tokens={"a": 500, "b": 10}, history_tokens=1_000)
    assert trail_of(request, worker("a", 4), worker("b", 0)) == ("a", R.KV_RESIDENT)
    assert trail_of(replace(request, resident_tokens={"a": 499}), worker("a", 4), worker("b", 0)) == (
        "b",
        R.HIT_TOO_SMALL,
    )


def test_smetric_leaves_a_home_beyond_twice_the_mean_of_all():
    request = PlacementRequest(resident_tokens={"a": 1_000}, history_tokens=1_000)
    others = worker("b", 2), worker("c", 2)
    assert trail_of(request, worker("a", 8), *others) == ("a", R.KV_RESIDENT)
    assert trail_of(request, worker("a", 9), *others)[1] is R.HOME_OVERLOADED


def test_smetric_sends_what_has_no_home_to_the_least_loaded_and_trusts_a_placement_not_reported_yet():
    workers = worker("a", 3), worker("b", 1)
    assert trail_of(PlacementRequest(), *workers) == ("b", R.NEW_SESSION)
    assert trail_of(PlacementRequest(has_lost_home=True), *workers) == ("b", R.HOME_LOST)
    assert trail_of(PlacementRequest(recent_worker="a", history_tokens=9_000), *workers) == ("a", R.RECENT_PLACEMENT)
