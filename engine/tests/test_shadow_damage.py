"""Single faults in the index, one by one: damaged records, pins, ring entries and numbers; changes cut short."""

import pytest
from shadow_harness import FILLER, LAYOUT, chain_keys, reserve_and_publish

from coda_engine.shadow.index_file import participant_byte

KEYS = chain_keys(1)


def damage(index, slot, byte=30):
    file = index._session.file
    raw = bytearray(file.record(slot))
    raw[byte] ^= 4
    file.put_record(slot, bytes(raw))


@pytest.mark.parametrize("byte", [0, 1, 2, 9, 17, 30, 95])
def test_a_damaged_record_is_restored_by_whoever_knew_it(index, opened, byte):
    refs = reserve_and_publish(index, KEYS)
    damage(index, refs[2].slot, byte)
    assert index.pin(KEYS) == refs
    assert index.statistics().damaged == 1
    assert all(map(opened().ready, KEYS))


def test_a_damaged_reservation_can_be_published_and_given_back(index, opened):
    refs = index.reserve(KEYS)
    for ref in refs:
        damage(index, ref.slot)
    index.publish(refs[:4])
    index.abandon(refs[4:])
    other = opened()
    assert [other.ready(key) for key in KEYS] == [True] * 4 + [False] * 4
    assert other.statistics().writing_pages == 0
    assert index.statistics().lost == 0


def test_a_damaged_free_slot_is_used_as_a_free_one(index):
    for slot in range(LAYOUT.slots):
        damage(index, slot, byte=0)
    assert len(reserve_and_publish(index, FILLER)) == LAYOUT.slots


def test_a_damaged_record_that_nobody_knew_is_freed(index, opened):
    refs = reserve_and_publish(index, KEYS)
    index.close()
    index = opened()
    damage(index, refs[0].slot)
    index.close()
    later = opened()
    assert [later.ready(key) for key in KEYS] == [False] + [True] * 7
    assert later.statistics().used_pages + later.statistics().free_pages == LAYOUT.slots
    assert later.reserve(FILLER)


def test_a_damaged_record_that_only_its_reader_knew_is_not_given_to_others(index, opened):
    refs = reserve_and_publish(index, KEYS)
    index.pin(KEYS[:1])
    damage(index, refs[0].slot)
    other = opened()
    assert not other.ready(KEYS[0])
    assert other.statistics().poisoned_pages == 1
    assert other.reserve(FILLER) is None
    index.unpin(refs[:1])
    assert len(other.reserve(FILLER)) == LAYOUT.slots


def test_pins_that_nobody_made_are_taken_back(opened):
    now_s = [0.0]
    index = opened(clock=lambda: now_s[0])
    refs = reserve_and_publish(index, KEYS)
    index.pin(KEYS[:2])
    row = index._session.file.pin_rows[index._session.number]
    row[refs[1].slot] = 0
    row[refs[5].slot] = 1 << 9
    now_s[0] += 10
    index.sync()
    assert [int(row[ref.slot]) for ref in refs] == [1, 1, 0, 0, 0, 0, 0, 0]


def test_pins_of_participants_that_are_not_there_do_not_count(index):
    reserve_and_publish(index, KEYS)
    index._session.file.pin_rows[40] = 1
    index._session.file.set_claimed(41, True)
    index._session.file.pin_rows[41] = 1
    assert len(index.reserve(FILLER)) == LAYOUT.slots


def test_a_claim_that_got_lost_is_not_given_to_another(index, opened):
    refs = reserve_and_publish(index, KEYS)
    index.pin(KEYS)
    index._session.file.set_claimed(index._session.number, False)
    other = opened()
    assert other._session.number != index._session.number
    index.unpin(refs)


@pytest.mark.parametrize("entry", [0, 1 << 63, 95 | (95 ^ 0xFFFFFFFF) << 32])
def test_a_damaged_ring_costs_no_publication_for_ever(index, opened, entry):
    other = opened()
    reserve_and_publish(index, KEYS)
    file = index._session.file
    file.words[file._ring_word + file.sequence % file.ring_entries] = entry
    other.sync()
    assert other.ready(KEYS[0])
    # The last one may have been missed; then it is a miss, and whoever looks again has it right.
    reserve_and_publish(other, KEYS)
    index.sync()
    assert all(map(other.ready, KEYS))
    assert index.pin(KEYS)
    assert len(other.pin(KEYS)) == len(KEYS)


@pytest.mark.parametrize("value", [0, 5, 1 << 40, (1 << 64) - 1])
def test_a_damaged_sequence_or_tick_stops_nothing(index, opened, value):
    other = opened()
    reserve_and_publish(index, KEYS)
    index._session.file.sequence = value
    index._session.file.latest_tick = value
    other.sync()  # May believe it; the one who made the changes does not.
    index.sync()
    other.sync()
    assert all(map(other.ready, KEYS))
    reserve_and_publish(other, FILLER)
    index.sync()
    assert all(map(index.ready, FILLER))
    assert not any(map(index.ready, KEYS))


def test_a_mark_without_a_dead_process_only_costs_a_look(index):
    reserve_and_publish(index, KEYS)
    index._session.file.change_mark = 3
    assert index.pin(KEYS)
    assert index.statistics().repairs == 1
    assert index._session.file.change_mark == 0


def test_an_operation_that_fails_half_way_is_repaired(index, opened, monkeypatch):
    other = opened()
    refs = index.reserve(KEYS)

    def fail(sequence, slot):
        raise RuntimeError("a defect")

    monkeypatch.setattr(index._session.file, "put_ring_slot", fail)
    with pytest.raises(RuntimeError, match="a defect"):
        index.publish(refs)
    monkeypatch.undo()
    assert other.pin(KEYS[:1])
    assert other.statistics().repairs == 1
    index.sync()
    assert [index.ready(key) for key in KEYS] == [True] + [False] * 7
    index.abandon(refs[1:])
    assert index.statistics().writing_pages == 0


@pytest.mark.parametrize("change", ["publish", "reserve"])
def test_what_was_changed_but_not_told_is_told_to_everybody_by_the_repair(index, opened, nursery, change):
    bystander = opened()
    child = nursery.fork("die_before_telling", chain=1, change=change)
    child.join()
    assert index.reserve([]) == []
    assert index.statistics().repairs == 1
    bystander.sync()
    assert [bystander.ready(key) for key in KEYS] == [change == "publish"] * len(KEYS)
    assert not any(map(bystander.writing, KEYS))
    assert bystander._session.file.sequence == index._session.file.sequence
    assert not bystander._session.file.locks.held_elsewhere(participant_byte(5))
