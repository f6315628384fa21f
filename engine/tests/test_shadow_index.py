"""The index seen from one or two holders: a key's life, pins, poison, what listeners hear, clocks, closing."""

import pytest
from hand_clock import HandClock
from shadow_harness import FILLER, LAYOUT, chain_keys, reserve_and_publish

from coda_engine.shadow import MAX_KEY_BYTES
from coda_engine.shadow.index_file import MASK_64, participant_byte


@pytest.fixture
def other(index, opened):
    return opened()


KEYS = chain_keys(1)


def assert_conserved(index):
    figures = index.statistics()
    parts = figures.used_pages + figures.writing_pages + figures.poisoned_pages + figures.free_pages
    assert parts == figures.capacity_pages == LAYOUT.slots


def test_a_key_is_ready_after_publication_only(index):
    refs = index.reserve(KEYS)
    assert [ref.key for ref in refs] == KEYS
    assert len({ref.slot for ref in refs}) == len({ref.generation for ref in refs}) == len(KEYS)
    assert all(map(index.writing, KEYS))
    assert not any(map(index.ready, KEYS))
    index.publish(refs)
    assert all(map(index.ready, KEYS))
    assert not any(map(index.writing, KEYS))
    assert_conserved(index)


def test_another_process_learns_of_it_by_sync(index, other):
    reserve_and_publish(index, KEYS)
    assert not any(map(other.ready, KEYS))
    other.sync()
    assert all(map(other.ready, KEYS))


def test_keys_that_are_there_or_on_their_way_are_left_out(index, other):
    reserve_and_publish(index, KEYS[:2])
    index.reserve(KEYS[2:4])
    assert [ref.key for ref in other.reserve([*KEYS, KEYS[5]])] == KEYS[4:]
    assert other.reserve(KEYS) == []


def test_an_abandoned_reservation_gives_its_pages_back(index):
    index.abandon(index.reserve(KEYS))
    assert not any(map(index.writing, KEYS))
    assert (index.statistics().free_pages, index.statistics().abandoned) == (LAYOUT.slots, len(KEYS))


def test_what_was_abandoned_cannot_be_published(index):
    refs = index.reserve(KEYS)
    index.abandon(refs)
    index.publish(refs)
    assert not any(map(index.ready, KEYS))
    assert index.statistics().lost == len(KEYS)


def test_a_key_of_the_wrong_length_is_refused(index):
    assert index.reserve([b"x" * MAX_KEY_BYTES])
    for key in (b"", b"x" * (MAX_KEY_BYTES + 1)):
        with pytest.raises(ValueError, match="1 to 64 are allowed"):
            index.reserve([key])


def test_keys_with_zeros_at_their_ends_are_kept_apart(index, other):
    keys = [b"\0", b"\0\0", b"a\0", b"a"]
    reserve_and_publish(index, keys)
    other.sync()
    assert all(map(other.ready, keys))
    assert {ref.key for ref in other.pin(keys)} == set(keys)


def test_more_keys_than_slots_are_refused_whole(index):
    reserve_and_publish(index, KEYS)
    assert index.reserve([*FILLER, b"one more"]) is None
    assert all(map(index.ready, KEYS))
    assert_conserved(index)


def test_pages_being_written_are_not_evicted(index, other):
    index.reserve(KEYS)
    assert other.reserve(FILLER) is None
    assert len(other.reserve(FILLER[len(KEYS) :])) == LAYOUT.slots - len(KEYS)


def test_a_pinned_page_is_evicted_by_nobody(index, other):
    refs = reserve_and_publish(index, KEYS)
    assert index.pin(KEYS) == refs
    assert other.reserve(FILLER) is None
    assert index.reserve(FILLER) is None
    index.unpin(refs)
    assert len(other.reserve(FILLER)) == LAYOUT.slots


def test_a_page_stays_until_it_has_been_unpinned_as_often_as_pinned(index, other):
    refs = reserve_and_publish(index, KEYS[:1])
    index.pin(KEYS[:1])
    index.pin([KEYS[0], KEYS[0]])
    index.unpin(refs * 2)
    assert other.reserve(FILLER) is None
    index.unpin(refs)
    assert other.reserve(FILLER)


def test_a_vanished_key_pins_nothing(index, other):
    reserve_and_publish(index, KEYS[:4])
    assert index.pin(KEYS) is None
    assert index.statistics().pinned_pages == 0
    other.sync()
    other.reserve(FILLER)
    assert index.ready(KEYS[0])  # As far as it knows.
    assert index.pin(KEYS[:1]) is None
    assert not index.ready(KEYS[0])


def test_unpinning_twice_is_told_and_takes_nobody_elses_pin(index, other):
    refs = reserve_and_publish(index, KEYS)
    index.pin(KEYS)
    other.pin(KEYS)
    index.unpin(refs)
    with pytest.raises(ValueError, match="unpinned twice"):
        index.unpin(refs)
    assert index.reserve(FILLER) is None
    other.unpin(refs)
    assert index.reserve(FILLER)


def test_a_poisoned_key_is_gone_at_once_and_can_be_published_anew(index, other):
    refs = reserve_and_publish(index, KEYS)
    index.poison(refs[:1])
    other.sync()
    assert not index.ready(KEYS[0])
    assert not other.ready(KEYS[0])
    assert [ref.key for ref in reserve_and_publish(other, KEYS)] == KEYS[:1]
    index.poison(refs[:1])  # The old one, again: the new page is another one.
    assert index.ready(KEYS[0])
    assert index.statistics().poisoned == 1


def test_a_poisoned_pages_space_returns_when_its_last_reader_leaves(index, other):
    refs = reserve_and_publish(index, KEYS[:1])
    index.pin(KEYS[:1])
    other.pin(KEYS[:1])
    index.poison(refs)
    assert index.statistics().poisoned_pages == 1
    index.unpin(refs)
    other.sync()
    assert other.statistics().poisoned_pages == 1
    assert other.reserve(FILLER) is None
    other.unpin(refs)
    assert other.statistics().free_pages == LAYOUT.slots
    index.sync()
    assert_conserved(index)


def test_a_page_whose_reader_does_not_know_of_the_poison_returns_later(index, other, opened):
    refs = reserve_and_publish(index, KEYS[:1])
    other.pin(KEYS[:1])
    index.poison(refs)
    other.unpin(refs)  # Without having heard of it.
    assert len(index.reserve(FILLER)) == LAYOUT.slots


def test_listeners_hear_of_every_ready_key_that_comes_or_goes(index, other):
    heard = []
    other.on_change(lambda key, present: heard.append((key, present)))
    refs = index.reserve(KEYS)
    other.sync()
    assert heard == []
    index.publish(refs)
    other.sync()
    assert heard == [(key, True) for key in KEYS]
    heard.clear()
    other.poison(refs[:1])
    assert heard == [(KEYS[0], False)]
    heard.clear()
    index.reserve(FILLER)
    other.sync()
    assert sorted(heard) == sorted((key, False) for key in KEYS[1:])


def test_a_listener_that_fails_loses_nothing(index, other):
    heard = []

    def listen(key, present):
        heard.append(key)
        if len(heard) == 1:
            raise RuntimeError("listener")

    other.on_change(listen)
    reserve_and_publish(index, KEYS)
    with pytest.raises(RuntimeError, match="listener"):
        other.sync()
    reserve_and_publish(index, [b"more"])
    other.sync()
    assert heard == [*KEYS, b"more"]


def test_a_page_that_came_and_went_between_two_looks_is_no_change(index, other):
    heard = []
    other.on_change(lambda key, present: heard.append((key, present)))
    index.poison(reserve_and_publish(index, KEYS))
    other.sync()
    assert heard == []


def test_a_process_that_slept_for_longer_than_the_ring_remembers_catches_up(index, other):
    heard = []
    other.on_change(lambda key, present: heard.append((key, present)))
    reserve_and_publish(index, KEYS)
    for turn in range(30):
        index.poison(reserve_and_publish(index, [b"%d of %d" % (number, turn) for number in range(40)]))
    reserve_and_publish(index, [b"last"])
    other.sync()
    assert all(map(other.ready, [*KEYS, b"last"]))
    assert sorted(heard) == sorted((key, True) for key in [*KEYS, b"last"])
    assert_conserved(other)


def test_the_change_sequence_may_wrap(index, other):
    for holder in (index, other):
        holder._session._sequence = MASK_64 - 5
    index._session.file.sequence = MASK_64 - 5
    reserve_and_publish(index, KEYS)
    other.sync()
    assert all(map(other.ready, KEYS))
    assert index._session.file.sequence == len(KEYS) * 2 - 6


def test_pages_stay_when_everybody_has_closed(index, other, opened):
    reserve_and_publish(index, KEYS)
    index.reserve([b"unfinished"])
    index.pin(KEYS)
    index.close()
    other.close()
    later = opened()
    assert all(map(later.ready, KEYS))
    figures = later.statistics()
    assert (figures.used_pages, figures.writing_pages) == (len(KEYS), 0)
    assert later.reserve(FILLER)


def test_closing_gives_pins_and_reservations_back_at_once(index, other):
    reserve_and_publish(index, KEYS)
    index.pin(KEYS)
    index.reserve([b"unfinished"])
    index.close()
    assert len(other.reserve(FILLER)) == LAYOUT.slots


def test_a_closed_index_closes_again_and_does_nothing_else(index):
    index.close()
    index.close()
    for use in (index.sync, lambda: index.reserve(KEYS), lambda: index.pin(KEYS), lambda: index.unpin([])):
        with pytest.raises(ValueError, match="closed"):
            use()


def test_a_clock_that_steps_back_changes_no_order(opened):
    clock = HandClock(1_000.0)
    index = opened(clock=clock)
    reserve_and_publish(index, FILLER[:-1])
    clock.now_s = 10.0
    reserve_and_publish(index, [FILLER[-1]])
    clock.now_s = -5.0
    index.touch(FILLER[:1])
    reserve_and_publish(index, KEYS[:1])
    assert index.ready(FILLER[0])
    assert index.ready(FILLER[-1])
    assert not index.ready(FILLER[-2])  # The deepest of the older ones.


def test_a_clock_that_steps_back_does_not_end_the_look_after_the_dead(opened):
    clock = HandClock(1_000.0)
    index, dying = opened(clock=clock), opened()
    dying.reserve(KEYS)
    index.sync()
    dying._session.file.locks.release(participant_byte(dying._session.number))  # What the kernel does for the dead.
    clock.now_s = 1.0
    index.sync()
    assert index.statistics().reclaimed_from_dead == len(KEYS)


def test_a_lock_that_stays_taken_delays_one_call_and_loses_nothing(opened, monkeypatch):
    index, stuck = opened(lock_wait_s=0.05), opened()
    refs = reserve_and_publish(index, KEYS[:4])
    locks, waits_s = index._session.file.locks, []
    acquire = locks.acquire

    def acquire_and_note(byte, *, exclusive, wait_s=0.0):
        waits_s.append(wait_s)
        return acquire(byte, exclusive=exclusive, wait_s=wait_s)

    monkeypatch.setattr(locks, "acquire", acquire_and_note)

    def while_locked():
        assert index.reserve(KEYS[4:]) is None
        assert index.pin(KEYS[:4]) is None
        index.poison(refs[:1])
        index.touch(KEYS)
        for _ in range(20):
            index.sync()

    stuck._locked(while_locked)
    assert waits_s == [0.05] + [0.0] * 22
    assert index.statistics().lock_timeouts == 23
    stuck.sync()
    assert not index.ready(KEYS[0])  # Withdrawn here at once, for others as soon as it can be told.
    assert stuck.ready(KEYS[0])
    index.sync()
    stuck.sync()
    assert not stuck.ready(KEYS[0])
    assert index.statistics().poisoned == 1
    assert len(index.reserve(KEYS)) == 5
    assert index.pin(KEYS[1:4])
    assert waits_s[23:] == [0.0, 0.05, 0.05]


def test_too_many_engines_are_told_so(opened, shadow_folder):
    from coda_engine.contract.reasons import Reason
    from coda_engine.shadow import ShadowError
    from coda_engine.shadow.index_file import MAX_PARTICIPANTS

    first = opened()
    for _ in range(MAX_PARTICIPANTS - 1):
        opened()
    with pytest.raises(ShadowError, match="64 engines share it already") as caught:
        opened()
    assert caught.value.reason is Reason.SHADOW_UNUSABLE
    first.close()
    assert opened().reserve(KEYS)
