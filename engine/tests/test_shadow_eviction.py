"""Eviction: the policies' orders, and the order of victims that the index makes of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shadow_harness import LAYOUT, chain_keys, open_index

from coda_engine.shadow import EvictionPolicyName, ShadowLayout
from coda_engine.shadow.eviction import Fifo, Lru, eviction_policy, first_out


def ticks(*values):
    return np.array(values, np.uint64)


def test_lru_orders_by_the_last_use_and_fifo_by_publication():
    last_uses, published = ticks(9, 5, 7), ticks(1, 2, 3)
    slots = np.array([10, 11, 12])
    assert first_out(slots, Lru().ages(last_uses, published), 2)[0].tolist() == [11, 12]
    assert first_out(slots, Fifo().ages(last_uses, published), 2)[0].tolist() == [10, 11]


def test_every_policy_name_has_its_policy():
    assert {type(eviction_policy(name)) for name in EvictionPolicyName} == {Lru, Fifo}


@given(st.lists(st.integers(0, 2**64 - 1), max_size=40), st.integers(0, 50))
def test_first_out_is_a_sort_cut_off(ages, count):
    slots, kept = first_out(np.arange(len(ages)), np.array(ages, np.uint64), count)
    assert kept.tolist() == sorted(ages)[:count]
    assert [ages[slot] for slot in slots] == kept.tolist()


def publish(index, keys):
    refs = index.reserve(keys)
    assert refs is not None
    index.publish(refs)


@pytest.fixture
def opened(shadow_folder):
    indexes = []

    def open_one(slots, eviction="lru"):
        layout = ShadowLayout("eviction", 64, 1, slots)
        indexes.append(open_index(shadow_folder, layout, eviction=EvictionPolicyName(eviction)))
        return indexes[-1]

    yield open_one
    for index in indexes:
        index.close()


def single(number):
    return b"key %03d" % number


def test_the_least_recently_used_page_goes_first(opened):
    index = opened(4)
    for number in range(4):
        publish(index, [single(number)])
    index.touch([single(0)])
    publish(index, [single(4)])
    assert [index.ready(single(number)) for number in range(5)] == [True, False, True, True, True]


def test_fifo_does_not_look_at_uses(opened):
    index = opened(4, "fifo")
    for number in range(4):
        publish(index, [single(number)])
    index.touch([single(0)])
    publish(index, [single(4)])
    assert [index.ready(single(number)) for number in range(5)] == [False, True, True, True, True]


def test_a_use_by_another_process_counts(opened):
    index, other = opened(4), opened(4)
    for number in range(4):
        publish(index, [single(number)])
    other.sync()
    other.touch([single(0)])
    publish(index, [single(4)])
    assert index.ready(single(0))
    assert not index.ready(single(1))


def test_a_use_between_two_evictions_counts_although_victims_were_queued(opened):
    index = opened(4)
    for number in range(4):
        publish(index, [single(number)])
    publish(index, [single(4)])  # Evicts 0 and queues 1, 2, 3.
    index.touch([single(1)])
    publish(index, [single(5)])
    assert [number for number in range(6) if index.ready(single(number))] == [1, 3, 4, 5]


def test_the_end_of_a_prefix_goes_before_its_beginning(opened):
    index = opened(8)
    keys = chain_keys(1, 8)
    publish(index, keys[:4])
    publish(index, keys[4:])
    index.touch(keys)
    publish(index, [single(number) for number in range(3)])
    assert [index.ready(key) for key in keys] == [True] * 5 + [False] * 3


def test_protected_pages_stay_and_without_others_nothing_is_reserved(opened):
    index = opened(4)
    keys = chain_keys(1, 4)
    publish(index, keys)
    assert index.reserve([single(0)], protect=keys) is None
    assert index.reserve([*keys, single(0)]) is None
    assert all(map(index.ready, keys))
    assert index.reserve([single(0)], protect=keys[:3]) is not None
    assert not index.ready(keys[3])


class AskedOneByOne(dict):
    """A long context's keys: going through them for each block would cost the engine's thread milliseconds."""

    def __iter__(self):
        raise AssertionError("the whole context is walked")


def test_a_protected_context_is_not_walked_for_each_block(opened):
    index = opened(10)
    context = AskedOneByOne.fromkeys([single(number) for number in range(100)])
    for number in range(20):
        refs = index.reserve([single(1_000 + number)], protect=context)
        assert refs is not None
        index.publish(refs)
    assert index.statistics().evicted > 0


def test_protected_pages_are_victims_again_later(opened):
    index = opened(4)
    for number in range(4):
        publish(index, [single(number)])
    publish(index, [single(4)])
    index.reserve([single(5)], protect=[single(1)])
    assert index.ready(single(1))
    index.reserve([single(6)])
    assert not index.ready(single(1))


def test_more_than_a_queue_of_victims_is_found_at_once(opened):
    index = opened(400)
    publish(index, [single(number) for number in range(400)])
    refs = index.reserve([b"new %03d" % number for number in range(350)])
    assert len({ref.slot for ref in refs}) == 350
    assert index.statistics().evicted == 350


def test_the_order_is_exact_over_many_evictions(opened):
    index = opened(50)
    for number in range(600):
        publish(index, [single(number)])
        expected = range(max(0, number - 49), number + 1)
        assert [key for key in range(number + 1) if index.ready(single(key))] == list(expected)


def test_a_layout_is_refused_without_room_for_a_page():
    with pytest.raises(ValueError, match=r"ShadowLayout\.slots must be at least 1"):
        ShadowLayout("x", 1, 1, 0)
    assert LAYOUT.digest() == ShadowLayout(LAYOUT.identity, LAYOUT.page_bytes, 1, LAYOUT.slots).digest()
    assert LAYOUT.digest() != ShadowLayout(LAYOUT.identity, LAYOUT.page_bytes, 2, LAYOUT.slots).digest()
