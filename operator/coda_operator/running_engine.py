"""The engine as the profiling Job's child: started, waited for, quoted when it fails, ended with all its children."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from coda_operator.errors import JobError

_KEPT_LINES = 400
_POLL_S = 0.5
_STOP_S = 10.0
_MAX_WORDS_CHARS = 1500
_RAISED = re.compile(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?(?P<error>[\w.]*(?:Error|Exception): .*)$")
"""The line in which an exception says what it is, with or without vLLM's prefix of process, time and place."""


class RunningEngine:
    """The engine's process, with the end of its output for when it fails."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._reader = threading.Thread(target=self._copy_output, daemon=True)
        self._reader.start()

    def wait_until_healthy(self, url: str, timeout_s: float) -> None:
        """Return once the engine answers.

        Raises:
            JobError: It ended, or takes longer than ``timeout_s``.
        """
        deadline_s = time.monotonic() + timeout_s
        while not _is_healthy(url):
            status = self._process.poll()
            if status is not None:
                self._reader.join(timeout=_POLL_S)
                raise JobError(f"the engine ended with exit code {status} before it was ready{self.complaint()}")
            if time.monotonic() > deadline_s:
                raise JobError(
                    f"the engine is not ready after {timeout_s:.0f} s; raise spec.engine.startupTimeoutSeconds"
                    + self.complaint()
                )
            time.sleep(_POLL_S)

    def complaint(self) -> str:
        """Return what the engine's log says went wrong, for the end of a message."""
        raised = [match["error"] for line in self._lines if (match := _RAISED.match(line))]
        words = raised[:1] or [*self._lines][-3:]
        return f"; its log: {' / '.join(words)[:_MAX_WORDS_CHARS]}" if words else ""

    def stop(self) -> None:
        """End the engine and all that it started."""
        for kind, patience_s in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
            try:
                os.killpg(self._process.pid, kind)
                self._process.wait(timeout=patience_s)
            except ProcessLookupError:
                break
            except subprocess.TimeoutExpired:
                continue
        self._close_output()

    def _copy_output(self) -> None:
        for line in self._process.stdout or ():
            self._lines.append(line.rstrip())
            sys.stdout.write(line)
            sys.stdout.flush()

    def _close_output(self) -> None:
        """Close the pipe once its reader has come to the end; a process that outlived the group keeps it open."""
        self._reader.join(timeout=_POLL_S)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()


@contextmanager
def running_engine(argv: Sequence[str]) -> Iterator[RunningEngine]:
    """Yield the started engine; it and its children are ended at the end.

    Raises:
        JobError: The program cannot be started.
    """
    try:
        process = subprocess.Popen(
            argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", start_new_session=True
        )
    except OSError as error:
        raise JobError(f"the engine cannot be started: {argv[0]}: {error.strerror}") from error
    engine = RunningEngine(process)
    try:
        yield engine
    finally:
        engine.stop()


def _is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:  # noqa: S310 - our own http URL
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
