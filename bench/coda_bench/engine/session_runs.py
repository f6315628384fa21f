"""One run of sessions against started engines: warm-up, window, and a finite trace to its end."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Self

from coda_bench.engine.cases import SessionsCase
from coda_bench.engine.records import RequestRecord
from coda_bench.engine.replay import Target, Trace, play_to_the_end, play_until
from coda_bench.engine.server import EngineUnderTest
from coda_bench.engine.window import DrainedFigures, drained_figures
from coda_bench.workload.sessions import Session, mean_rounds, poisson_arrivals_s, scaled_sessions
from coda_engine.contract.snapshot import EngineSnapshot
from coda_engine.profiling import EngineClient, ProfilingError

_DRAINED_SEED = 1_000
_SESSIONS_IN_STORE = 2_000
_SETTLE_S = 2.0
_READ_BEFORE_END_S = 0.5


@dataclass(frozen=True, slots=True)
class Counters:
    """What an engine's decisions did between two moments; all 0 for stock vLLM.

    Attributes:
        admissions: State-admission selections.
        reordered: Of them those that put another request before the native head.
        refused: Requests predicted feasible that the allocator refused.
        shadow_bytes_used: Bytes in the CPU shadow at the end.
    """

    admissions: int = 0
    reordered: int = 0
    refused: int = 0
    shadow_bytes_used: int = 0

    def __add__(self, other: "Counters") -> "Counters":
        return Counters(
            self.admissions + other.admissions,
            self.reordered + other.reordered,
            self.refused + other.refused,
            self.shadow_bytes_used + other.shadow_bytes_used,
        )


@dataclass(frozen=True, slots=True)
class SessionRun:
    """What one run gave.

    Attributes:
        records: Requests of warm-up and window.
        counters: The engine's own counts over the window.
        drained: Figures of the finite trace; None when it was not run.
    """

    records: tuple[RequestRecord, ...]
    counters: Counters
    drained: DrainedFigures | None

    def to_document(self) -> dict[str, Any]:
        """Return the run as plain data."""
        return {
            "records": [record.to_document() for record in self.records],
            "counters": asdict(self.counters),
            "drained": asdict(self.drained) if self.drained is not None else None,
        }

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Return the run in plain data."""
        drained = document["drained"]
        return cls(
            tuple(RequestRecord.from_document(record) for record in document["records"]),
            Counters(**document["counters"]),
            DrainedFigures(**drained) if drained is not None else None,
        )


def trace_of(seed: int, sessions_per_s: float, duration_s: float) -> Trace:
    """Return sessions for ``duration_s`` seconds; the same seed gives the same ones at every rate."""
    sessions = _store(seed)
    arrivals = poisson_arrivals_s(len(sessions), sessions_per_s, seed)
    coming = sum(at_s < duration_s for at_s in arrivals)
    return Trace(sessions[:coming], arrivals[:coming], seed)


def finite_trace(arrivals_s: float, seed: int, sessions_per_s: float) -> Trace:
    """Return the sessions of about ``arrivals_s`` seconds, at least one; others than :func:`trace_of` has."""
    own = seed + _DRAINED_SEED
    count = max(1, round(arrivals_s * sessions_per_s))
    return Trace(_store(own)[:count], poisson_arrivals_s(count, sessions_per_s, own), own)


def uncompressed_sessions_per_s(requests_per_s: float) -> float:
    """Return the sessions a second that make ``requests_per_s`` model requests a second on average."""
    return requests_per_s / mean_rounds(_store(1))


@lru_cache(maxsize=16)
def _store(seed: int) -> list[Session]:
    return scaled_sessions(_SESSIONS_IN_STORE, seed)


async def measure_run(
    target: Target,
    engines: Sequence[EngineUnderTest],
    case: SessionsCase,
    seed: int,
    sessions_per_s: float,
    ready: Callable[[], Awaitable[object]],
) -> SessionRun:
    """Measure started engines once every other one that is measured beside them is ready too.

    Args:
        target: Where the requests go: the engine, or the router in front of several.
        engines: With their profile, if any; their counters are added up.
        case: Lengths and limits.
        seed: Arrival pattern.
        sessions_per_s: Arrival rate.
        ready: Waits for the neighbours.

    Raises:
        ReplayError: A request failed.
    """
    end_s = case.warm_s + case.window_s
    trace = trace_of(seed, sessions_per_s, end_s)
    await ready()
    reading = asyncio.create_task(_counters(engines, case.warm_s, end_s))
    try:
        records = await play_until(target, trace, end_s)
        counters = await reading
    finally:
        reading.cancel()
    drained = None
    if case.drains(seed):
        await asyncio.sleep(_SETTLE_S)
        finite = finite_trace(case.drained_arrivals_s, seed, sessions_per_s)
        finished, took_s = await play_to_the_end(target, finite, case.drain_limit_s)
        drained = drained_figures(finished, finite.requests, took_s)
    return SessionRun(tuple(records), counters, drained)


async def _counters(engines: Sequence[EngineUnderTest], start_s: float, end_s: float) -> Counters:
    """Return the difference of the engines' own counters over the window; zeros where they have none."""
    await asyncio.sleep(start_s)
    before = [await _snapshot(engine) for engine in engines]
    await asyncio.sleep(max(0.0, end_s - start_s - _READ_BEFORE_END_S))
    total = Counters()
    for engine, earlier in zip(engines, before, strict=True):
        later = await _snapshot(engine)
        if earlier is not None and later is not None:
            total += Counters(
                sum(later.steps.admissions.values()) - sum(earlier.steps.admissions.values()),
                later.steps.reordered - earlier.steps.reordered,
                later.steps.refused_after_feasible - earlier.steps.refused_after_feasible,
                later.shadow_bytes_used,
            )
    return total


async def _snapshot(engine: EngineUnderTest) -> EngineSnapshot | None:
    with suppress(ProfilingError, ValueError):
        return await asyncio.to_thread(EngineClient(engine.url).snapshot)
    return None
