"""The placement policies beside Coda's own: what each does, and why it falls back."""

from collections import Counter
from math import ceil
from pathlib import Path

import pytest
from msgspec.structs import replace

from coda_engine.contract.settings import PlacementPolicyName, PlacementSettings
from coda_router.fleet.drain import MIN_SAMPLES, DrainRate
from coda_router.placement.chain import PlacementChain, chain_for
from coda_router.placement.observations import PlacementRequest, WorkerView
from coda_router.placement.reasons import PlacementReason as R


def chain(policy: PlacementPolicyName, overload_bound: float = 2.0) -> PlacementChain:
    return chain_for(PlacementSettings(policy=policy, overload_bound=overload_bound))


SMETRIC_V2 = chain(PlacementPolicyName.SMETRIC_V2)
CACHEWISE_RR = chain(PlacementPolicyName.CACHEWISE_RR)
POWER_OF_TWO = chain(PlacementPolicyName.POWER_OF_TWO)
PREFIX_HASH = chain(PlacementPolicyName.PREFIX_HASH)


def worker(name: str, load: int = 0, **fields: object) -> WorkerView:
    return replace(WorkerView(name, load_requests=load, in_flight_requests=load), **fields)


def fleet(count: int, loads: list[int] | None = None) -> list[WorkerView]:
    return [worker(f"10.0.0.{n}:8000", (loads or [0] * count)[n]) for n in range(count)]


def place(chain: PlacementChain, request: PlacementRequest, *workers: WorkerView) -> tuple[str | None, R]:
    placement = chain.place(request, workers)
    return placement.worker, placement.reason


def of_session(number: int, **fields: object) -> PlacementRequest:
    # Neighbouring numbers far apart, as hashes are.
    return replace(PlacementRequest(session_hash=number * 0x9E3779B97F4A7C15 % 2**64), **fields)


def test_the_guide_explains_every_policy_and_every_reason():
    guide = (Path(__file__).parents[2] / "docs" / "guides" / "placement.md").read_text()
    assert [name for name in (*PlacementPolicyName, *R) if f"`{name}`" not in guide] == []


# prefix-hash


def owners(workers: list[WorkerView], sessions: int = 3_000) -> list[str | None]:
    return [place(PREFIX_HASH, of_session(n), *workers)[0] for n in range(sessions)]


def test_a_session_has_one_owner_whichever_router_asks_in_whatever_order():
    workers = fleet(7)
    asked = [
        place(PREFIX_HASH, of_session(5, rotation=n, newcomers=n), *workers[n % 7 :], *workers[: n % 7])
        for n in range(20)
    ]
    assert len(set(asked)) == 1
    assert asked[0][1] is R.HASH_OWNER


def test_a_worker_that_leaves_moves_only_its_own_sessions_and_one_that_comes_takes_only_its_own():
    before = owners(fleet(10))
    gone = "10.0.0.3:8000"
    after = owners([w for w in fleet(10) if w.name != gone])
    moved = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert {old for old, _ in moved} == {gone}
    assert len(moved) == before.count(gone)
    assert len({new for _, new in moved}) == 9  # spread over all that remain


def test_sessions_are_spread_evenly_over_their_owners():
    shares = Counter(owners(fleet(10)))
    assert len(shares) == 10
    assert max(shares.values()) < 1.25 * 300
    assert min(shares.values()) > 0.75 * 300


def test_a_full_owner_s_sessions_go_to_their_next_owners_and_come_back():
    workers, session = fleet(5), of_session(1)
    owner, _ = place(PREFIX_HASH, session, *workers)
    without = [w for w in workers if w.name != owner]
    full = [replace(w, load_requests=9) if w.name == owner else w for w in workers]
    assert place(PREFIX_HASH, session, *full) == (place(PREFIX_HASH, session, *without)[0], R.HASH_OWNER_FULL)
    assert place(PREFIX_HASH, session, *workers) == (owner, R.HASH_OWNER)


@pytest.mark.parametrize("bound", [1.0, 1.25, 2.0])
def test_no_worker_s_load_exceeds_the_bound_however_uneven_the_sessions_are(bound: float):
    bounded, loads = chain(PlacementPolicyName.PREFIX_HASH, bound), Counter[str | None]()
    for n in range(400):
        workers = [worker(f"w{i}", loads[f"w{i}"]) for i in range(6)]
        name, _ = place(bounded, of_session(n % 7), *workers)
        loads[name] += 1
        assert loads[name] <= ceil(bound * loads.total() / 6)


# power-of-two


def test_the_less_loaded_of_two_drawn_workers_is_chosen():
    workers = fleet(8, loads=list(range(8)))
    chosen = Counter(place(POWER_OF_TWO, of_session(n, rotation=n), *workers)[0] for n in range(4_000))
    # Of all pairs, 7 have worker 0 and none is won by worker 7.
    assert chosen["10.0.0.0:8000"] == pytest.approx(4_000 * 7 / 28, rel=0.15)
    assert chosen["10.0.0.6:8000"] == pytest.approx(4_000 * 1 / 28, rel=0.4)
    assert "10.0.0.7:8000" not in chosen


def test_a_draw_can_be_repeated_and_differs_between_sessions_and_decisions():
    workers = fleet(8)
    draws = [place(POWER_OF_TWO, of_session(n, rotation=3), *workers)[0] for n in range(50)]
    assert draws == [place(POWER_OF_TWO, of_session(n, rotation=3), *workers)[0] for n in range(50)]
    assert len(set(draws)) == 8
    assert len({place(POWER_OF_TWO, of_session(1, rotation=n), *workers)[0] for n in range(50)}) == 8


def test_two_workers_are_both_drawn_always():
    assert {place(POWER_OF_TWO, of_session(n), worker("a", 3), worker("b", 2)) for n in range(20)} == {
        ("b", R.POWER_OF_TWO)
    }
    assert place(POWER_OF_TWO, of_session(1), worker("a", 3)) == ("a", R.ONLY_CANDIDATE)


# cachewise-rr


def test_new_sessions_take_turns_whatever_comes_between_them():
    workers = fleet(4, loads=[9, 0, 0, 0])
    chosen = [
        place(CACHEWISE_RR, PlacementRequest(newcomers=new, rotation=2 * new), *workers)  # every second is new
        for new in range(8)
    ]
    assert chosen == [(f"10.0.0.{n % 4}:8000", R.ROUND_ROBIN) for n in range(8)]


def test_a_session_stays_at_its_home_whatever_the_load():
    workers = worker("a", 90), worker("b", 0)
    assert place(CACHEWISE_RR, PlacementRequest(resident_tokens={"a": 10}), *workers) == ("a", R.KV_RESIDENT)
    assert place(CACHEWISE_RR, PlacementRequest(recent_worker="a"), *workers) == ("a", R.RECENT_PLACEMENT)


def test_a_session_whose_home_is_gone_takes_its_turn_like_a_new_one():
    placement = CACHEWISE_RR.place(PlacementRequest(has_lost_home=True, newcomers=1), fleet(3))
    assert placement.worker == "10.0.0.1:8000"
    assert R.HOME_LOST in placement.trail


# smetric-v2

CONTINUED = PlacementRequest(
    context_tokens=20_000, resident_tokens={"a": 19_000}, history_tokens=19_000, recent_worker="a"
)
"""1,000 new tokens at 20,000 of context count as 3,817; in time within 2.25 s."""


def gate(request: PlacementRequest, *workers: WorkerView) -> tuple[str | None, R]:
    """Return where the request goes, and what the gate found."""
    placement = SMETRIC_V2.place(request, workers)
    return placement.worker, placement.trail[3]


def test_home_is_kept_while_it_can_answer_in_time_however_many_requests_it_has():
    # 2.25 s at 21,400 tokens a second are 48,150 tokens.
    assert gate(CONTINUED, worker("a", 50, pending_prefill_tokens=44_300), worker("b")) == ("a", R.KV_RESIDENT)
    assert gate(CONTINUED, worker("a", 1, pending_prefill_tokens=44_400), worker("b")) == ("b", R.HOME_TOO_SLOW)


def test_a_worker_s_own_rate_counts_once_it_was_seen():
    slow = worker("a", pending_prefill_tokens=10_000, prefill_tokens_per_s=5_000.0)
    assert gate(CONTINUED, slow, worker("b"))[1] is R.HOME_TOO_SLOW
    assert gate(CONTINUED, replace(slow, prefill_tokens_per_s=50_000.0), worker("b"))[1] is R.KV_RESIDENT


def test_what_home_has_lost_makes_it_slower():
    lost = replace(CONTINUED, resident_tokens={"a": 100})
    assert gate(lost, worker("a"), worker("b"))[1] is R.HOME_TOO_SLOW
    trusted = replace(CONTINUED, resident_tokens={})
    assert gate(trusted, worker("a"), worker("b")) == ("a", R.RECENT_PLACEMENT)


def test_a_home_without_telemetry_is_judged_by_the_first_version():
    blind = worker("a", 2, has_telemetry=False)
    assert gate(CONTINUED, blind, worker("b", 1), worker("c", 1)) == ("a", R.KV_RESIDENT)
    assert gate(CONTINUED, replace(blind, in_flight_requests=9), worker("b", 1), worker("c", 1))[1] is R.HOME_OVERLOADED


def test_elsewhere_the_least_product_of_tokens_and_requests_wins():
    new = PlacementRequest(context_tokens=1_000)
    few = worker("few", 1, pending_prefill_tokens=5_000)  # 6,000 x 2
    idle = worker("idle", 3, pending_prefill_tokens=0)  # 1,000 x 4
    assert place(SMETRIC_V2, new, few, idle) == ("idle", R.LEAST_WORK)
    assert place(SMETRIC_V2, new, few, replace(idle, load_requests=12)) == ("few", R.LEAST_WORK)


def test_a_session_that_leaves_home_prefers_who_has_some_of_it():
    request = replace(CONTINUED, resident_tokens={"a": 19_000, "c": 12_000})
    busy = worker("a", 9, pending_prefill_tokens=900_000)
    assert place(SMETRIC_V2, request, busy, worker("b", 1), worker("c", 1)) == ("c", R.LEAST_WORK)


def test_without_telemetry_the_least_loaded_worker_takes_what_is_new():
    blind = worker("a", 2, has_telemetry=False)
    assert place(SMETRIC_V2, PlacementRequest(), blind, worker("b", 1)) == ("b", R.NO_TELEMETRY)
    assert place(SMETRIC_V2, PlacementRequest(), blind) == ("a", R.ONLY_CANDIDATE)


def test_a_prefill_rate_is_the_fast_end_of_what_was_seen():
    rate, now_s, pending = DrainRate(), 0.0, 0
    for n in range(200):
        if pending <= 0:
            pending += 20_000  # arrivals hide what was done meanwhile
        else:
            pending -= 1_000 if n % 5 else 500
        now_s += 0.1
        rate.look(pending, now_s)
    assert rate.tokens_per_s == pytest.approx(10_000)


def test_no_prefill_rate_is_told_of_too_few_looks_or_a_clock_that_stands_still():
    few, stopped = DrainRate(), DrainRate()
    for n in range(MIN_SAMPLES):  # one sample fewer: the first look only says where it begins
        few.look(100_000 - n, float(n))
    for n in range(50):
        stopped.look(90_000 - n, 1_000.0)
    assert few.tokens_per_s is None
    assert stopped.tokens_per_s is None
