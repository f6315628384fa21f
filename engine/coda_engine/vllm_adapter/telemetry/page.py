"""A page of shared memory: one writer, any number of readers, no locks, safe against kill -9.

Layout: a file header (magic, slot size), then two slots, each ``sequence, version, length, checksum,
payload``. The writer fills the slot that is not the latest and stores that slot's sequence last, so a
writer that dies in the middle leaves the other slot whole; a reader takes the newest slot whose checksum
holds. Files are named ``coda-page-...`` and locked by their maker for its lifetime, which is how a later
start knows leftovers of dead processes from pages in use, whatever the pid namespace.
"""

import fcntl
import mmap
import os
import secrets
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

FILE_PREFIX = "coda-page-"

_MAGIC = b"CODAPG01"
_HEADER = struct.Struct("<8sQ")
_HEADER_BYTES = 64
_SLOT = struct.Struct("<QQII")
_SLOT_HEADER_BYTES = 32
_READ_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class PageContent:
    """What a reader found: the payload and the version that its writer gave it (grows by one)."""

    version: int
    payload: bytes


class PageWriter:
    """The only writer of a page.

    Attributes:
        last_version: Version of the content on the page; 0 on an empty one.
    """

    def __init__(self, path: Path) -> None:
        self._memory, self._slot_bytes = _map(path, writable=True)
        newest = max(_slot_header(self._memory, slot, self._slot_bytes) for slot in (0, 1))
        self._sequence = newest[0]
        self.last_version = newest[1]

    @property
    def capacity(self) -> int:
        """Most bytes of a payload."""
        return self._slot_bytes - _SLOT_HEADER_BYTES

    def write(self, version: int, payload: bytes) -> None:
        """Publish ``payload`` under ``version``.

        Raises:
            ValueError: The payload does not fit; the page keeps its content.
        """
        if len(payload) > self.capacity:
            raise ValueError(f"{len(payload)} bytes do not fit a page of {self.capacity}")
        sequence = self._sequence + 1
        start = _slot_start(sequence & 1, self._slot_bytes)
        memory = self._memory
        _SLOT.pack_into(memory, start, 0, version, len(payload), 0)
        memory[start + _SLOT_HEADER_BYTES : start + _SLOT_HEADER_BYTES + len(payload)] = payload
        _SLOT.pack_into(memory, start, sequence, version, len(payload), _checksum(sequence, version, payload))
        self._sequence, self.last_version = sequence, version

    def close(self) -> None:
        """Unmap the page; its file stays for readers."""
        self._memory.close()


class PageReader:
    """A reader of a page; keeps the last good content for the moments in which a writer is at work."""

    def __init__(self, path: Path) -> None:
        self._memory, self._slot_bytes = _map(path, writable=False)
        self._last: PageContent | None = None

    def read(self) -> PageContent | None:
        """Return the newest whole content; None before the first publication."""
        for _ in range(_READ_ATTEMPTS):
            headers = [_slot_header(self._memory, slot, self._slot_bytes) for slot in (0, 1)]
            newest = max((0, 1), key=lambda slot: headers[slot][0])
            for slot in (newest, 1 - newest):
                content = self._read_slot(slot, headers[slot])
                if content is not None and (self._last is None or content.version >= self._last.version):
                    self._last = content
                    return content
        return self._last

    def _read_slot(self, slot: int, header: tuple[int, int, int, int]) -> PageContent | None:
        sequence, version, length, checksum = header
        if sequence == 0 or length > self._slot_bytes - _SLOT_HEADER_BYTES:
            return None
        start = _slot_start(slot, self._slot_bytes) + _SLOT_HEADER_BYTES
        payload = self._memory[start : start + length]
        return PageContent(version, payload) if _checksum(sequence, version, payload) == checksum else None

    def close(self) -> None:
        """Unmap the page."""
        self._memory.close()


class PageFiles:
    """The files of one engine's pages, made and at the end removed by the engine's first process."""

    def __init__(self, prefix: Path, descriptors: list[int]) -> None:
        self.prefix = prefix
        self._descriptors = descriptors
        self._owner_pid = os.getpid()

    @classmethod
    def create(cls, folder: Path, capacities: dict[str, int]) -> Self:
        """Return new, empty pages in ``folder`` after removing those that dead processes left there.

        Raises:
            OSError: The folder does not exist, is not writable, or is too small.
        """
        remove_leftovers(folder)
        prefix = folder / f"{FILE_PREFIX}{os.getpid()}-{secrets.token_hex(4)}"
        descriptors: list[int] = []
        files = cls(prefix, descriptors)
        try:
            for name, capacity in capacities.items():
                descriptors.append(_create_file(page_path(prefix, name), capacity))
        except OSError:
            files.remove()
            raise
        return files

    def remove(self) -> None:
        """Delete the files, once, and only in the process that made them."""
        if os.getpid() != self._owner_pid:
            return
        remove_pages(self.prefix)
        while self._descriptors:
            os.close(self._descriptors.pop())


def page_path(prefix: Path, name: str) -> Path:
    """Return the path of the page ``name`` among the files of ``prefix``."""
    return prefix.with_name(f"{prefix.name}.{name}")


def remove_pages(prefix: Path) -> None:
    """Delete every page file of ``prefix``; those that are gone already do not matter."""
    for path in prefix.parent.glob(f"{prefix.name}.*"):
        path.unlink(missing_ok=True)


def remove_leftovers(folder: Path) -> list[Path]:
    """Delete and return the page files in ``folder`` that no living process has locked."""
    removed = []
    for path in folder.glob(f"{FILE_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return removed


def _create_file(path: Path, capacity: int) -> int:
    slot_bytes = _SLOT_HEADER_BYTES + -(-capacity // 64) * 64
    # Named as a page only once it is locked, so that another engine starting now does not take it for a leftover.
    unfinished = path.with_name(f".{path.name}")
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Reserves the bytes now: a full /dev/shm is an error here, not a SIGBUS in the engine later.
        os.posix_fallocate(descriptor, 0, _HEADER_BYTES + 2 * slot_bytes)
        os.pwrite(descriptor, _HEADER.pack(_MAGIC, slot_bytes), 0)
        unfinished.rename(path)
    except OSError:
        os.close(descriptor)
        unfinished.unlink(missing_ok=True)
        raise
    return descriptor


def _map(path: Path, *, writable: bool) -> tuple[mmap.mmap, int]:
    descriptor = os.open(path, (os.O_RDWR if writable else os.O_RDONLY) | os.O_CLOEXEC)
    try:
        memory = mmap.mmap(descriptor, 0, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    magic, slot_bytes = _HEADER.unpack_from(memory, 0)
    if magic != _MAGIC or _HEADER_BYTES + 2 * slot_bytes > len(memory):
        memory.close()
        raise ValueError(f"{path} is not a page of this version")
    return memory, slot_bytes


def _slot_start(slot: int, slot_bytes: int) -> int:
    return _HEADER_BYTES + slot * slot_bytes


def _slot_header(memory: mmap.mmap, slot: int, slot_bytes: int) -> tuple[int, int, int, int]:
    sequence, version, length, checksum = _SLOT.unpack_from(memory, _slot_start(slot, slot_bytes))
    return sequence, version, length, checksum


def _checksum(sequence: int, version: int, payload: bytes) -> int:
    return zlib.crc32(payload, zlib.crc32(_SLOT.pack(sequence, version, len(payload), 0)))
