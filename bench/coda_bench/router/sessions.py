"""The router's memory of sessions: what one costs, and that it stands still once it is full.

``python -m coda_bench.router.sessions N`` fills a router's memory of N sessions three times over in a process of its
own, in which everything of a router is loaded, and writes a :class:`SessionMemory` as JSON to standard output.
"""

import gc
import json
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import coda_router.server  # noqa: F401 - what a router has loaded is part of what it takes
from coda_bench.report import Row
from coda_engine.contract.snapshot import session_key
from coda_router.sessions import Home, SessionMap

CASE = "sessions"
SESSIONS = 1_000_000
WORKERS = 16
_ROUNDS = 3
_LOOK_UPS = 100_000
_TOUCHED = 1_000


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """What a memory of sessions costs.

    Attributes:
        session_bytes: Resident memory of a session, bytes, until the memory is full.
        further_session_bytes: What each further session adds then, bytes; 0 = resident memory stands still.
        rss_mb: Resident memory of the whole process when it is full, megabytes.
        place_us: CPU time to remember a placement, microseconds, with the making of its key.
        look_up_us: CPU time to look a session up, microseconds, with the making of its key.
    """

    session_bytes: float
    further_session_bytes: float
    rss_mb: float
    place_us: float
    look_up_us: float


def session_rows(machine: str, sessions: int = SESSIONS) -> list[Row]:
    """Return the figures of a memory of that many sessions.

    Raises:
        RuntimeError: The measuring process failed.
    """
    command = [sys.executable, "-m", "coda_bench.router.sessions", str(sessions)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring {sessions} sessions failed: {done.stderr[-500:]}")
    memory = SessionMemory(**json.loads(done.stdout))
    figures = (
        ("session_bytes", memory.session_bytes, "B"),
        ("further_session_bytes", memory.further_session_bytes, "B"),
        ("rss_mb", memory.rss_mb, "MB"),
        ("place_us", memory.place_us, "us"),
        ("look_up_us", memory.look_up_us, "us"),
    )
    return [
        Row("router", f"{CASE}/{sessions}", metric, "coda", round(value, 3), unit, machine=machine)
        for metric, value, unit in figures
    ]


def measure_here(sessions: int) -> SessionMemory:
    """Return what a memory of that many sessions costs in this process."""
    memory = SessionMap(sessions, ttl_s=1e9)
    _place(memory, range(_TOUCHED))
    gc.collect()
    empty_bytes = _rss_bytes()
    took_s = _place(memory, range(_TOUCHED, sessions))
    full_bytes = _rss_bytes()
    took_s += _place(memory, range(sessions, _ROUNDS * sessions))
    end_bytes = _rss_bytes()
    started_s = time.process_time()
    for number in range(_LOOK_UPS):
        memory.get(_key(_ROUNDS * sessions - 1 - number % sessions), 0.0)
    look_up_s = time.process_time() - started_s
    return SessionMemory(
        session_bytes=(full_bytes - empty_bytes) / (sessions - _TOUCHED),
        further_session_bytes=(end_bytes - full_bytes) / ((_ROUNDS - 1) * sessions),
        rss_mb=end_bytes / 1e6,
        place_us=took_s * 1e6 / (_ROUNDS * sessions - _TOUCHED),
        look_up_us=look_up_s * 1e6 / _LOOK_UPS,
    )


def _place(memory: SessionMap, numbers: Iterable[int]) -> float:
    started_s = time.process_time()
    for number in numbers:
        home = Home(f"worker-{number % WORKERS}", "incarnation", number * 1e-3, number % 100_000, has_tools=True)
        memory.put(_key(number), home)
    return time.process_time() - started_s


def _key(number: int) -> str:
    return session_key("tenant", f"session {number}")


def _rss_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell this process's resident memory")


if __name__ == "__main__":
    print(json.dumps(asdict(measure_here(int(sys.argv[1])))))
