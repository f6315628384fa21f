"""Chaos: processes die at any instruction, bits flip anywhere; nobody ever takes wrong bytes, nothing is lost for ever.

``CODA_TEST_LONG=1`` runs ten times as many deaths and flips.
"""

import mmap
import os
import random
import shutil
import time

import numpy as np
import pytest
from shadow_harness import DEPTH, LAYOUT, bytes_of, chain_keys, open_index, open_pages

from coda_engine.shadow import ShadowError
from coda_engine.shadow.index_file import _offsets as index_offsets

pytestmark = pytest.mark.stress

ROUNDS = 2_000 if os.environ.get("CODA_TEST_LONG") == "1" else 200
ROLES = ("publish_for_ever", "read_for_ever")


class Later:
    """A clock ahead of the others', so that looks after the dead are always due."""

    def __init__(self):
        self._ahead_s = 0.0

    def __call__(self):
        self._ahead_s += 10.0
        return time.monotonic() + self._ahead_s


def assert_sound(folder):
    """Open the store anew: all space is accounted for, nothing is reserved or pinned, every page tells the truth."""
    index, pages = open_index(folder, clock=Later()), open_pages(folder)
    index.sync()
    figures = index.statistics()
    assert (figures.writing_pages, figures.poisoned_pages) == (0, 0)
    assert figures.used_pages + figures.free_pages == LAYOUT.slots
    assert not index._session.are_pinned(np.arange(LAYOUT.slots)).any()
    served = 0
    for key in list(index._mirror.ready):
        (ref,) = index.pin([key])
        if pages.intact(ref):
            assert (pages.page(ref.slot) == bytes_of(key)).all()
            served += 1
        index.unpin([ref])
    # Everything can be given up and taken anew: no page is held by anybody.
    refs = index.reserve([b"new %d" % number for number in range(LAYOUT.slots)])
    assert len(refs) == LAYOUT.slots
    index.abandon(refs)
    index.close()
    pages.close()
    return served


def test_no_death_at_any_moment_costs_a_page_or_makes_one_wrong(shadow_folder, nursery):
    choice = random.Random(4)
    progress = nursery.progress
    children = [nursery.fork(role, seed=seed) for seed, role in enumerate(ROLES)]
    for turn in range(ROUNDS):
        which = turn % 2
        # Some die while they open the store, some at work.
        time.sleep(choice.uniform(0, 0.004 if turn % 4 < 2 else 0.02))
        children[which].kill()
        children[which] = nursery.fork(ROLES[which], seed=100 + turn)
    progress.wait_for("published", 50)
    progress.wait_for("served", 50)
    for child in children:
        child.kill()
    assert progress["wrong"] == 0
    assert progress["refused"] == 0  # Deaths alone never damage a published page.
    assert_sound(shadow_folder)


def number_of_lines(nursery):
    """Return a number of lines of the store's code within which a child opens, does everything once and closes."""
    lines = 512
    while nursery.progress["flag"] == 0:
        lines *= 2
        nursery.fork("operate_until_line", line=lines, seed=1).join()
    return lines


def test_death_before_any_line_of_the_first_opening_leaves_nothing_in_the_way(shadow_folder, nursery):
    choice = random.Random(7)
    for _ in range(ROUNDS // 4):
        shutil.rmtree(shadow_folder, ignore_errors=True)
        nursery.fork("operate_until_line", line=choice.randrange(1, 700), seed=1).join()
        assert_sound(shadow_folder)


def test_death_before_any_line_of_any_operation_is_repaired(shadow_folder, nursery):
    choice = random.Random(5)
    index, pages = open_index(shadow_folder, clock=Later()), open_pages(shadow_folder)
    last = number_of_lines(nursery)
    for turn in range(ROUNDS):
        nursery.fork("operate_until_line", line=choice.randrange(1, last), seed=turn).join()
        keys = chain_keys(choice.randrange(DEPTH))
        refs = index.reserve(keys)
        assert refs is not None
        assert (index.statistics().writing_pages, index.statistics().poisoned_pages) == (len(refs), 0)
        for ref in refs:
            assert pages.begin_write(ref)
            pages.page(ref.slot)[:] = bytes_of(ref.key)
            pages.seal(ref)
        index.publish(refs)
        pinned = index.pin(keys)
        assert all(pages.intact(ref) and (pages.page(ref.slot) == bytes_of(ref.key)).all() for ref in pinned)
        index.unpin(pinned)
    assert index.statistics().repairs > 0
    assert index.statistics().reclaimed_from_dead > 0
    index.close()
    pages.close()
    assert_sound(shadow_folder)


def index_sections():
    """Return the ranges of bytes of which the index consists; the words of the header one by one."""
    ring, uses, pins, records, end = index_offsets(LAYOUT.slots)
    header = [(0, 72), (512, 520), (576, 584), (640, 648), (1024, 1088)]
    return [*header, (ring, uses), (uses, pins), (pins, records), (records, end)]


def flip(memory, position, bit):
    memory[position] ^= 1 << bit


def mapped(path):
    with path.open("r+b") as file:
        return mmap.mmap(file.fileno(), 0)


def test_no_flipped_bit_anywhere_is_ever_served(shadow_folder, nursery):
    choice = random.Random(6)
    index = open_index(shadow_folder)
    children = [nursery.fork(role, seed=seed) for seed, role in enumerate(ROLES)]
    progress = nursery.progress
    progress.wait_for("published", 20)
    progress.wait_for("served", 20)
    files = [mapped(next(shadow_folder.glob(f"*.{part}"))) for part in ("index", "rank0")]
    sections = index_sections()
    for turn in range(ROUNDS):
        if turn % 2:
            flip(files[1], choice.randrange(len(files[1])), choice.randrange(8))
        else:
            flip(files[0], choice.randrange(*sections[turn // 2 % len(sections)]), choice.randrange(8))
        time.sleep(choice.uniform(0, 0.004))
        if turn % 10 == 0:
            index.sync()
    before = progress["published"], progress["served"]
    progress.wait_for("published", before[0] + 20)
    progress.wait_for("served", before[1] + 20)
    assert progress["wrong"] == 0
    assert progress["refused"] > 0
    for child in children:
        child.kill()
    index.close()
    for file in files:
        file.close()
    assert_sound(shadow_folder)


@pytest.mark.parametrize("section", range(9))
def test_a_damaged_section_of_the_index_costs_pages_at_most(shadow_folder, section):
    """Random bytes over a whole section, with everybody away: a cold start in the worst case."""
    for part in range(4):
        index, pages = open_index(shadow_folder), open_pages(shadow_folder)
        for chain in range(4):
            for ref in index.reserve(chain_keys(chain)):
                pages.page(ref.slot)[:] = bytes_of(ref.key)
                pages.seal(ref)
                index.publish([ref])
        index.close()
        pages.close()
        memory = mapped(next(shadow_folder.glob("*.index")))
        start, end = index_sections()[section]
        quarter = (end - start) // 4
        start += part * quarter
        memory[start : start + quarter] = np.random.default_rng(10 * section + part).bytes(quarter)
        memory.close()
        try:
            assert_sound(shadow_folder)
        except ShadowError:
            pytest.fail("a damaged index that nobody uses must be replaced")
