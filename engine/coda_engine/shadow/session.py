"""One process's part in the shared index: the lock, catching up, records, pins, and what the dead left behind."""

from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from coda_engine.contract.reasons import Reason
from coda_engine.shadow.errors import ShadowError
from coda_engine.shadow.index_file import CHANGE_BYTE, MASK_64, MAX_PARTICIPANTS, IndexFile, participant_byte
from coda_engine.shadow.mirror import Mirror
from coda_engine.shadow.records import FREE_RECORD, SlotRecord, SlotState, encode_record
from coda_engine.shadow.statistics import ShadowCounters

T = TypeVar("T")

_JOIN_WAIT_S = 10.0
_SWEEP_INTERVAL_S = 2.0
_LARGEST_TICK = 1 << 62
_MOST_PINS = (1 << 16) - 1
_NOBODY = -1


class IndexSession:
    """A participant of the index. Methods that write want the lock: they are called from within ``locked``.

    A change sets the change mark, rewrites records and notes their slots in the ring, publishes the sequence, and takes
    the mark away. Whoever gets the lock and finds the mark knows that its holder died in between, and repairs.

    Attributes:
        file: The shared bytes.
        mirror: What this process knows of them.
        counters: What this process did.
        number: This participant's.
        own_pins: Pins of this process by (slot, generation).
    """

    def __init__(self, file: IndexFile, slots: int, clock: Callable[[], float], lock_wait_s: float) -> None:
        self.file = file
        self.mirror = Mirror(slots)
        self.counters = ShadowCounters()
        self.number = _NOBODY
        self.own_pins: Counter[tuple[int, int]] = Counter()
        self._slots = slots
        self._clock = clock
        self._lock_wait_s = lock_wait_s
        self._is_patient = True
        self._is_changing = False
        self._sequence = 0
        self._claimed: list[int] = []
        self._swept_at_s = -_SWEEP_INTERVAL_S

    def join(self) -> None:
        """Become a participant.

        Raises:
            ShadowError: Too many participants, or the index stays locked.
        """
        joined = self.locked(self._claim, _JOIN_WAIT_S)
        if joined is None:
            raise ShadowError(
                Reason.SHADOW_UNUSABLE,
                f"{self.file.path}: locked by another process for {_JOIN_WAIT_S:.0f} s; end the process that hangs "
                "(`lslocks` names it)",
            )
        if not joined:
            raise ShadowError(
                Reason.SHADOW_UNUSABLE,
                f"{self.file.path}: {MAX_PARTICIPANTS} engines share it already; give some of them another folder",
            )

    def leave(self) -> None:
        """Give up pins and reservations; those that a worker still writes for come back when it ends."""
        self.own_pins.clear()
        self.locked(self._resign)

    def is_up_to_date(self) -> bool:
        """Return whether nothing has changed and no look after the dead is due."""
        return self.file.sequence == self._sequence and not self._is_sweep_due()

    def locked(self, operation: Callable[[], T], wait_s: float | None = None) -> T | None:
        """Return what ``operation`` returns with the index locked and the mirror exact; None if it stays locked."""
        if wait_s is None:
            # Somebody who is stopped with the lock costs one wait, not one at every step.
            wait_s = self._lock_wait_s if self._is_patient else 0.0
        self._is_patient = self.file.locks.acquire(CHANGE_BYTE, exclusive=True, wait_s=wait_s)
        if not self._is_patient:
            self.counters.lock_timeouts += 1
            return None
        try:
            self._claimed = self.file.claimed()
            self._catch_up()
            if self._is_sweep_due():
                self.sweep()
            result = operation()
            self._finish_change()
            return result
        finally:
            self.file.locks.release(CHANGE_BYTE)

    def write(self, slot: int, record: SlotRecord | None) -> None:
        """Replace the record of ``slot`` (None: free it)."""
        self._begin_change()
        raw = FREE_RECORD if record is None else encode_record(slot, record)
        self.file.put_record(slot, raw)
        self.mirror.learn(slot, record, raw)
        self._sequence = (self._sequence + 1) & MASK_64
        self.file.put_ring_slot(self._sequence, slot)

    def withdraw(self, slot: int) -> None:
        """Serve ``slot`` no more: free it, or let it wait for those who have it pinned."""
        if self.is_pinned(slot):
            mirror = self.mirror
            self.write(slot, SlotRecord(SlotState.POISONED, mirror.keys[slot], mirror.generations[slot], 0, 0))
        else:
            self.write(slot, None)

    def confirm(self, slot: int) -> bool:
        """Return whether the mirror is right about ``slot``; it is afterwards. A damaged record is restored from it."""
        raw = self.file.record(slot)
        expected = self.mirror.record(slot)
        if raw == expected:
            return True
        if self.mirror.take(slot, raw):
            return False
        self.counters.damaged += 1
        self.file.put_record(slot, bytes(expected))
        return True

    def sweep(self) -> None:
        """Free what dead participants reserved and pinned, and withdrawn pages that nobody has pinned any more."""
        self._swept_at_s = self._clock()
        alive = {number for number in self._claimed if number == self.number or self._is_alive(number)}
        dead = [number for number in self._claimed if number not in alive]
        for slot in self.mirror.slots_in(SlotState.WRITING).tolist():
            if self.mirror.owners[slot] not in alive:
                self.write(slot, None)
                self.counters.reclaimed_from_dead += 1
        for number in dead:
            self.file.pin_rows[number] = 0
            self.file.set_claimed(number, False)
        self._claimed = sorted(alive)
        self._restore_own_pins()
        self.free_withdrawn()

    def free_withdrawn(self) -> None:
        """Free withdrawn pages that nobody has pinned any more."""
        for slot in list(self.mirror.poisoned):
            if not self.is_pinned(slot):
                self.write(slot, None)

    def is_pinned(self, slot: int) -> bool:
        """Return whether any participant has ``slot`` pinned."""
        pins, slots = self.file.pins, self._slots
        return any(pins[number * slots + slot] for number in self._claimed)

    def are_pinned(self, slots: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which of ``slots`` any participant has pinned."""
        rows = np.array(self._claimed, np.intp)[:, np.newaxis]
        return np.asarray(self.file.pin_rows[rows, slots].any(axis=0))

    def pin(self, slot: int) -> bool:
        """Pin ``slot`` once more; False if it cannot be counted."""
        position = self.number * self._slots + slot
        count = self.file.pins[position]
        if count == _MOST_PINS:
            return False
        self.file.pins[position] = count + 1
        self.own_pins[slot, self.mirror.generations[slot]] += 1
        return True

    def unpin(self, slot: int, generation: int) -> bool:
        """Undo one ``pin``; wants no lock, for a counter has one writer. Return whether there was one."""
        own = (slot, generation)
        count = self.own_pins.get(own, 0)
        if count == 0:
            return False
        if count == 1:
            del self.own_pins[own]
        else:
            self.own_pins[own] = count - 1
        position = self.number * self._slots + slot
        self.file.pins[position] = max(self.file.pins[position] - 1, 0)
        return True

    def next_tick(self, count: int) -> int:
        """Return a tick that is later than all before it by at least ``count``, whatever the clock does; no lock."""
        latest = self.file.latest_tick
        if latest >= _LARGEST_TICK:  # Damaged: no clock gets there.
            latest = 0
        tick = max(latest + count, int(self._clock() * 1e9))
        self.file.latest_tick = tick
        return tick

    def _claim(self) -> bool:
        self._rescan()
        self.sweep()
        for number in range(MAX_PARTICIPANTS):
            if number in self._claimed or self._is_alive(number):
                continue
            # Shared, for the workers that write for this participant hold it too.
            if not self.file.locks.acquire(participant_byte(number), exclusive=False):
                continue
            self.file.pin_rows[number] = 0
            self.file.set_claimed(number, True)
            self.number = number
            return True
        return False

    def _resign(self) -> bool:
        self.file.pin_rows[self.number] = 0
        self.file.locks.release(participant_byte(self.number))
        self.number = _NOBODY
        self.sweep()
        return True

    def _is_alive(self, number: int) -> bool:
        return self.file.locks.held_elsewhere(participant_byte(number))

    def _is_sweep_due(self) -> bool:
        return not 0 <= self._clock() - self._swept_at_s < _SWEEP_INTERVAL_S

    def _begin_change(self) -> None:
        if not self._is_changing:
            self.file.change_mark = self.number + 2
            self._is_changing = True

    def _finish_change(self) -> None:
        if self._is_changing:
            self.file.sequence = self._sequence
            self.file.change_mark = 0
            self._is_changing = False

    def _catch_up(self) -> None:
        target = self.file.sequence
        behind = (target - self._sequence) & MASK_64
        goes_back = behind > MASK_64 // 2  # Damaged: there are changes that others would never hear of.
        if self.file.change_mark or goes_back:
            self._repair(self._sequence if goes_back else target)
            return
        if behind == 0:
            return
        changed: dict[int | None, None] = {None: None}
        if behind <= self.file.ring_entries:
            changed = {self.file.ring_slot((self._sequence + step) & MASK_64): None for step in range(1, behind + 1)}
        self._sequence = target
        if None in changed:
            self._rescan()
            return
        for slot in changed:
            if slot is not None:
                self._look_again(slot)

    def _repair(self, sequence: int) -> None:
        """Make sense of the index after somebody died in the middle of a change; everybody will look at all of it."""
        self.counters.repairs += 1
        self._is_changing = True
        self._sequence = sequence
        self._rescan()
        self.sweep()
        self._sequence = (self._sequence + self.file.ring_entries + 1) & MASK_64

    def _rescan(self) -> None:
        different = (self.file.record_rows != self.mirror.rows).any(axis=1)
        for slot in np.flatnonzero(different).tolist():
            self._look_again(slot)

    def _look_again(self, slot: int) -> None:
        raw = self.file.record(slot)
        if raw != self.mirror.record(slot) and not self.mirror.take(slot, raw):
            # The mirror may be older than the damage, so there is nothing to restore it from.
            self.counters.damaged += 1
            self.withdraw(slot)

    def _restore_own_pins(self) -> None:
        """Undo damage to this participant's counters, which would keep a page for ever."""
        if self.number == _NOBODY:
            return
        row = self.file.pin_rows[self.number]
        counts: Counter[int] = Counter()
        for (slot, _), count in self.own_pins.items():
            counts[slot] += count
        for slot in {*np.flatnonzero(row).tolist(), *counts}:
            row[slot] = counts[slot]
