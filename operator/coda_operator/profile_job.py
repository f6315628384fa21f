"""``python -m coda_operator.profile_job [options] -- ENGINE...``: what the profiling Job runs in its pod.

Starts the engine, measures it, writes the CodaProfile with the Job's own service account, ends. The last
words of a failure go where Kubernetes keeps a container's, and from there into the condition Profiled.
"""

import argparse
import json
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from coda_engine.contract.profile import Profile
from coda_engine.profiling import EngineClient, ProfilingError, measure_profile
from coda_operator.errors import JobError
from coda_operator.in_cluster import apply_object
from coda_operator.profile_object import profile_object

_TERMINATION_LOG = Path("/dev/termination-log")
_KEPT_LINES = 400
_POLL_S = 0.5
_STOP_S = 10.0
_MAX_WORDS_CHARS = 1500
_RAISED = re.compile(r"^(?:\(.*?\) )?(?:ERROR .*?\] )?(?P<error>[\w.]*(?:Error|Exception): .*)$")
"""The line in which an exception says what it is, with or without vLLM's prefix of process, time and place."""


@dataclass(frozen=True, slots=True)
class JobOptions:
    """The Job's command line.

    Attributes:
        namespace: Where the CodaProfile goes.
        owner: Owner reference of the CodaCluster.
        engine_url: Base URL at which the engine will answer.
        internal_token_file: Token of the engine's internal endpoints; None where they are open.
        startup_timeout_s: Time that the engine may take until it answers, seconds.
        quick: Measure fewer points.
        engine_argv: The engine's command line.
    """

    namespace: str
    owner: dict[str, Any]
    engine_url: str
    internal_token_file: Path | None
    startup_timeout_s: float
    quick: bool
    engine_argv: tuple[str, ...]


def parse_options(arguments: Sequence[str]) -> JobOptions:
    """Return the options in a command line; prints help and exits on a mistake."""
    parser = argparse.ArgumentParser(prog="python -m coda_operator.profile_job", description=__doc__)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--owner", required=True, type=json.loads, help="owner reference, JSON")
    parser.add_argument("--engine-url", required=True)
    parser.add_argument("--internal-token-file", type=Path)
    parser.add_argument("--startup-timeout-seconds", type=float, default=1200)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("engine", nargs="+", help="the engine's command line, after --")
    options = parser.parse_args(arguments)
    return JobOptions(
        namespace=options.namespace,
        owner=options.owner,
        engine_url=options.engine_url,
        internal_token_file=options.internal_token_file,
        startup_timeout_s=options.startup_timeout_seconds,
        quick=options.quick,
        engine_argv=tuple(options.engine),
    )


def run(options: JobOptions, write: Callable[[dict[str, Any]], None], say: Callable[[str], None]) -> Profile:
    """Measure and write; returns what was measured.

    Args:
        options: The command line.
        write: Makes the object exist in the Kubernetes cluster.
        say: Gets progress, a line at a time.

    Raises:
        JobError: The engine does not start, cannot be measured, or the profile cannot be written.
    """
    with running_engine(options.engine_argv) as engine:
        say(f"waiting for the engine, at most {options.startup_timeout_s:.0f} s")
        engine.wait_until_healthy(options.engine_url, options.startup_timeout_s)
        token = options.internal_token_file.read_text().strip() if options.internal_token_file else None
        try:
            profile = measure_profile(EngineClient(options.engine_url, token), quick=options.quick, progress=say)
        except ProfilingError as error:
            raise JobError(f"the engine could not be measured: {error}{engine.complaint()}") from error
    item = profile_object(profile, options.namespace, options.owner)
    write(item)
    say(f"wrote CodaProfile {item['metadata']['name']}, digest {profile.digest()}")
    return profile


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


def _end_on_sigterm(_signal: int, _frame: FrameType | None) -> None:
    raise JobError("stopped by Kubernetes (SIGTERM)")


def main() -> int:
    """Run the Job; returns the exit status."""
    options = parse_options(sys.argv[1:])
    signal.signal(signal.SIGTERM, _end_on_sigterm)
    try:
        run(options, apply_object, say=lambda line: print(f"profile: {line}", flush=True))
    except JobError as error:
        print(f"profile: {error}", file=sys.stderr, flush=True)
        if _TERMINATION_LOG.exists():
            _TERMINATION_LOG.write_text(str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
