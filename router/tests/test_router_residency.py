"""What the engines say is resident: by session over all workers, bounded, and gone with the engine that said it."""

from coda_router.fleet.residency import Residency


def test_all_workers_that_have_any_of_a_session_are_told_at_once():
    residency = Residency()
    residency.update("a", {"s": 100, "t": 7}, ())
    residency.update("b", {"s": 300, "t": 0}, ())
    assert residency.tokens_by_worker("s") == {"a": 100, "b": 300}
    assert residency.tokens_by_worker("t") == {"a": 7}
    assert residency.tokens_by_worker("u") == {}
    assert (residency.tokens_at("b", "s"), residency.tokens_at("b", "t")) == (300, 0)


def test_a_change_replaces_what_was_told_before():
    residency = Residency()
    residency.update("a", {"s": 100, "t": 7}, ())
    gone = residency.update("a", {"s": 50, "t": 0}, ["u"])
    assert residency.tokens_by_worker("s") == {"a": 50}
    assert residency.tokens_by_worker("t") == {}
    assert sorted(gone) == sorted([hash("t"), hash("u")])


def test_a_whole_table_replaces_the_worker_s_rows_and_nobody_else_s():
    residency = Residency()
    residency.update("a", {"s": 100, "t": 7, "u": 9}, ())
    residency.update("b", {"t": 8}, ())
    gone = residency.replace("a", {"s": 60, "u": 0})
    assert residency.tokens_by_worker("s") == {"a": 60}
    assert residency.tokens_by_worker("t") == {"b": 8}
    assert set(gone) == {hash("t"), hash("u")}


def test_a_worker_that_left_is_forgotten_and_its_successor_starts_with_nothing():
    residency = Residency()
    residency.update("a", {"s": 100}, ())
    residency.update("b", {"s": 5}, ())
    residency.forget("a")
    residency.forget("never seen")
    residency.update("c", {"t": 1}, ())
    assert residency.tokens_by_worker("s") == {"b": 5}
    assert residency.tokens_by_worker("t") == {"c": 1}
    assert len(residency) == 2


def test_endless_rows_push_out_those_told_least_recently():
    residency = Residency(max_rows=100)
    for n in range(1_000):
        residency.update(f"w{n % 3}", {"kept": n + 1, f"s{n}": 1}, ())
    assert len(residency) == 100
    assert residency.tokens_by_worker("kept") == {"w0": 1_000, "w1": 998, "w2": 999}
    assert residency.tokens_by_worker("s0") == {}
    assert residency.tokens_by_worker("s999") == {"w0": 1}
