"""Several real processes: who dies gives back what it had, and harms nobody."""

import os
import signal
import time

import pytest
from shadow_harness import FILLER, LAYOUT, bytes_of, chain_keys, open_index, open_pages, write_and_publish

from coda_engine.shadow.records import RECORD_BYTES

pytestmark = pytest.mark.stress


def sync_until(index, condition):
    deadline_s = time.monotonic() + 20
    while not condition(index.statistics()):
        assert time.monotonic() < deadline_s, index.statistics()
        index.sync()
        time.sleep(0.01)


def test_a_dead_writers_reservation_comes_back(index, nursery):
    child = nursery.fork("hold_reservation", chain=1)
    nursery.progress.wait_for("started", 1)
    assert index.reserve(FILLER) is None
    assert index.statistics().writing_pages == 8
    child.kill()
    assert len(index.reserve(FILLER)) == LAYOUT.slots
    assert index.statistics().reclaimed_from_dead == 8


def test_a_dead_writers_reservation_comes_back_without_anybody_asking_for_room(index, nursery):
    child = nursery.fork("hold_reservation", chain=1)
    nursery.progress.wait_for("started", 1)
    index.sync()
    child.kill()
    sync_until(index, lambda figures: figures.free_pages == LAYOUT.slots)


def test_a_dead_readers_pins_vanish(index, pages, nursery):
    keys = chain_keys(1)
    write_and_publish(index, pages, keys)
    child = nursery.fork("hold_pins", chain=1)
    nursery.progress.wait_for("started", 1)
    assert index.reserve(FILLER) is None
    child.kill()
    assert len(index.reserve(FILLER)) == LAYOUT.slots


def test_a_poisoned_page_that_a_dead_reader_had_pinned_comes_back(index, pages, nursery):
    refs = write_and_publish(index, pages, chain_keys(1))
    child = nursery.fork("hold_pins", chain=1)
    nursery.progress.wait_for("started", 1)
    index.poison(refs)
    assert index.statistics().poisoned_pages == len(refs)
    child.kill()
    sync_until(index, lambda figures: figures.free_pages == LAYOUT.slots)


def test_a_worker_that_outlives_its_scheduler_keeps_the_page_that_it_writes(index, pages, nursery):
    child = nursery.fork("hold_reservation", chain=1)
    nursery.progress.wait_for("started", 1)
    index.sync()
    mirror = index._mirror
    from coda_engine.shadow import PageRef

    key = chain_keys(1)[0]
    slot = mirror.writing[key]
    assert pages.begin_write(PageRef(key, slot, mirror.generations[slot]))
    child.kill()
    assert index.reserve(FILLER) is None
    pages.close()
    assert len(index.reserve(FILLER)) == LAYOUT.slots


def test_a_forked_child_has_no_part_in_its_parents_index(index, nursery):
    child = nursery.fork("fork_and_stay", chain=1)
    child.join()
    assert len(index.reserve(FILLER)) == LAYOUT.slots  # Although the grandchild lives.
    assert nursery.progress["wrong"] == 0
    nursery.progress.add("flag")


def test_a_process_that_stops_with_the_index_locked_stops_nobody_else(index, pages, nursery):
    refs = write_and_publish(index, pages, chain_keys(1))
    child = nursery.fork("hold_index")
    nursery.progress.wait_for("started", 1)
    for _ in range(100):
        index.sync()
        assert index.pin(chain_keys(1)) is None
        assert index.reserve(chain_keys(2)) is None
    index.publish([])
    index.poison(refs[:1])
    child.kill()
    index.sync()
    assert index.pin(chain_keys(1)[1:])
    assert not index.ready(refs[0].key)


def test_a_stopped_process_keeps_its_pins_and_goes_on_afterwards(index, pages, nursery):
    write_and_publish(index, pages, chain_keys(1))
    child = nursery.fork("hold_pins", chain=1)
    nursery.progress.wait_for("started", 1)
    child.send(signal.SIGSTOP)
    assert index.reserve(FILLER) is None
    child.send(signal.SIGCONT)
    assert index.reserve(FILLER) is None
    child.kill()


@pytest.mark.parametrize("torn_bytes", [1, 9, 40, 90, RECORD_BYTES - 1, RECORD_BYTES])
def test_a_record_that_was_half_written_by_the_dead_is_freed(shadow_folder, index, pages, nursery, torn_bytes):
    published = [key for chain in range(LAYOUT.slots // 8) for key in chain_keys(chain)]
    write_and_publish(index, pages, published)
    child = nursery.fork("die_with_torn_record", chain=99, torn_bytes=torn_bytes)
    child.join()
    assert index.pin(chain_keys(1)) or index.pin(chain_keys(2))
    sync_until(index, lambda figures: figures.writing_pages == 0)
    figures = index.statistics()
    assert figures.repairs == 1
    assert figures.used_pages + figures.free_pages == LAYOUT.slots
    assert figures.used_pages >= LAYOUT.slots - 1
    for key in published:
        if index.ready(key):
            (ref,) = index.pin([key])
            assert pages.intact(ref)
            assert (pages.page(ref.slot) == bytes_of(key)).all()
            index.unpin([ref])


def test_pages_survive_the_death_of_everybody(shadow_folder, nursery):
    child = nursery.fork("publish_for_ever", seed=1)
    nursery.progress.wait_for("published", 10)
    child.kill()
    index, pages = open_index(shadow_folder), open_pages(shadow_folder)
    ready = list(index._mirror.ready)
    assert len(ready) >= 10
    refs = index.pin(ready)
    assert all(map(pages.intact, refs))
    assert all((pages.page(ref.slot) == bytes_of(ref.key)).all() for ref in refs)
    index.close()
    pages.close()


def test_nothing_of_a_closed_store_stays_open(shadow_folder):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        index, pages = open_index(shadow_folder), open_pages(shadow_folder)
        write_and_publish(index, pages, chain_keys(1))
        index.close()
        pages.close()
    assert len(os.listdir("/proc/self/fd")) == before
