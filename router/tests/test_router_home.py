"""Which worker is a session's home, where several have some of it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from coda_router.placement.home import LIKE_TOKENS, home_of

HASHES = st.integers(0, 2**64 - 1)


def test_the_longest_prefix_is_home_and_the_recent_worker_where_nobody_has_any():
    assert home_of({"a": 900, "b": 40_000}, "a", 1) == "b"
    assert home_of({}, "a", 1) == "a"
    assert home_of({"b": 0}, "a", 1) == "a"
    assert home_of({}, None, 1) is None


@settings(deadline=None)
@given(HASHES)
def test_equal_prefixes_prefer_the_recent_worker(session_hash: int):
    assert home_of({"a": 10, "b": 10}, "b", session_hash) == "b"


@settings(deadline=None)
@given(HASHES, st.integers(20_000, 200_000), st.integers(1, LIKE_TOKENS))
def test_two_routers_agree_on_a_home_although_each_knows_another_one_as_the_longer(
    session_hash: int, tokens: int, turn_tokens: int
):
    one = home_of({"a": tokens, "b": tokens - turn_tokens}, "a", session_hash)
    other = home_of({"a": tokens, "b": tokens + turn_tokens}, "b", session_hash)
    assert one == other


@settings(deadline=None)
@given(HASHES)
def test_a_prefix_that_lacks_more_than_a_turn_or_a_quarter_is_no_home(session_hash: int):
    assert home_of({"a": 60_000, "b": 60_000 - LIKE_TOKENS - 1}, "b", session_hash) == "a"
    assert home_of({"a": 2_000, "b": 1_499}, "b", session_hash) == "a"


def test_sessions_with_two_homes_are_shared_between_them():
    assert {home_of({"a": 60_000, "b": 59_000}, None, n * 0x9E3779B97F4A7C15 % 2**64) for n in range(40)} == {"a", "b"}
