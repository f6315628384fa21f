"""Processes of a benchmark: started, watched for their CPU time and memory, ended."""

import contextlib
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
START_TIMEOUT_S = 60.0
"""Longest time until a process must listen."""


@dataclass(frozen=True, slots=True)
class Running:
    """A process of the benchmark's.

    Attributes:
        process: The process.
        port: Where it listens.
    """

    process: subprocess.Popen[bytes]
    port: int

    def cpu_s(self) -> float:
        """Return the CPU time of the process and all that it started, seconds."""
        return sum(_cpu_s(pid) for pid in _tree(self.process.pid))

    def rss_mb(self) -> float:
        """Return the resident memory of the process and all that it started, megabytes."""
        return sum(_rss_mb(pid) for pid in _tree(self.process.pid))


@contextlib.contextmanager
def running(command: Sequence[str], port: int) -> Iterator[Running]:
    """Start a process, wait until it listens on ``port``, end it afterwards.

    Raises:
        RuntimeError: It ended or did not listen in time; the message has the last of its output.
    """
    # A file and not a pipe: nobody reads a pipe during the run, and a process that fills it stands still.
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            _wait_for_port(process, port, output)
            yield Running(process, port)
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_for_port(process: subprocess.Popen[bytes], port: int, output: IO[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline_s and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    output.seek(0)
    last_words = output.read()[-500:].decode(errors="replace")
    raise RuntimeError(f"{process.args!r} does not listen on port {port}: {last_words}")


def _tree(pid: int) -> list[int]:
    pids = [pid]
    for parent in pids:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                pids += [int(child) for child in (task / "children").read_text().split()]
    return pids


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def _rss_mb(pid: int) -> float:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    for line in status.splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024 / 1e6
    return 0.0
