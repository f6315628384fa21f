"""The worker's half: the bytes of the pages of one rank, each sealed with what it is and a checksum."""

import mmap
import struct
from pathlib import Path
from typing import Self

import numpy as np
import xxhash
from numpy.typing import NDArray

from coda_engine.shadow.files import FileForm, SharedFile, open_shared_file
from coda_engine.shadow.index_file import IndexFile, participant_byte
from coda_engine.shadow.layout import PageRef, ShadowLayout
from coda_engine.shadow.locks import call_in_forked_child
from coda_engine.shadow.records import SlotRecord, SlotState, decode_record

_MAGIC = b"CODASHPG"
_SCHEMA = 1
_HEADER = struct.Struct("<8sIIQQQ16s")  # magic, schema, rank, slots, page bytes, the index's instance, layout digest
_CHECKSUM = struct.Struct("<Q")
_SEAL = struct.Struct("<16sQQQ")  # key digest, generation, payload bytes, payload checksum; then the checksum of these
_SEAL_BYTES = 64
_ALIGNMENT = 4096
_STRIDE_ALIGNMENT = 64
_LOOKS = 3


class ShadowPages:
    """All pages of one rank, mapped into this process. Methods may be called from several threads.

    Attributes:
        payload: Every page: uint8, shape (slots, page stride in bytes >= page_bytes), C-contiguous and aligned to
            4,096 bytes, so that a GPU worker can register the whole array as pinned memory (its address is
            ``payload.ctypes.data``, its size ``payload.nbytes``). It must not be touched after ``close()``.
    """

    def __init__(self, index: IndexFile, data: SharedFile, layout: ShadowLayout) -> None:
        self._index = index
        self._data = data
        self._page_bytes = layout.page_bytes
        payload_byte, stride, _ = _offsets(layout)
        self.payload: NDArray[np.uint8] = np.frombuffer(
            data.memory, np.uint8, layout.slots * stride, offset=payload_byte
        ).reshape(layout.slots, stride)
        self._leased: set[int] = set()
        self._is_open = True
        call_in_forked_child(self._forget)

    @classmethod
    def open(cls, folder: Path, layout: ShadowLayout, rank: int) -> Self:
        """Return the pages of ``rank``; whoever comes first makes folder and files.

        The space is reserved here (a full /dev/shm is an error now, never a SIGBUS later).

        Raises:
            ShadowError: Too little space, a folder or file of another owner or open to others, a file system without
                the locks that the store needs.
            ValueError: ``rank`` is not one of the layout's.
        """
        if not 0 <= rank < layout.ranks:
            raise ValueError(f"rank {rank} of a layout with {layout.ranks} ranks")
        index = IndexFile.open(folder, layout)
        try:
            data = open_shared_file(folder, _form(layout, rank, index.instance))
        except BaseException:
            index.close()
            raise
        return cls(index, data, layout)

    def begin_write(self, ref: PageRef) -> bool:
        """Take part in ``ref``'s reservation; to be called before the first byte is written into its page.

        While this object is open, the reservation's slot cannot go to another engine, even if the scheduler that
        reserved it dies: without this a worker that outlives its scheduler could write into a page that is not its
        own any more. Costs a look at the index, and one system call the first time.

        Returns:
            False if the reservation is gone: do not write, report the copy as failed.
        """
        self._check_open()
        owner = self._owner_of(ref)
        if owner is None or owner in self._leased:
            return owner is not None
        byte = participant_byte(owner)
        if not self._index.locks.acquire(byte, exclusive=False):
            return False
        # Only now can the slot not go away any more; it may have gone in between.
        if self._owner_of(ref) != owner:
            self._index.locks.release(byte)
            return False
        self._leased.add(owner)
        return True

    def page(self, slot: int) -> NDArray[np.uint8]:
        """Return a writable view of the page, uint8, shape (page_bytes,)."""
        self._check_open()
        return self.payload[slot, : self._page_bytes]

    def seal(self, ref: PageRef) -> None:
        """Mark the page's present bytes as those of ``ref``: key, generation, length and xxh3 checksum."""
        payload = self.page(ref.slot)
        start = _seal_byte(ref.slot)
        self._data.memory[start : start + _SEAL_BYTES] = _seal(ref, payload)

    def intact(self, ref: PageRef, copy: NDArray[np.uint8] | None = None) -> bool:
        """Return whether the page's bytes are those that were sealed for exactly this key and generation.

        Args:
            ref: A pinned page.
            copy: Verify these bytes (a contiguous copy of the page) instead of the page itself.
        """
        payload = self.page(ref.slot)
        start = _seal_byte(ref.slot)
        return self._data.memory[start : start + _SEAL_BYTES] == _seal(ref, payload if copy is None else copy)

    def holds(self, ref: PageRef) -> bool:
        """Return whether the page is still this reservation's; to be asked after its bytes were copied.

        A pin keeps a page, but it goes with the scheduler that pinned it: one that closes its index in the middle of
        a copy leaves the page to others. A page is written anew only after its record says so, so bytes that were
        ``intact`` before the copy, in a page that is still held after it, are what was copied.
        """
        self._check_open()
        record = self._record_of(ref.slot)
        return record is not None and record.generation == ref.generation

    def close(self) -> None:
        """Give up the mapping and every reservation taken part in; a second call does nothing."""
        if not self._is_open:
            return
        self._is_open = False
        del self.payload
        self._data.close()
        self._index.close()

    def _forget(self) -> None:
        # In a forked child: the reservations are the parent's.
        self._is_open = False

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError("the shadow's pages are closed, or were opened by the parent of this process")

    def _owner_of(self, ref: PageRef) -> int | None:
        record = self._record_of(ref.slot)
        is_ours = record is not None and record.state == SlotState.WRITING and record.generation == ref.generation
        return record.owner if record is not None and is_ours else None

    def _record_of(self, slot: int) -> SlotRecord | None:
        for _ in range(_LOOKS):
            # Read without the lock: while somebody replaces the record it looks damaged.
            record = decode_record(slot, self._index.record(slot))
            if record is not None:
                return record
        return None


def _form(layout: ShadowLayout, rank: int, instance: int) -> FileForm:
    digest = bytes.fromhex(layout.digest())
    header = _HEADER.pack(_MAGIC, _SCHEMA, rank, layout.slots, layout.page_bytes, instance, digest)
    header += _CHECKSUM.pack(xxhash.xxh3_64_intdigest(header))

    def initialise(memory: mmap.mmap) -> None:
        memory[: len(header)] = header

    def is_valid(memory: mmap.mmap) -> bool:
        return memory[: len(header)] == header

    return FileForm(layout.digest(), f"rank{rank}", _offsets(layout)[-1], is_valid, initialise)


def _offsets(layout: ShadowLayout) -> tuple[int, int, int]:
    """Return where the payload begins, the stride of its pages and where the file ends, all in bytes."""
    payload = -(-_seal_byte(layout.slots) // _ALIGNMENT) * _ALIGNMENT
    stride = -(-layout.page_bytes // _STRIDE_ALIGNMENT) * _STRIDE_ALIGNMENT
    return payload, stride, payload + layout.slots * stride


def _seal_byte(slot: int) -> int:
    return _ALIGNMENT + slot * _SEAL_BYTES


def _seal(ref: PageRef, payload: NDArray[np.uint8]) -> bytes:
    fields = _SEAL.pack(
        xxhash.xxh3_128_digest(ref.key),
        ref.generation,
        payload.nbytes,
        xxhash.xxh3_64_intdigest(payload.data, seed=ref.generation),
    )
    return (fields + _CHECKSUM.pack(xxhash.xxh3_64_intdigest(fields))).ljust(_SEAL_BYTES, b"\0")
