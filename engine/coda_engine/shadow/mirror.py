"""One process's copy of the index: dictionaries by key, and which keys came and went."""

from collections import deque

import numpy as np
from numpy.typing import NDArray

from coda_engine.shadow.records import FREE_RECORD, RECORD_BYTES, SlotRecord, SlotState, decode_record

_FREE, _WRITING, _READY = int(SlotState.FREE), int(SlotState.WRITING), int(SlotState.READY)


class Mirror:
    """What this process believes of every slot.

    Attributes:
        ready: Slot of every published key.
        writing: Slot of every reserved key.
        free: Free slots.
        poisoned: Slots that return once nobody has them pinned.
        states: ``SlotState`` by slot.
        keys: Key by slot; empty for a free one.
        generations: By slot; 0 for a free one.
        owners: Participant by slot.
        published_ticks: By slot.
        rows: Raw records as they were taken, shape (slots, RECORD_BYTES).
        changes: Ready keys that appeared (True) or vanished (False), oldest first, until somebody takes them.
    """

    def __init__(self, slots: int) -> None:
        self.ready: dict[bytes, int] = {}
        self.writing: dict[bytes, int] = {}
        self.free: set[int] = set(range(slots))
        self.poisoned: set[int] = set()
        self.states = bytearray(slots)
        self.keys = [b""] * slots
        self.generations = [0] * slots
        self.owners = bytearray(slots)
        self.published_ticks: NDArray[np.uint64] = np.zeros(slots, np.uint64)
        self.changes: deque[tuple[bytes, bool]] = deque()
        self._state_array = np.frombuffer(self.states, np.uint8)
        self._raw = bytearray(slots * RECORD_BYTES)
        self.rows: NDArray[np.uint8] = np.frombuffer(self._raw, np.uint8).reshape(slots, RECORD_BYTES)

    def record(self, slot: int) -> bytearray:
        """Return the raw record of ``slot`` as it was taken."""
        return self._raw[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES]

    def slots_in(self, state: SlotState) -> NDArray[np.int64]:
        """Return all slots in ``state``."""
        return np.flatnonzero(self._state_array == state)

    def count(self, state: SlotState) -> int:
        """Return how many slots are in ``state``."""
        return self.states.count(state)

    def are_in(self, slots: NDArray[np.int64], state: SlotState) -> NDArray[np.bool_]:
        """Return which of ``slots`` are in ``state``."""
        found: NDArray[np.bool_] = self._state_array[slots] == state
        return found

    def take(self, slot: int, raw: bytes) -> bool:
        """Believe ``raw``; return False, and change nothing, if it is damaged."""
        if raw == FREE_RECORD:
            self.learn(slot, None, raw)
            return True
        record = decode_record(slot, raw)
        if record is not None:
            self.learn(slot, record, raw)
        return record is not None

    def learn(self, slot: int, record: SlotRecord | None, raw: bytes) -> None:
        """Believe ``record`` (None: the slot is free), which ``raw`` encodes."""
        self._forget(slot)
        self._raw[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = raw
        if record is None:
            self.states[slot], self.keys[slot], self.generations[slot] = _FREE, b"", 0
            self.free.add(slot)
            return
        key = record.key
        self.states[slot], self.keys[slot], self.generations[slot] = record.state, key, record.generation
        self.owners[slot] = record.owner
        self.published_ticks[slot] = record.published_tick
        if record.state == _READY:
            if key not in self.ready:
                self.changes.append((key, True))
            self.ready[key] = slot
        elif record.state == _WRITING:
            self.writing[key] = slot
        else:
            self.poisoned.add(slot)

    def hide(self, slot: int) -> None:
        """Take the key of a published page away already, before its record says so."""
        key = self.keys[slot]
        if self.ready.get(key) == slot:
            del self.ready[key]
            self.changes.append((key, False))

    def _forget(self, slot: int) -> None:
        state, key = self.states[slot], self.keys[slot]
        if state == _FREE:
            self.free.discard(slot)
        elif state == _WRITING:
            if self.writing.get(key) == slot:
                del self.writing[key]
        elif state == _READY:
            self.hide(slot)
        else:
            self.poisoned.discard(slot)
