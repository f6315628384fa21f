"""Locks on single bytes of a file, which the kernel releases when their holder dies.

They are open-file-description locks: unlike POSIX record locks they survive the closing of other descriptors of the
same file in the process, and two holders inside one process exclude each other like any two.
"""

import errno
import fcntl
import os
import struct
import time
import weakref
from collections.abc import Callable
from pathlib import Path

_FLOCK = struct.Struct("hhqqi4x")
_BUSY = (errno.EAGAIN, errno.EACCES)
_FIRST_PAUSE_S = 20e-6
_LONGEST_PAUSE_S = 1e-3


class ByteLocks:
    """The locks that one holder has on a file; they go with ``close()``, with the process, and never to a fork."""

    def __init__(self, path: Path) -> None:
        self._descriptor = -1
        # An own open file description: a mapping keeps its descriptor, and with it the locks, for longer.
        self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        call_in_forked_child(self._drop)

    def acquire(self, byte: int, *, exclusive: bool, wait_s: float = 0.0) -> bool:
        """Lock ``byte``, waiting at most ``wait_s``; return whether it is held now."""
        kind = fcntl.F_WRLCK if exclusive else fcntl.F_RDLCK
        request = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
        deadline_s = 0.0
        pause_s = _FIRST_PAUSE_S
        while True:
            try:
                fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, request)
                return True
            except OSError as error:
                if error.errno not in _BUSY:
                    raise
            now_s = time.monotonic()
            deadline_s = deadline_s or now_s + wait_s
            if now_s >= deadline_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def release(self, byte: int) -> None:
        """Unlock ``byte``; nothing happens if it is not held."""
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, byte, 1, 0))

    def held_elsewhere(self, byte: int) -> bool:
        """Return whether another holder, in this process or another, has ``byte`` locked."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)
        answer = fcntl.fcntl(self._descriptor, fcntl.F_OFD_GETLK, request)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Give up every lock; a second call does nothing."""
        if self._descriptor < 0:
            return
        # Said aloud, for a child that was forked without Python's knowledge shares the description.
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
        self._drop()

    def __del__(self) -> None:
        self._drop()

    def _drop(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def call_in_forked_child(method: Callable[[], None]) -> None:
    """Call a bound ``method`` in every child forked from now on, as long as its object lives."""
    reference = weakref.WeakMethod(method)

    def call() -> None:
        alive = reference()
        if alive is not None:
            alive()

    os.register_at_fork(after_in_child=call)
