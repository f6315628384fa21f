"""Ending a run from outside: its processes, its folders, its shared memory. Uses the standard library only."""

import os
import re
import shutil
import signal
import time
from pathlib import Path

from coda_cli.up.process_table import executable, group_members, mapped_by_anyone
from coda_cli.up.run_record import RunRecord, StateDir, boot_id

_POLL_S = 0.1
_DISPOSABLE = re.compile(r"^/dev/shm/(psm_|sem\.mp-|sem\.loky-|nccl-)[^/]+$")
"""What vLLM's processes leave in shared memory when they are killed; a KV shadow is not among it, on purpose."""

_PRIVATE_DIR = re.compile(r"^coda-[a-z0-9_]{8}$")


def end_run(record: RunRecord, grace_s: float) -> None:
    """End what is left of a run and remove what it made; harmless when all of it is gone already.

    Args:
        record: The run's last record.
        grace_s: Time between asking processes to end and ending them, seconds.
    """
    if record.boot_id == boot_id():
        groups = [group for group in record.groups if _is_ours(group, record.python)]
        signal_groups(groups, signal.SIGTERM)
        wait_until_gone(groups, grace_s)
        signal_groups(groups, signal.SIGKILL)
        wait_until_gone(groups, 2.0)
        remove_shared_memory(set(record.shared_memory))
    for folder in (Path(record.scratch_dir), Path(record.page_dir)):
        if _PRIVATE_DIR.match(folder.name):
            shutil.rmtree(folder, ignore_errors=True)


def clean_up_after_killed_runs(root: Path) -> list[str]:
    """End what runs left whose ``coda up`` is no more; return their names."""
    cleaned = []
    for path in sorted(root.iterdir()) if root.is_dir() else []:
        state = StateDir(path)
        if state.read() is None:
            continue
        with state.lock(wait=False) as locked:
            record = state.read()
            if locked and record is not None:
                end_run(record, grace_s=3.0)
                state.forget()
                cleaned.append(record.name)
    return cleaned


def signal_groups(groups: list[int], number: signal.Signals) -> None:
    """Send a signal to every process of the groups that still has members."""
    for group in groups:
        if group_members(group):
            try:
                os.killpg(group, number)
            except ProcessLookupError:
                continue


def wait_until_gone(groups: list[int], timeout_s: float) -> bool:
    """Return whether all groups were without members within ``timeout_s``."""
    deadline_s = time.monotonic() + timeout_s
    while any(group_members(group) for group in groups):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_POLL_S)
    return True


def remove_shared_memory(files: set[str]) -> None:
    """Remove the given files of /dev/shm, except what is not vLLM's to throw away and what somebody still maps."""
    candidates = {file for file in files if _DISPOSABLE.match(file)}
    for file in candidates - mapped_by_anyone(candidates):
        Path(file).unlink(missing_ok=True)


def _is_ours(group: int, python: str) -> bool:
    """Say whether a group is still the run's: process ids come round again, but not with our interpreter in them."""
    return any(executable(pid) == python for pid in group_members(group))
