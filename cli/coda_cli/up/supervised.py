"""One supervised process: started, waited for, watched, and started again when it dies."""

import asyncio
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from coda_cli.errors import StackError
from coda_cli.up.backoff import Backoff
from coda_cli.up.leftovers import remove_shared_memory, signal_groups, wait_until_gone
from coda_cli.up.machine import LOOPBACK
from coda_cli.up.report import Report
from coda_cli.up.run_record import RunLog
from coda_operator.desired.processes import ProcessSpec

PROGRESS_INTERVAL_S = 5.0
_POLL_S = 0.25
_PROBE_TIMEOUT_S = 5.0
_SILENT_LIMIT_S = 60.0
_LOG_TAIL_BYTES = 60_000
_ERROR_WORDS = ("Error", "error:", "refused", "Killed", "No such file")


@dataclass(frozen=True, slots=True)
class Supervision:
    """How a process is treated.

    Attributes:
        startup_timeout_s: Time that it may take to become ready, seconds.
        restart_when_unhealthy: A refused or failing ``ready_path`` after it was ready means that it is broken (an
            engine's does; a router's only says that no engine is ready).
        backoff: Waits between restarts.
        watch_interval_s: Time between two looks at a serving process's health, seconds.
    """

    startup_timeout_s: float
    restart_when_unhealthy: bool
    backoff: Backoff = field(default_factory=Backoff)
    watch_interval_s: float = 2.0


class SupervisedProcess:
    """A process of the stack, in a process group of its own."""

    def __init__(
        self, process: ProcessSpec, environment: Mapping[str, str], log_file: Path, rules: Supervision,
        run: RunLog, report: Report,
    ) -> None:  # fmt: skip
        self.process = process
        self.url = f"http://{LOOPBACK}:{process.port}"
        self.ready = asyncio.Event()
        self.restarts = 0
        self._environment = {**environment, **process.env}
        self._log_file = log_file
        self._rules = rules
        self._run = run
        self._report = report
        self._child: asyncio.subprocess.Process | None = None

    @property
    def group(self) -> int | None:
        """The process group that runs now; None between two."""
        return self._child.pid if self._child is not None else None

    async def run_forever(self) -> None:
        """Keep the process running until cancelled; a cancelled call leaves ending it to :meth:`end`.

        Raises:
            StackError: It ended, or was not ready in time, before it ever served; with its last words.
        """
        failures = 0
        while True:
            await self._start()
            served_since_s = time.monotonic()
            cause = await self._watch()
            self.ready.clear()
            await self._end_group()
            failures = self._rules.backoff.failures_in_a_row(failures, time.monotonic() - served_since_s)
            wait_s = self._rules.backoff.wait_s(failures)
            self._report(f"{self.process.name} {cause}; starting it again in {wait_s:.0f} s")
            await asyncio.sleep(wait_s)
            self.restarts += 1

    async def end(self, grace_s: float) -> None:
        """Ask the process to end, wait ``grace_s``, then end its whole group."""
        child = self._child
        if child is None:
            return
        if child.returncode is None:
            with suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
            with suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), grace_s)
        await self._end_group()

    async def _start(self) -> None:
        """Start the process and wait until it is ready; restart quietly failing starts only after a first success."""
        started_s = time.monotonic()
        with self._log_file.open("ab") as log:
            self._child = await asyncio.create_subprocess_exec(
                *self.process.argv,
                env=self._environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._run.add_group(self._child.pid)
        self._report(f"{self.process.name} starting at {self.url} (pid {self._child.pid}, log {self._log_file})")
        next_line_s = PROGRESS_INTERVAL_S
        while await self._probe() != 200:
            elapsed_s = time.monotonic() - started_s
            if self._child.returncode is not None or elapsed_s > self._rules.startup_timeout_s:
                if self.restarts == 0 or self._child.returncode is None:
                    raise StackError(self._failed_start(self._child.returncode, elapsed_s))
                return  # _watch reports the end, and back-off follows
            if elapsed_s > next_line_s:
                self._report(f"{self.process.name} is starting: {elapsed_s:.0f} s")
                next_line_s += PROGRESS_INTERVAL_S
            await asyncio.sleep(_POLL_S)
        self.ready.set()
        again = " again" if self.restarts else ""
        self._report(f"{self.process.name} is ready{again} after {time.monotonic() - started_s:.0f} s")

    async def _watch(self) -> str:
        """Return why the running process is to be started again, once it is."""
        child = self._child
        assert child is not None  # noqa: S101 - called after _start
        last_answer_s = time.monotonic()
        while True:
            with suppress(TimeoutError):
                code = await asyncio.wait_for(child.wait(), self._rules.watch_interval_s)
                return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            if not self._rules.restart_when_unhealthy:
                continue
            status = await self._probe()
            if status == 200:
                last_answer_s = time.monotonic()
            elif status is not None:
                return f"answers {status} to {self.process.ready_path}"
            elif time.monotonic() - last_answer_s > _SILENT_LIMIT_S:
                return f"has not answered for {_SILENT_LIMIT_S:.0f} s"

    async def _end_group(self) -> None:
        """End every process of the group, whatever its leader's fate: vLLM's workers may outlive it by seconds."""
        group = self.group
        if group is None:
            return
        signal_groups([group], signal.SIGKILL)
        await asyncio.to_thread(wait_until_gone, [group], 3.0)
        if self._child is not None:
            await self._child.wait()
        self._child = None
        self._run.drop_group(group)
        await asyncio.to_thread(remove_shared_memory, set(self._run.record.shared_memory))

    async def _probe(self) -> int | None:
        """Return the HTTP status of the process's ready path; None without an answer."""
        try:
            async with asyncio.timeout(_PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(LOOPBACK, self.process.port)
                try:
                    request = f"GET {self.process.ready_path} HTTP/1.1\r\nHost: {LOOPBACK}\r\nConnection: close\r\n\r\n"
                    writer.write(request.encode())
                    status_line = await reader.readline()
                finally:
                    writer.close()
            return int(status_line.split()[1])
        except (OSError, TimeoutError, IndexError, ValueError):
            return None

    def _failed_start(self, code: int | None, elapsed_s: float) -> str:
        if code is None:
            what = (
                f"{self.process.name} was not ready after {elapsed_s:.0f} s; raise "
                "spec.engine.startupTimeoutSeconds if it only needs longer"
            )
        else:
            what = f"{self.process.name} ended with exit code {code} after {elapsed_s:.0f} s, before it was ready"
        return f"{what}. The last errors in {self._log_file}:\n{_last_errors(self._log_file)}"


def _last_errors(log_file: Path) -> str:
    """Return the lines of a log that say what went wrong, stack traces left out."""
    try:
        with log_file.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _LOG_TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return "  (no log)"
    telling = [line for line in lines if any(word in line for word in _ERROR_WORDS)] or lines
    unique = list(dict.fromkeys(line.strip()[:300] for line in telling if line.strip()))
    return "\n".join(f"  {line}" for line in unique[-4:]) or "  (it is empty)"
