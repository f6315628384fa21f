"""The memory of placements: bounded in number and age, honest about evictions."""

from dataclasses import replace

from coda_router.sessions import EVICTION_GRACE_S, NOTHING_LEFT, Home, SessionMap


def home(at_s: float, worker: str = "a", **fields: object) -> Home:
    return Home(worker, "incarnation", at_s, **fields)


def test_a_home_is_remembered_as_it_was():
    sessions = SessionMap(max_sessions=4, ttl_s=100)
    first = home(1.5, context_tokens=70_000, has_tools=True)
    second = Home("b", "another incarnation", 2.25)
    sessions.put("s", first)
    sessions.put("t", second)
    assert (sessions.get("s", 3), sessions.get("t", 3)) == (first, second)
    assert sessions.get("u", 3) is None


def test_the_latest_placement_counts():
    sessions = SessionMap(max_sessions=4, ttl_s=100)
    sessions.put("s", home(0, context_tokens=10, has_tools=True))
    moved = Home("a", "after its restart", 5, context_tokens=20)
    sessions.put("s", moved)
    assert sessions.get("s", 5) == moved
    assert len(sessions) == 1


def test_the_least_recently_placed_session_is_forgotten_first():
    sessions = SessionMap(max_sessions=2, ttl_s=100)
    sessions.put("old", home(0))
    sessions.put("new", home(1))
    sessions.put("old", home(2))
    sessions.put("newest", home(3))
    assert sessions.get("new", 3) is None
    assert sessions.get("old", 3) == home(2)
    assert len(sessions) == 2


def test_a_session_is_forgotten_after_its_time():
    sessions = SessionMap(max_sessions=10, ttl_s=100)
    sessions.put("s", home(0))
    assert sessions.get("s", 100) == home(0)
    assert sessions.get("s", 101) is None
    assert len(sessions) == 0


def test_many_sessions_seen_once_do_not_pile_up():
    sessions = SessionMap(max_sessions=10_000, ttl_s=10)
    for n in range(5_000):
        sessions.put(f"s{n}", home(n / 10))
    assert len(sessions) <= 102


def test_the_last_ones_are_remembered_whole_after_many_more_than_fit():
    sessions = SessionMap(max_sessions=1_000, ttl_s=1e9)
    for n in range(5_000):
        sessions.put(f"s{n}", home(n, f"worker {n % 7}", context_tokens=n))
    assert len(sessions) == 1_000
    assert sessions.get("s3999", 5_000) is None
    for n in range(4_000, 5_000):
        assert sessions.get(f"s{n}", 5_000) == home(n, f"worker {n % 7}", context_tokens=n)


def test_restarts_without_end_leave_the_homes_of_living_sessions_right():
    sessions = SessionMap(max_sessions=3, ttl_s=1e9)
    for n in range(1_000):
        sessions.put(f"s{n % 5}", Home("a", f"incarnation {n}", n))
    assert [sessions.get(f"s{n % 5}", 1_000) for n in (997, 998, 999)] == [
        Home("a", f"incarnation {n}", n) for n in (997, 998, 999)
    ]


def test_an_eviction_concerns_only_what_it_can_know_of_and_the_lost_home_is_remembered():
    sessions = SessionMap(max_sessions=10, ttl_s=1000)
    sessions.put("evicted", home(0))
    sessions.put("elsewhere", home(0, "b"))
    sessions.put("just placed", home(10 - EVICTION_GRACE_S / 2))
    keys = ["evicted", "elsewhere", "just placed", "never seen"]
    sessions.mark_evicted("a", map(hash, keys), now_s=10)
    assert sessions.get("evicted", 10) == replace(home(0), incarnation=NOTHING_LEFT)
    assert sessions.get("elsewhere", 10) == home(0, "b")
    assert sessions.get("just placed", 10) == home(10 - EVICTION_GRACE_S / 2)
    assert sessions.get("never seen", 10) is None


def test_a_session_whose_home_was_evicted_has_a_new_one_from_its_next_placement():
    sessions = SessionMap(max_sessions=10, ttl_s=1000)
    for at_s in (0, 10, 20):
        sessions.put("s", home(at_s))
        assert sessions.get("s", at_s) == home(at_s)
        for _ in range(2):
            sessions.mark_evicted("a", [hash("s")], now_s=at_s + 5)
    assert sessions.get("s", 1_021) is None
    assert len(sessions) == 0
