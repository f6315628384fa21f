"""The shadow's files: who may own them, how they are made, found, replaced and removed.

One folder holds a lock file and, for each layout, an index and a data file for each rank. Everybody who has a file open
holds its USE byte shared; a file goes away only under the folder's NAMES lock and with its USE byte exclusive.
"""

import contextlib
import errno
import hashlib
import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from coda_engine.contract.reasons import Reason
from coda_engine.shadow.errors import ShadowError
from coda_engine.shadow.locks import ByteLocks

FILE_PREFIX = "coda-shadow-"
USE_BYTE = 1 << 20
"""Byte of every shadow file that is locked shared by those who have it open."""

_LOCK_FILE = "coda-shadow.lock"
_NAMES_BYTE = 0
_OPEN_WAIT_S = 10.0
_MAKE_WAIT_S = 300.0
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class FileForm:
    """What a file has to be.

    Attributes:
        digest: The layout's digest.
        part: The file's own part of the name.
        size_bytes: Its exact size.
        is_valid: Whether a mapped file of that size is what this process expects.
        initialise: Writes the header of a new file, which is all zeros.
    """

    digest: str
    part: str
    size_bytes: int
    is_valid: Callable[[mmap.mmap], bool]
    initialise: Callable[[mmap.mmap], None]

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{FILE_PREFIX}{self.digest}.{self.part}"


@dataclass(frozen=True, slots=True)
class SharedFile:
    """A mapped file and the locks that this holder has on it (USE among them)."""

    path: Path
    memory: mmap.mmap
    locks: ByteLocks

    def close(self) -> None:
        """Give up locks and mapping; a mapping that is still looked at goes with its last view."""
        with contextlib.suppress(OSError):  # Only the order in which unused layouts are removed depends on it.
            os.utime(self.path)
        self.locks.close()
        with contextlib.suppress(BufferError):
            self.memory.close()


def open_shared_file(folder: Path, form: FileForm) -> SharedFile:
    """Return the file of that form in ``folder``, made if it is absent, or replaced if it is damaged and unused.

    Raises:
        ShadowError: See ``ShadowIndex.open``.
    """
    _check_folder(folder)
    try:
        locks = _folder_locks(folder)
        try:
            return _open_or_make(folder, form, locks)
        finally:
            locks.close()
    except OSError as error:
        raise ShadowError(
            Reason.SHADOW_UNUSABLE,
            f"{folder / form.name}: {error.strerror or error}; the shadow's folder must be a writable memory file "
            "system with open-file-description locks (Linux tmpfs)",
        ) from error


def _check_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = os.lstat(folder)
    except OSError as error:
        raise ShadowError(
            Reason.SHADOW_UNUSABLE, f"{folder}: cannot be made ({error.strerror or error}); name a writable folder"
        ) from error
    if not stat.S_ISDIR(status.st_mode):
        raise ShadowError(Reason.SHADOW_UNSAFE, f"{folder}: is a link or no folder; remove it or name another folder")
    _check_owner(folder, status)


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise ShadowError(
            Reason.SHADOW_UNSAFE,
            f"{path}: belongs to user {status.st_uid}, this engine runs as {os.geteuid()}; whoever can write there "
            "could change what the model computes: give each CodaCluster a folder of its own",
        )
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise ShadowError(
            Reason.SHADOW_UNSAFE,
            f"{path}: is open to others (mode {stat.S_IMODE(status.st_mode):04o}); take their rights away (chmod go=)",
        )


def _folder_locks(folder: Path) -> ByteLocks:
    path = folder / _LOCK_FILE
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    return ByteLocks(path)


def _open_or_make(folder: Path, form: FileForm, locks: ByteLocks) -> SharedFile:
    # One maker for each name, so that ranks reserve their space side by side; then the names, for moments only.
    _acquire(locks, _maker_byte(form.name), _MAKE_WAIT_S, folder / form.name)
    _acquire(locks, _NAMES_BYTE, _OPEN_WAIT_S, folder / _LOCK_FILE)
    try:
        found = _open_existing(folder / form.name, form)
    finally:
        locks.release(_NAMES_BYTE)
    return found or _make(folder, form, locks)


def _acquire(locks: ByteLocks, byte: int, wait_s: float, path: Path) -> None:
    if not locks.acquire(byte, exclusive=True, wait_s=wait_s):
        raise ShadowError(
            Reason.SHADOW_UNUSABLE,
            f"{path}: locked by another process for {wait_s:.0f} s; end the process that hangs (`lslocks` names it)",
        )


def _open_existing(path: Path, form: FileForm) -> SharedFile | None:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        raise ShadowError(Reason.SHADOW_UNSAFE, f"{path}: is a link or no file; remove it")
    _check_owner(path, status)
    locks = ByteLocks(path)
    try:
        if status.st_size == form.size_bytes:
            memory = _map(path, form.size_bytes)
            if form.is_valid(memory) and locks.acquire(USE_BYTE, exclusive=False):
                os.utime(path)
                return SharedFile(path, memory, locks)
            memory.close()
        if not locks.acquire(USE_BYTE, exclusive=True):
            raise ShadowError(
                Reason.SHADOW_UNUSABLE,
                f"{path}: is damaged or belongs to another index, and other engines have it open; restart them",
            )
        path.unlink()
    except BaseException:
        locks.close()
        raise
    locks.close()
    return None


def _make(folder: Path, form: FileForm, locks: ByteLocks) -> SharedFile:
    # Named only once it is whole, so that a maker who dies leaves nothing that looks like a shadow.
    unfinished = folder / f".{form.name}.new"
    unfinished.unlink(missing_ok=True)
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    own_locks: ByteLocks | None = None
    try:
        os.fchmod(descriptor, 0o600)
        _reserve_space(descriptor, folder, form, locks)
        memory = _map(unfinished, form.size_bytes)
        form.initialise(memory)
        own_locks = ByteLocks(unfinished)
        own_locks.acquire(USE_BYTE, exclusive=False)
        _acquire(locks, _NAMES_BYTE, _OPEN_WAIT_S, folder / _LOCK_FILE)
        try:
            unfinished.rename(folder / form.name)
        finally:
            locks.release(_NAMES_BYTE)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        if own_locks is not None:
            own_locks.close()
        raise
    finally:
        os.close(descriptor)
    return SharedFile(folder / form.name, memory, own_locks)


def _reserve_space(descriptor: int, folder: Path, form: FileForm, locks: ByteLocks) -> None:
    """Reserve every byte of the file now, at the cost of the longest unused layouts if need be."""
    while True:
        space = os.fstatvfs(descriptor)
        free_bytes = space.f_bavail * space.f_frsize
        if form.size_bytes <= free_bytes:  # Otherwise do not fill the file system first, only to fail.
            try:
                os.posix_fallocate(descriptor, 0, form.size_bytes)
                return
            except OSError as error:
                if error.errno not in _NO_SPACE:
                    raise
        os.ftruncate(descriptor, 0)
        if _remove_oldest_unused(folder, form.digest, locks) is None:
            raise ShadowError(
                Reason.SHADOW_NO_SPACE,
                f"{folder}: {form.part} needs {form.size_bytes:,} bytes, {free_bytes:,} are free; make the memory file "
                "system larger (emptyDir sizeLimit, --shm-size) or spec.kvShadow.size smaller",
            )


def _remove_oldest_unused(folder: Path, keep: str, locks: ByteLocks) -> str | None:
    _acquire(locks, _NAMES_BYTE, _OPEN_WAIT_S, folder / _LOCK_FILE)
    try:
        layouts: dict[str, list[Path]] = {}
        for path in sorted(folder.iterdir()):
            name = path.name.removeprefix(".")
            if name.startswith(FILE_PREFIX):
                layouts.setdefault(name.removeprefix(FILE_PREFIX).partition(".")[0], []).append(path)
        layouts.pop(keep, None)
        for digest in sorted(layouts, key=lambda digest: _last_used_s(layouts[digest])):
            if _remove_unless_used(layouts[digest], locks):
                return digest
        return None
    finally:
        locks.release(_NAMES_BYTE)


def _last_used_s(paths: list[Path]) -> float:
    last_s = 0.0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # A maker that failed has just taken it away.
            last_s = max(last_s, path.lstat().st_mtime)
    return last_s


def _remove_unless_used(paths: list[Path], locks: ByteLocks) -> bool:
    held: list[ByteLocks] = []
    making: list[int] = []
    try:
        for path in paths:
            maker = _maker_byte(path.name.removeprefix(".").removesuffix(".new"))
            if not locks.acquire(maker, exclusive=True):
                return False
            making.append(maker)
            held.append(ByteLocks(path))
            if not held[-1].acquire(USE_BYTE, exclusive=True):
                return False
        for path in paths:
            path.unlink()
        return True
    except OSError:
        return False
    finally:
        for own in held:
            own.close()
        for maker in making:
            locks.release(maker)


def _maker_byte(name: str) -> int:
    return 1 + int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "big")


def _map(path: Path, size_bytes: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, size_bytes)
    finally:
        os.close(descriptor)
