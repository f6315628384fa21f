"""The memory of placements: bounded in number and age, honest about evictions."""

from coda_router.sessions import EVICTION_GRACE_S, Home, SessionMap


def home(at_s: float, worker: str = "a") -> Home:
    return Home(worker, "incarnation", at_s)


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


def test_an_eviction_forgets_only_what_it_can_know_of():
    sessions = SessionMap(max_sessions=10, ttl_s=1000)
    sessions.put("evicted", home(0))
    sessions.put("elsewhere", home(0, "b"))
    sessions.put("just placed", home(10 - EVICTION_GRACE_S / 2))
    sessions.forget_evicted("a", ["evicted", "elsewhere", "just placed", "never seen"], now_s=10)
    assert sessions.get("evicted", 10) is None
    assert sessions.get("elsewhere", 10) is not None
    assert sessions.get("just placed", 10) is not None
