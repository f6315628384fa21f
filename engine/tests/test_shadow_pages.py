"""Pages: sealed bytes are told from any others; writers take part in their reservation."""

import numpy as np
import pytest
from shadow_harness import LAYOUT, PAGE_BYTES, bytes_of, chain_keys, open_index, open_pages, write_and_publish

from coda_engine.shadow import PageRef, ShadowLayout, ShadowPages

KEYS = chain_keys(1)


def test_sealed_pages_are_intact_for_every_process(index, pages, shadow_folder):
    refs = write_and_publish(index, pages, KEYS)
    elsewhere = open_pages(shadow_folder)
    assert all(map(elsewhere.intact, refs))
    assert (elsewhere.page(refs[3].slot) == bytes_of(refs[3].key)).all()
    elsewhere.close()


def test_an_unsealed_page_is_not_intact(index, pages):
    ref = index.reserve(KEYS)[0]
    assert not pages.intact(ref)
    pages.page(ref.slot)[:] = bytes_of(ref.key)
    assert not pages.intact(ref)


@pytest.mark.parametrize("position", [0, 1, PAGE_BYTES // 2, PAGE_BYTES - 1])
@pytest.mark.parametrize("bit", [0, 7])
def test_one_flipped_bit_is_found(index, pages, position, bit):
    ref = write_and_publish(index, pages, KEYS[:1])[0]
    pages.page(ref.slot)[position] ^= 1 << bit
    assert not pages.intact(ref)
    pages.page(ref.slot)[position] ^= 1 << bit
    assert pages.intact(ref)


def test_every_flipped_bit_of_a_seal_is_found(index, pages):
    ref = write_and_publish(index, pages, KEYS[:1])[0]
    memory, start = pages._data.memory, 4096 + 64 * ref.slot
    for bit in range(64 * 8):
        memory[start + bit // 8] ^= 1 << bit % 8
        assert not pages.intact(ref)
        memory[start + bit // 8] ^= 1 << bit % 8
    assert pages.intact(ref)


def test_a_page_is_intact_for_its_own_key_generation_and_slot_only(index, pages):
    first, second = write_and_publish(index, pages, KEYS[:2])
    assert not pages.intact(PageRef(second.key, first.slot, first.generation))
    assert not pages.intact(PageRef(first.key, first.slot, second.generation))
    assert not pages.intact(PageRef(first.key, second.slot, first.generation))


def test_a_copy_is_verified_instead_of_the_page(index, pages):
    ref = write_and_publish(index, pages, KEYS[:1])[0]
    copy = pages.page(ref.slot).copy()
    pages.page(ref.slot)[5] ^= 1
    assert pages.intact(ref, copy)
    copy[7] ^= 1
    assert not pages.intact(ref, copy)
    assert not pages.intact(ref, copy[:-1])


def test_who_writes_for_a_reservation_that_is_gone_is_told_so(index, pages):
    refs = index.reserve(KEYS)
    assert pages.begin_write(refs[0])
    index.abandon(refs[:1])
    index.publish(refs[1:2])
    assert not pages.begin_write(refs[0])
    assert not pages.begin_write(refs[1])
    assert not pages.begin_write(PageRef(refs[2].key, refs[2].slot, refs[2].generation + 1))
    assert pages.begin_write(refs[2])


def test_a_page_is_held_until_its_slot_is_anothers(index, pages, shadow_folder):
    scheduler = open_index(shadow_folder)
    first, second = write_and_publish(scheduler, pages, KEYS[:2])
    assert scheduler.pin([first.key, second.key])
    index.sync()
    index.poison([second])
    assert pages.holds(first)
    assert pages.holds(second)
    scheduler.close()
    index.sync()
    assert index.reserve([b"%d" % number for number in range(LAYOUT.slots)]) is not None
    assert not pages.holds(first)
    assert not pages.holds(second)


def test_a_writer_keeps_its_schedulers_reservation_until_it_closes(index, pages, shadow_folder):
    scheduler = open_index(shadow_folder)
    refs = scheduler.reserve(KEYS)
    assert pages.begin_write(refs[0])
    scheduler.close()
    filler = [b"%d" % number for number in range(LAYOUT.slots)]
    assert index.reserve(filler) is None
    pages.close()
    assert len(index.reserve(filler)) == LAYOUT.slots
    assert index.statistics().reclaimed_from_dead == len(KEYS)


def test_all_pages_are_one_aligned_array_and_none_touches_another(shadow_folder):
    layout = ShadowLayout("odd sizes", 1_001, 2, 5)
    ranks = [ShadowPages.open(shadow_folder, layout, rank) for rank in (0, 1)]
    for rank, pages in enumerate(ranks):
        assert pages.payload.ctypes.data % 4096 == 0
        assert pages.payload.flags["C_CONTIGUOUS"]
        for slot in range(5):
            pages.page(slot)[:] = 10 * rank + slot + 1
    for rank, pages in enumerate(ranks):
        for slot in range(5):
            assert pages.page(slot).shape == (1_001,)
            assert np.unique(pages.page(slot)).tolist() == [10 * rank + slot + 1]
            assert not pages.payload[slot, 1_001:].any()
    for pages in ranks:
        pages.close()


def test_a_rank_outside_the_layout_is_refused(shadow_folder):
    with pytest.raises(ValueError, match="rank 1 of a layout with 1 ranks"):
        ShadowPages.open(shadow_folder, LAYOUT, 1)


def test_closed_pages_close_again_and_do_nothing_else(pages):
    view = pages.page(0)
    pages.close()
    pages.close()
    assert not view.any()  # A view that somebody still has stays valid.
    with pytest.raises(ValueError, match="closed"):
        pages.page(0)
