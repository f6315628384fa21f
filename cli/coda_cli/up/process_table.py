"""The kernel's process table, read from /proc: group members, what they execute, which shared memory they map."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

_SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - shared memory, not a temporary file
_ZOMBIE = "Z"


def group_members(group: int) -> list[int]:
    """Return the living processes of a process group (zombies are not)."""
    return [pid for pid in _pids() if _group_of(pid) == group]


def executable(pid: int) -> str | None:
    """Return the file that a process executes; None when it is gone or somebody else's."""
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return None


def mapped_shared_memory(pids: Iterable[int]) -> set[str]:
    """Return the files directly in /dev/shm that processes have mapped.

    Found by inode: a semaphore is mapped under a passing name by the process that makes it.
    """
    inodes: set[int] = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue  # gone meanwhile
        inodes.update(int(line.split(maxsplit=5)[4]) for line in maps.splitlines() if _SHARED_MEMORY in line)
    return {entry.path for entry in os.scandir(_SHARED_MEMORY) if entry.inode() in inodes}


def mapped_by_anyone(files: set[str]) -> set[str]:
    """Return which of ``files`` some living process has mapped."""
    return files & mapped_shared_memory(_pids()) if files else set()


def _pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def _group_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    state, _, group, *_ = stat.rpartition(")")[2].split()
    return None if state == _ZOMBIE else int(group)
