"""The index in shared memory: header, change ring, last uses, pins and records; what they mean is the index's affair.

::

    header      static part with checksum; change mark, change sequence, latest tick; participants' claims
    ring        numbers of the slots that changed, by change sequence
    last uses   one tick for each slot, written without a lock
    pins        one counter for each participant and slot, written by its participant only
    records     see coda_engine.shadow.records
"""

import mmap
import secrets
import struct
from pathlib import Path
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from coda_engine.shadow.files import FileForm, SharedFile, open_shared_file
from coda_engine.shadow.layout import ShadowLayout
from coda_engine.shadow.locks import ByteLocks
from coda_engine.shadow.records import RECORD_BYTES

MAX_PARTICIPANTS = 64
CHANGE_BYTE = 0
"""Byte of the file that is locked exclusively by whoever changes the index."""

MASK_64 = (1 << 64) - 1

_MAGIC = b"CODASHIX"
_SCHEMA = 1
_STATIC = struct.Struct("<8sIIQQQ16s")  # magic, schema, participants, slots, ring entries, instance, layout digest
_CHECKSUM = struct.Struct("<Q")
_HEADER_BYTES = 4096
_CHANGE_MARK_WORD = 512 // 8
_SEQUENCE_WORD = 576 // 8
_LATEST_TICK_WORD = 640 // 8
_CLAIMS_BYTE = 1024
_CLAIMED = 0xFF  # All bits: one that flips does not take a claim away.
_IDENTITY_BYTE = 2048
_SMALLEST_RING = 1024
_SLOT_BITS = 32
_SLOT_MASK = (1 << _SLOT_BITS) - 1


class IndexFile:
    """Typed access to the shared bytes.

    Attributes:
        instance: Random number of this index, by which its data files know it.
        ring_entries: Changes that the ring remembers.
        words: The whole file as 8-byte words.
        pins: The pins of all participants as 2-byte counters, row by row.
        pin_rows: The same, shape (MAX_PARTICIPANTS, slots).
        last_uses: Ticks, shape (slots,).
        record_rows: Records as bytes, shape (slots, RECORD_BYTES).
    """

    def __init__(self, shared: SharedFile, slots: int) -> None:
        self._shared = shared
        self._memory = memory = shared.memory
        self._slots = slots
        self.ring_entries = _ring_entries(slots)
        ring, uses, pins, self._records_byte, _ = _offsets(slots)
        self._ring_word, self._uses_word = ring // 8, uses // 8
        self.instance: int = _STATIC.unpack_from(memory)[5]
        view = memoryview(memory)
        self.words = view.cast("Q")
        self.pins = view[pins : pins + 2 * MAX_PARTICIPANTS * slots].cast("H")
        self.pin_rows: NDArray[np.uint16] = np.frombuffer(
            memory, np.uint16, MAX_PARTICIPANTS * slots, offset=pins
        ).reshape(MAX_PARTICIPANTS, slots)
        self.last_uses: NDArray[np.uint64] = np.frombuffer(memory, np.uint64, slots, offset=uses)
        self.record_rows: NDArray[np.uint8] = np.frombuffer(
            memory, np.uint8, slots * RECORD_BYTES, offset=self._records_byte
        ).reshape(slots, RECORD_BYTES)

    @classmethod
    def open(cls, folder: Path, layout: ShadowLayout) -> Self:
        """Return the index of ``layout``, made if absent.

        Raises:
            ShadowError: See ``ShadowIndex.open``.
        """
        digest = bytes.fromhex(layout.digest())
        static = (_MAGIC, _SCHEMA, MAX_PARTICIPANTS, layout.slots, _ring_entries(layout.slots))

        def initialise(memory: mmap.mmap) -> None:
            header = _STATIC.pack(*static, secrets.randbits(64), digest)
            header += _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))
            memory[: len(header)] = header
            identity = layout.identity.encode()[: _HEADER_BYTES - _IDENTITY_BYTE]
            memory[_IDENTITY_BYTE : _IDENTITY_BYTE + len(identity)] = identity  # For people with a hex viewer.

        def is_valid(memory: mmap.mmap) -> bool:
            fields = _STATIC.unpack_from(memory)
            checksum = xxhash.xxh3_64_intdigest(memory[: _STATIC.size])
            return (
                _CHECKSUM.unpack_from(memory, _STATIC.size)[0] == checksum
                and fields[:5] == static
                and fields[6] == digest
            )

        form = FileForm(layout.digest(), "index", _offsets(layout.slots)[-1], is_valid, initialise)
        return cls(open_shared_file(folder, form), layout.slots)

    @property
    def path(self) -> Path:
        """Where the file is."""
        return self._shared.path

    @property
    def locks(self) -> ByteLocks:
        """This holder's locks on the file."""
        return self._shared.locks

    def close(self) -> None:
        """Give up locks and mapping."""
        del self.pin_rows, self.last_uses, self.record_rows
        self.words.release()
        self.pins.release()
        self._shared.close()

    def record(self, slot: int) -> bytes:
        """Return the raw record of ``slot``."""
        start = self._records_byte + slot * RECORD_BYTES
        return self._memory[start : start + RECORD_BYTES]

    def put_record(self, slot: int, raw: bytes) -> None:
        """Replace the raw record of ``slot``."""
        start = self._records_byte + slot * RECORD_BYTES
        self._memory[start : start + RECORD_BYTES] = raw

    def set_last_use(self, slot: int, tick: int) -> None:
        """Note a use; harmless if the slot has become another key's."""
        self.words[self._uses_word + slot] = tick

    def ring_slot(self, sequence: int) -> int | None:
        """Return the slot that change ``sequence`` changed; None if the entry is damaged."""
        entry = self.words[self._ring_word + sequence % self.ring_entries]
        slot = entry & _SLOT_MASK
        return slot if entry >> _SLOT_BITS == slot ^ _SLOT_MASK and slot < self._slots else None

    def put_ring_slot(self, sequence: int, slot: int) -> None:
        """Note which slot change ``sequence`` changed; it counts once ``sequence`` is published."""
        entry = slot | (slot ^ _SLOT_MASK) << _SLOT_BITS
        self.words[self._ring_word + sequence % self.ring_entries] = entry

    @property
    def sequence(self) -> int:
        """Number of the latest change, modulo 2^64; read without a lock."""
        return self.words[_SEQUENCE_WORD]

    @sequence.setter
    def sequence(self, value: int) -> None:
        self.words[_SEQUENCE_WORD] = value

    @property
    def change_mark(self) -> int:
        """Not 0 while a change is under way: who gets the lock and sees it must repair."""
        return self.words[_CHANGE_MARK_WORD]

    @change_mark.setter
    def change_mark(self, value: int) -> None:
        self.words[_CHANGE_MARK_WORD] = value

    @property
    def latest_tick(self) -> int:
        """The latest tick that anybody gave out."""
        return self.words[_LATEST_TICK_WORD]

    @latest_tick.setter
    def latest_tick(self, value: int) -> None:
        self.words[_LATEST_TICK_WORD] = value

    def claimed(self) -> list[int]:
        """Return the numbers of the participants that are, or died without leaving."""
        claims = self._memory[_CLAIMS_BYTE : _CLAIMS_BYTE + MAX_PARTICIPANTS]
        return [number for number, claim in enumerate(claims) if claim]

    def set_claimed(self, number: int, claimed: bool) -> None:
        """Note that a participant has come or gone."""
        self._memory[_CLAIMS_BYTE + number] = _CLAIMED if claimed else 0


def participant_byte(number: int) -> int:
    """Return the byte that a participant, and the workers who write for it, hold locked while they live."""
    return 1 + number


def _ring_entries(slots: int) -> int:
    return int(max(_SMALLEST_RING, 1 << (2 * slots - 1).bit_length()))


def _offsets(slots: int) -> tuple[int, int, int, int, int]:
    ring = _HEADER_BYTES
    uses = ring + 8 * _ring_entries(slots)
    pins = uses + 8 * slots
    records = pins + 2 * MAX_PARTICIPANTS * slots
    end = records + RECORD_BYTES * slots
    return ring, uses, pins, records, -(-end // 8) * 8
