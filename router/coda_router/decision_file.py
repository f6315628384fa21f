"""Every placement decision as one JSON line in a file: bounded, and never in a request's way."""

import asyncio
import logging
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from coda_router.errors import ConfigurationError

MAX_FILE_BYTES = 64 * 1024 * 1024
"""Size from which a new file is begun; the one before it is kept as ``FILE.1``, and none older."""

MAX_BUFFERED_BYTES = 8 * 1024 * 1024
"""Most bytes that wait to be written; lines beyond are dropped and counted: a disk may hang."""

FLUSH_INTERVAL_S = 0.25
"""Time between two writes."""

LAST_WRITE_S = 5.0
"""Longest time to wait for the last lines to be written."""

_log = logging.getLogger("coda.router.decisions")


class DecisionFile:
    """Appends lines to a file, in another thread and many at once.

    A file that cannot be written, such as one on a full disk, costs the lines of that time and nothing else: they
    are counted, the log says so once, and writing goes on as soon as it is possible again. The file may be moved
    away or removed at any time.

    Use as an async context manager: lines are written while it is open, the last ones at its end.

    Args:
        path: The file, appended to if it exists; or a pipe or device, which has no size limit.
        max_bytes: Size from which a new file is begun, bytes.

    Attributes:
        written: Lines written.
        dropped: Lines lost.

    Raises:
        ConfigurationError: The file cannot be written at the start.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._lines: list[bytes] = []
        self._buffered_bytes = 0
        self._is_failing = False
        self._is_ending = asyncio.Event()
        self._writer: asyncio.Task[None] | None = None
        self.written = 0
        self.dropped = 0
        try:
            os.close(self._open())
        except OSError as error:
            raise ConfigurationError(
                f"--decision-log {path}: cannot be written: {error.strerror}; name a file in a folder that exists "
                "and can be written to"
            ) from error

    async def __aenter__(self) -> "DecisionFile":
        self._is_ending.clear()
        self._writer = asyncio.create_task(self._write_until_the_end(), name="decision log")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._is_ending.set()
        if self._writer is not None:
            # Not cancelled: the thread would go on writing beside whoever writes next.
            await asyncio.wait({self._writer}, timeout=LAST_WRITE_S)

    def add(self, line: bytes) -> None:
        """Have a line written soon.

        Args:
            line: One JSON document without a line end.
        """
        if self._buffered_bytes + len(line) >= MAX_BUFFERED_BYTES:
            self.dropped += 1
            self._note_failure("writing is too slow")
            return
        self._lines.append(line)
        self._buffered_bytes += len(line) + 1

    async def _write_until_the_end(self) -> None:
        is_last = False
        while not is_last:
            with suppress(TimeoutError):
                async with asyncio.timeout(FLUSH_INTERVAL_S):
                    await self._is_ending.wait()
            is_last = self._is_ending.is_set()
            await self._flush()

    async def _flush(self) -> None:
        lines, self._lines = self._lines, []
        self._buffered_bytes = 0
        if not lines:
            return
        written, error = await asyncio.to_thread(self._write, lines)
        self.written += written
        self.dropped += len(lines) - written
        if error is not None:
            self._note_failure(str(error))
        elif self._is_failing:
            self._is_failing = False
            _log.info("decisions are written to %s again; %d were lost so far", self._path, self.dropped)

    def _note_failure(self, what: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            _log.error("decisions cannot be written to %s and are lost until they can: %s", self._path, what)

    def _write(self, lines: Sequence[bytes]) -> tuple[int, OSError | None]:
        """Append lines, beginning new files where they get too large; return how many, and what ended it early."""
        written = 0
        try:
            while written < len(lines):
                written += self._write_some(lines[written:])
        except OSError as error:
            return written, error
        return written, None

    def _write_some(self, lines: Sequence[bytes]) -> int:
        """Append as many lines as the file has room for, or put a full one aside; return how many lines."""
        file = self._open()
        try:
            status = os.fstat(file)
            count = self._room(lines, status.st_size) if stat.S_ISREG(status.st_mode) else len(lines)
            if count == 0:
                self._path.replace(self._path.with_name(self._path.name + ".1"))
                return 0
            try:
                _write_all(file, b"\n".join([*lines[:count], b""]))
            except OSError:
                # Half a line would spoil the next one.
                with suppress(OSError):
                    os.ftruncate(file, status.st_size)
                raise
            return count
        finally:
            os.close(file)

    def _room(self, lines: Sequence[bytes], size: int) -> int:
        """Return how many of the lines a file of this size has room for; an empty one takes any first line."""
        count = 0
        for line in lines:
            if size and size + len(line) >= self._max_bytes:
                break
            size += len(line) + 1
            count += 1
        return count

    def _open(self) -> int:
        # Anew each time: whoever moves the file away gets no more lines, and a new one is begun.
        return os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
