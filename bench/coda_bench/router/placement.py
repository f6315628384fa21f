"""What placing one request costs, for each policy, in a large fleet with many sessions.

``python -m coda_bench.router.placement ENGINES SESSIONS DECISIONS`` measures it on a router's real dispatcher, with
engines that exist only by their snapshots and session tables, and writes a list of :class:`PlacementCost` as JSON to
standard output.
"""

import asyncio
import gc
import json
import random
import subprocess
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass
from statistics import quantiles

from coda_bench.report import Row
from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.settings import PlacementPolicyName, Settings
from coda_engine.contract.snapshot import Capability, EngineSnapshot, SessionDelta, SessionResidency, session_key
from coda_router.dispatch import Dispatcher, RoutedRequest
from coda_router.fleet.address import WorkerAddress
from coda_router.fleet.worker import Worker
from coda_router.holding import HoldingLimits
from coda_router.identity import Session, SessionSource
from coda_router.live_settings import LiveSettings
from coda_router.sessions import Home, SessionMap

CASE = "placement"
ENGINES = 64
SESSIONS = 100_000
DECISIONS = 10_000
NEW_SESSION_SHARE = 0.05
"""Share of first requests, which cost most; recorded coding agents have 1%."""

IN_FLIGHT_PER_ENGINE = 12
DECODERS_PER_ENGINE = 16
SNAPSHOTS_PER_ENGINE = 8
_ROUTER_ID = "bench"
_MODEL = "mock-model"


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """CPU time of one policy's placements, microseconds.

    Attributes:
        policy: The policy's name.
        decision_p50_us: Median time to gather what is known and decide.
        decision_p99_us: 99th percentile of it.
        assign_p50_us: Median time of the whole: decide once, count, remember, report.
        assign_p99_us: 99th percentile of it.
    """

    policy: str
    decision_p50_us: float
    decision_p99_us: float
    assign_p50_us: float
    assign_p99_us: float


def placement_rows(
    machine: str, engines: int = ENGINES, sessions: int = SESSIONS, decisions: int = DECISIONS
) -> list[Row]:
    """Return the figures of every policy.

    Raises:
        RuntimeError: The measuring process failed.
    """
    command = [sys.executable, "-m", "coda_bench.router.placement", str(engines), str(sessions), str(decisions)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"measuring placement failed: {done.stderr[-500:]}")
    costs = [PlacementCost(**cost) for cost in json.loads(done.stdout)]
    return [
        Row("router", f"{CASE}/{engines}x{sessions}", name.removesuffix("_us"), policy, value, "us", machine=machine)
        for policy, figures in ((cost.policy, asdict(cost)) for cost in costs)
        for name, value in figures.items()
        if name != "policy"
    ]


async def measure_here(engines: int, sessions: int, decisions: int) -> list[PlacementCost]:
    """Return what every policy costs in this process."""
    bench = _Bench(engines, sessions)
    # As a router does once it is put together.
    gc.collect()
    gc.freeze()
    return [await bench.cost_of(policy, decisions) for policy in PlacementPolicyName]


class _Bench:
    """A dispatcher with engines that answer nothing, each known by a few snapshots and its session table."""

    def __init__(self, engines: int, sessions: int) -> None:
        self._random = random.Random(1)
        self._sessions = sessions
        self._new_sessions = 0
        self._settings = LiveSettings(Settings())
        memory = SessionMap(10 * sessions, ttl_s=3600.0)
        self._dispatcher = Dispatcher(_ROUTER_ID, None, self._settings, memory, HoldingLimits())
        fleet = self._dispatcher.fleet
        fleet.reconcile([WorkerAddress.parse(f"http://10.0.{n // 250}.{n % 250 + 1}:8000") for n in range(engines)])
        self._workers = list(fleet.workers.values())
        self._snapshots = [
            [self._snapshot(n, version) for version in range(1, SNAPSHOTS_PER_ENGINE + 1)] for n in range(engines)
        ]
        for number in range(engines):
            self._take_snapshot(number)
            self._take_sessions(number)
        self._in_flight: deque[Worker] = deque()

    async def cost_of(self, policy: PlacementPolicyName, decisions: int) -> PlacementCost:
        """Return what a policy costs, once as many requests are in flight as there will be."""
        self._settings.replace(Settings.model_validate({"placement": {"policy": policy}}))
        warm_up = IN_FLIGHT_PER_ENGINE * len(self._workers)
        timed = [await self._place_one() for _ in range(warm_up + decisions)][warm_up:]
        decision_us, assign_us = (quantiles([ns / 1000 for ns in column], n=100) for column in zip(*timed, strict=True))
        figures = (decision_us[49], decision_us[98], assign_us[49], assign_us[98])
        return PlacementCost(policy, *(round(figure, 2) for figure in figures))

    async def _place_one(self) -> tuple[int, int]:
        """Place a request; return the CPU nanoseconds of the decision alone and of the whole."""
        # At 1,000 requests a second, so many engines publish between two of them.
        self._take_snapshot(self._random.randrange(len(self._workers)))
        if len(self._in_flight) >= IN_FLIGHT_PER_ENGINE * len(self._workers):
            self._dispatcher.release(self._in_flight.popleft())
        request, now_s = self._request(), asyncio.get_running_loop().time()
        started_ns = time.thread_time_ns()
        self._dispatcher.decide(request, frozenset(), now_s)
        decided_ns = time.thread_time_ns()
        self._in_flight.append(await self._dispatcher.assign(request))
        return decided_ns - started_ns, time.thread_time_ns() - decided_ns

    def _request(self) -> RoutedRequest:
        number = self._random.randrange(self._sessions)
        if self._random.random() < NEW_SESSION_SHARE:
            self._new_sessions += 1
            number = self._sessions + self._new_sessions
        return RoutedRequest(
            model=_MODEL,
            tenant="tenant",
            session=Session(f"session {number}", "", SessionSource.CODA_HEADER),
            table_key=_key(number),
            body_bytes=4 * self._random.randrange(2_000, 120_000),
            ready_at_s=0.0,
            makes_kv=True,
        )

    def _snapshot(self, number: int, version: int) -> EngineSnapshot:
        contexts = [round(2 ** self._random.gauss(15, 1.2)) for _ in range(DECODERS_PER_ENGINE)]
        others = self._random.randrange(6)
        return EngineSnapshot(
            instance_id=f"instance {number}",
            version=version,
            published_at_s=0.05 * version,
            started_at_s=0.0,
            served_models=[_MODEL],
            capabilities={Feature.IDENTITY: Capability(enabled=True, reason=Reason.ENABLED)},
            waiting_by_tier={0: self._random.randrange(4)},
            running_by_tier={0: IN_FLIGHT_PER_ENGINE + others},
            requests_by_router={_ROUTER_ID: IN_FLIGHT_PER_ENGINE},
            decode_context_tokens=contexts,
            pending_prefill_tokens=self._random.randrange(20_000),
        )

    def _take_snapshot(self, number: int) -> None:
        snapshot = self._random.choice(self._snapshots[number])
        self._workers[number].take_snapshot(snapshot, asyncio.get_running_loop().time())

    def _take_sessions(self, number: int) -> None:
        """Have every so many sessions resident at the engine, and their last placements remembered."""
        worker, keys = self._workers[number], [_key(n) for n in range(number, self._sessions, len(self._workers))]
        rows = [SessionResidency(key=key, hbm_tokens=30_000, last_use_s=0.0) for key in keys]
        instance_id = worker.incarnation
        worker.take_residency(SessionDelta(instance_id=instance_id, since=0, version=1, sessions=rows))
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            self._dispatcher.sessions.put(key, Home(worker.name, instance_id, now_s, 30_000))


def _key(number: int) -> str:
    return session_key("tenant", f"session {number}")


def main() -> None:
    """Measure in this process."""
    engines, sessions, decisions = map(int, sys.argv[1:])
    print(json.dumps([asdict(cost) for cost in asyncio.run(measure_here(engines, sessions, decisions))]))


if __name__ == "__main__":
    main()
