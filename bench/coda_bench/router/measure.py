"""Runs the cases: systems alternate within each repetition, so that whatever else the machine does meets all."""

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from http.client import HTTPConnection
from pathlib import Path
from statistics import quantiles

from coda_bench.ports import free_ports
from coda_bench.router.cases import Case, Pace
from coda_bench.router.load import Load, LoadResult
from coda_bench.router.processes import Running, running
from coda_bench.router.systems import System

MODEL = "mock-model"
WORKERS = 4
WARM_UP_S = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """One system's figures in one case and repetition.

    Attributes:
        case: The case's name.
        system: The system's name.
        repetition: Counts from 0.
        requests: Requests answered within the time that counted.
        errors: Requests that failed.
        req_per_s: Requests answered a second.
        ttft_p50_ms: Median time to the first event.
        ttft_p99_ms: 99th percentile of it.
        cpu_s_per_1k: CPU seconds of the system for a thousand requests; 0 for direct requests.
        rss_mb: Resident memory of the system afterwards, megabytes; 0 for direct requests.
    """

    case: str
    system: str
    repetition: int
    requests: int
    errors: int
    req_per_s: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    cpu_s_per_1k: float
    rss_mb: float


def measure(
    cases: Sequence[Case],
    systems: Sequence[System],
    *,
    repetitions: int,
    duration_s: float,
    tell: Callable[[str], None],
) -> list[Sample]:
    """Return the samples of all cases, systems and repetitions.

    Raises:
        RuntimeError: A system did not start, or answered nothing.
    """
    samples: list[Sample] = []
    with contextlib.ExitStack() as stack:
        worker_ports = free_ports(WORKERS)
        for ports in (worker_ports[: WORKERS // 2], worker_ports[WORKERS // 2 :]):
            command = [sys.executable, "-m", "coda_bench.router.mock_worker", MODEL, *map(str, ports)]
            stack.enter_context(running(command, ports[-1]))
        started = {system.name: _start(stack, system, worker_ports) for system in systems}
        total, done = len(cases) * repetitions * len(systems), 0
        for case in cases:
            _set_pace(worker_ports, case.pace)
            for repetition in range(repetitions):
                # Alternate who comes first: the first one finds the coolest caches.
                for system in _rotated(systems, repetition):
                    done += 1
                    tell(f"[{done}/{total}] {case.name} {system.name}")
                    process = started[system.name]
                    ports = [process.port] if process else worker_ports
                    samples.append(_sample(case, system, repetition, ports, process, duration_s))
    return samples


def _rotated(systems: Sequence[System], by: int) -> Iterable[System]:
    shift = by % len(systems)
    return (*systems[shift:], *systems[:shift])


def _start(stack: contextlib.ExitStack, system: System, worker_ports: Sequence[int]) -> Running | None:
    if system.command is None:
        return None
    port, second_port = free_ports(2)
    urls = [f"http://127.0.0.1:{worker_port}" for worker_port in worker_ports]
    return stack.enter_context(running(system.command(port, second_port, urls), port))


def _set_pace(ports: Iterable[int], pace: Pace) -> None:
    settings = {"first_event_s": pace.first_event_ms / 1000, "gap_s": pace.gap_ms / 1000, "events": pace.events}
    for port in ports:
        connection = HTTPConnection("127.0.0.1", port, timeout=5)
        connection.request("POST", "/pace", json.dumps(settings))
        connection.getresponse().read()
        connection.close()


def _sample(
    case: Case, system: System, repetition: int, ports: Sequence[int], process: Running | None, duration_s: float
) -> Sample:
    load = Load(list(ports), MODEL, case.body_bytes, case.concurrency, WARM_UP_S, duration_s)
    result, cpu_s = _run_load(load, process)
    if not result.requests:
        raise RuntimeError(f"{case.name}: {system.name} answered nothing ({result.errors} errors)")
    cuts = quantiles(result.first_event_ms, n=100) if result.requests > 1 else result.first_event_ms * 99
    return Sample(
        case=case.name,
        system=system.name,
        repetition=repetition,
        requests=result.requests,
        errors=result.errors,
        req_per_s=result.requests / result.seconds,
        ttft_p50_ms=cuts[49],
        ttft_p99_ms=cuts[98],
        cpu_s_per_1k=cpu_s * 1000 / result.requests,
        rss_mb=process.rss_mb() if process else 0.0,
    )


def _run_load(load: Load, process: Running | None) -> tuple[LoadResult, float]:
    """Run one load in a process of its own; return its result and the system's CPU seconds meanwhile.

    Raises:
        RuntimeError: The load generator failed.
    """
    with tempfile.TemporaryDirectory(prefix="coda-bench-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, "-m", "coda_bench.router.load", str(result)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as loader:
            if loader.stdin is None or loader.stdout is None:
                raise RuntimeError("the load generator has no pipes")
            loader.stdin.write(json.dumps(asdict(load)) + "\n")
            loader.stdin.flush()
            marks = []
            for _ in ("counting", "counted"):
                loader.stdout.readline()
                marks.append(process.cpu_s() if process else 0.0)
        if loader.returncode != 0:
            raise RuntimeError(f"the load generator ended with status {loader.returncode}")
        return LoadResult(**json.loads(result.read_text())), marks[1] - marks[0]
