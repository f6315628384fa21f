"""What a run has on this machine, written down while it runs, so that whoever survives can clean up after it."""

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

_RECORD_FILE = "run.json"
_LOCK_FILE = "lock"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One run of ``coda up``.

    Attributes:
        name: The CodaCluster's name.
        url: The router's base URL.
        engine_urls: The engines' base URLs.
        pid: Process id of ``coda up``.
        boot_id: The kernel's boot id: process ids of another boot mean nothing.
        python: Interpreter that every process of the run executes.
        scratch_dir: Private folder: temporary files, secrets, settings.
        page_dir: Private folder of shared-memory pages.
        groups: Process groups that were started and not yet ended.
        shared_memory: Files in /dev/shm that the run's processes made.
    """

    name: str
    url: str
    engine_urls: tuple[str, ...]
    pid: int
    boot_id: str
    python: str
    scratch_dir: str
    page_dir: str
    groups: tuple[int, ...] = ()
    shared_memory: tuple[str, ...] = ()

    @property
    def internal_token_file(self) -> Path:
        """Where the token of the engines' internal endpoints is."""
        return internal_token_file(Path(self.scratch_dir))

    @classmethod
    def from_json(cls, data: bytes) -> Self:
        """Return the record in ``data``; ValueError, KeyError or TypeError when it is none."""
        fields: dict[str, Any] = json.loads(data)
        known = {name: fields[name] for name in cls.__slots__}
        lists = {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
        return cls(**known | lists)


@dataclass(frozen=True, slots=True)
class StateDir:
    """One CodaCluster's folder on this machine: its lock, the record of its run, its logs."""

    path: Path

    @property
    def logs(self) -> Path:
        """Folder of the processes' output."""
        return self.path / "logs"

    def read(self) -> RunRecord | None:
        """Return the record of the run that is, or was, here."""
        try:
            return RunRecord.from_json((self.path / _RECORD_FILE).read_bytes())
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def write(self, record: RunRecord) -> None:
        """Replace the record in one move."""
        handle, unfinished = tempfile.mkstemp(dir=self.path, prefix=".run-")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(asdict(record), file)
        os.replace(unfinished, self.path / _RECORD_FILE)

    def forget(self) -> None:
        """Remove the record: nothing of the run is left."""
        (self.path / _RECORD_FILE).unlink(missing_ok=True)

    def is_locked(self) -> bool:
        """Return whether a process holds the folder's lock: a run that lives does."""
        if not self.path.is_dir():
            return False
        with self.lock(wait=False) as was_free:
            return not was_free

    @contextmanager
    def lock(self, *, wait: bool) -> Iterator[bool]:
        """Hold the folder's lock while the block runs; yields False when another process holds it (wait=False)."""
        self.path.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path / _LOCK_FILE, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield False
                return
            yield True
        finally:
            os.close(handle)


class RunLog:
    """The record of a run under way: changed in memory and on disk together."""

    def __init__(self, state: StateDir, record: RunRecord) -> None:
        self._state = state
        self.record = record
        state.write(record)

    def add_group(self, group: int) -> None:
        """Note a process group that has just been started."""
        self._change(groups=(*self.record.groups, group))

    def drop_group(self, group: int) -> None:
        """Note that a process group has ended."""
        self._change(groups=tuple(other for other in self.record.groups if other != group))

    def set_shared_memory(self, files: set[str]) -> None:
        """Note which shared-memory files the run's processes have made."""
        if files != set(self.record.shared_memory):
            self._change(shared_memory=tuple(sorted(files)))

    def _change(self, **changes: tuple[int, ...] | tuple[str, ...]) -> None:
        self.record = replace(self.record, **changes)  # type: ignore[arg-type]
        self._state.write(self.record)


def internal_token_file(scratch: Path) -> Path:
    """Return where a run keeps the token of its internal endpoints, below its private folder."""
    return scratch / "secrets" / "internal-token"


def state_root(environment: Mapping[str, str]) -> Path:
    """Return the folder of every CodaCluster's state: ``$XDG_STATE_HOME/coda`` or ``~/.local/state/coda``."""
    base = environment.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "coda"


def boot_id() -> str:
    """Return the kernel's id of this boot."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
