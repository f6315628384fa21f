"""The table under the router's memories: it does what a plain dictionary in order of use does."""

import random
from collections import OrderedDict

import pytest

from coda_router.recency import RecencyTable

SAME_BUCKET = 1 << 40
"""Keys that differ by multiples of this share a bucket in any table of a test."""


def test_it_forgets_in_order_of_use_whatever_happens_to_it():
    draw, table, model = random.Random(7), RecencyTable(16), OrderedDict[int, int]()
    for _ in range(5_000):
        key = draw.randrange(6) * SAME_BUCKET + draw.randrange(5)
        slot = table.find(key)
        assert (slot != 0) is (key in model)
        if slot and draw.random() < 0.3:
            table.remove(slot)
            del model[key]
        elif slot:
            table.touch(slot)
            model.move_to_end(key)
        else:
            if table.is_full:
                oldest = table.oldest
                assert table.hash_at(oldest) == model.popitem(last=False)[0]
                table.remove(oldest)
            model[key] = table.add(key)
        assert len(table) == len(model)
        assert table.hash_at(table.oldest) == next(iter(model)) if model else table.oldest == 0
        assert all(table.find(known) == slot for known, slot in model.items())


def test_slots_are_used_again_and_columns_grow_no_further():
    table = RecencyTable(2)
    column = table.int_column("I")
    for key in range(100):
        if table.is_full:
            table.remove(table.oldest)
        column[table.add(key)] = key
    assert len(column) == 3
    assert [column[table.find(key)] for key in (98, 99)] == [98, 99]


def test_one_key_may_have_several_slots():
    table = RecencyTable(8)
    table.add(5 + SAME_BUCKET)
    slots = {table.add(5) for _ in range(3)}
    table.add(5 + 2 * SAME_BUCKET)
    found, slot = set(), table.find(5)
    while slot:
        found.add(slot)
        slot = table.find_next(slot)
    assert found == slots


def test_nothing_is_added_to_a_full_table():
    table = RecencyTable(1)
    table.add(1)
    with pytest.raises(OverflowError):
        table.add(2)
