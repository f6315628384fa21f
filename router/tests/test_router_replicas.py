"""Several routers that share nothing place as one would: a model of engines, with the routers' real dispatchers."""

import asyncio
import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.settings import PlacementPolicyName, Settings
from coda_engine.contract.snapshot import Capability, EngineSnapshot, SessionDelta, SessionResidency, session_key
from coda_router.dispatch import Dispatcher, RoutedRequest
from coda_router.fleet.address import WorkerAddress
from coda_router.fleet.worker import Worker
from coda_router.holding import HoldingLimits
from coda_router.identity import Session, SessionSource
from coda_router.live_settings import LiveSettings
from coda_router.sessions import SessionMap

pytestmark = pytest.mark.stress

ENGINES = 4
SESSIONS = 60
DURATION_S = 400.0  # about 90 turns a session, the mean of recorded coding agents
STEP_S = 0.25
STEPS_PER_TABLE = 4  # engines publish their session tables, and routers ask for them, once a second

KNOWS_IDENTITY = {Feature.IDENTITY: Capability(enabled=True, reason=Reason.ENABLED)}


@dataclass
class Engine:
    """Serves every request in its own time, and tells of it as engines do."""

    name: str
    running: Counter[str] = field(default_factory=Counter)
    table: dict[str, tuple[int, int]] = field(default_factory=dict)
    version: int = 0
    table_version: int = 1

    def snapshot(self, now_s: float) -> EngineSnapshot:
        self.version += 1
        return EngineSnapshot(
            instance_id=f"instance of {self.name}",
            version=self.version,
            published_at_s=now_s,
            started_at_s=0.0,
            served_models=["small"],
            capabilities=KNOWS_IDENTITY,
            running_by_tier={0: self.running.total()},
            requests_by_router=dict(self.running),
        )

    def used(self, key: str, tokens: int) -> None:
        """Note that a request of the session ended; told with the next version of the table."""
        self.table[key] = tokens, self.table_version + 1

    def delta(self, since: int) -> SessionDelta:
        rows = [
            SessionResidency(key=key, hbm_tokens=tokens, last_use_s=0.0)
            for key, (tokens, version) in self.table.items()
            if since < version <= self.table_version
        ]
        return SessionDelta(
            instance_id=f"instance of {self.name}", since=since, version=self.table_version, sessions=rows
        )


@dataclass
class Outcome:
    """What came of a run: how many requests stayed where their session was, and each engine's mean load."""

    continued: int = 0
    stayed: int = 0
    request_seconds: Counter[str] = field(default_factory=Counter)

    @property
    def affinity(self) -> float:
        return self.stayed / self.continued

    @property
    def busiest_to_mean(self) -> float:
        return max(self.request_seconds.values()) * ENGINES / self.request_seconds.total()


@dataclass(order=True)
class Turn:
    """A request of a session that is due."""

    at_s: float
    session: str
    context_tokens: int = field(compare=False)
    last_engine: str | None = field(default=None, compare=False)


@dataclass(order=True)
class Answer:
    """A request that an engine will have answered."""

    at_s: float
    order: int
    turn: Turn = field(compare=False)
    router: int = field(compare=False)
    worker: Worker = field(compare=False)


class Run:
    """One run of sessions, each request through a router drawn at random."""

    def __init__(self, routers: int, policy: PlacementPolicyName, seed: int) -> None:
        self.random = random.Random(seed)
        self.engines = {name: Engine(name) for name in (f"10.0.0.{n}:8000" for n in range(ENGINES))}
        self.routers = [dispatcher(f"router-{n}", policy, self.engines) for n in range(routers)]
        self.outcome = Outcome()
        self.due = [
            Turn(self.random.uniform(0, 10), f"s{n}", self.random.randint(2_000, 30_000)) for n in range(SESSIONS)
        ]
        heapq.heapify(self.due)
        self.answers: list[Answer] = []
        self.order = itertools.count()

    async def simulate(self) -> Outcome:
        for step in range(round(DURATION_S / STEP_S)):
            self.tell_snapshots(step * STEP_S)
            self.tell_tables(step)
            await self.advance((step + 1) * STEP_S)
        return self.outcome

    def tell_snapshots(self, now_s: float) -> None:
        for engine in self.engines.values():
            snapshot = engine.snapshot(now_s)
            for router in self.routers:
                worker = router.fleet.workers[engine.name]
                # By the routers' own clock: to them, snapshots come as fast as this model makes them.
                worker.take_snapshot(snapshot, now_s=loop_time())

    def tell_tables(self, step: int) -> None:
        """Publish and ask, each engine and each router at its own moment of the second."""
        for number, engine in enumerate(self.engines.values()):
            if (step + number) % STEPS_PER_TABLE == 0:
                engine.table_version += 1
            for asker, router in enumerate(self.routers):
                if (step + 3 * number + asker) % STEPS_PER_TABLE == 0:
                    worker = router.fleet.workers[engine.name]
                    worker.take_residency(engine.delta(worker.residency_position[1]))

    async def advance(self, now_s: float) -> None:
        while True:
            turn_s = self.due[0].at_s if self.due else float("inf")
            answer_s = self.answers[0].at_s if self.answers else float("inf")
            if min(turn_s, answer_s) > now_s:
                return
            if answer_s <= turn_s:
                self.finish(heapq.heappop(self.answers))
            else:
                await self.start(heapq.heappop(self.due))

    async def start(self, turn: Turn) -> None:
        number = self.random.randrange(len(self.routers))
        router = self.routers[number]
        worker = await router.assign(routed(turn))
        self.engines[worker.name].running[f"router-{number}"] += 1
        if turn.last_engine is not None:
            self.outcome.continued += 1
            self.outcome.stayed += turn.last_engine == worker.name
        busy_s = self.random.uniform(0.5, 6.0)
        self.outcome.request_seconds[worker.name] += busy_s
        heapq.heappush(self.answers, Answer(turn.at_s + busy_s, next(self.order), turn, number, worker))

    def finish(self, answer: Answer) -> None:
        turn, engine = answer.turn, self.engines[answer.worker.name]
        engine.running[f"router-{answer.router}"] -= 1
        engine.used(session_key("", turn.session), turn.context_tokens)
        self.routers[answer.router].release(answer.worker)
        # Tools take 0.2 s in the median, a few take long.
        gap_s = min(self.random.lognormvariate(-1.6, 2.0), 30.0)
        grown_tokens = turn.context_tokens + self.random.randint(100, 3_000)
        heapq.heappush(self.due, Turn(answer.at_s + gap_s, turn.session, grown_tokens, engine.name))


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def dispatcher(router_id: str, policy: PlacementPolicyName, engines: dict[str, Engine]) -> Dispatcher:
    settings = LiveSettings(Settings.model_validate({"placement": {"policy": policy}}))
    made = Dispatcher(router_id, None, settings, SessionMap(10_000, 3600.0), HoldingLimits())
    made.fleet.reconcile([WorkerAddress.parse(f"http://{name}") for name in engines])
    return made


def routed(turn: Turn) -> RoutedRequest:
    return RoutedRequest(
        model="small",
        tenant="",
        session=Session(turn.session, "", SessionSource.CODA_HEADER),
        table_key=session_key("", turn.session),
        body_bytes=turn.context_tokens * 4,
        ready_at_s=loop_time(),
        makes_kv=True,
    )


@pytest.mark.parametrize("policy", [PlacementPolicyName.CODA, PlacementPolicyName.PREFIX_HASH])
async def test_three_routers_keep_sessions_at_home_and_load_even_as_one_does(policy: PlacementPolicyName):
    one = await Run(1, policy, seed=7).simulate()
    three = await Run(3, policy, seed=7).simulate()
    assert three.continued > 70 * SESSIONS
    assert three.affinity >= 0.98 * one.affinity
    assert three.busiest_to_mean <= 1.1 * one.busiest_to_mean


async def test_a_router_does_not_count_its_own_requests_twice_nor_miss_those_of_others():
    run = Run(3, PlacementPolicyName.LEAST_LOADED, seed=1)
    for _ in range(40):
        run.tell_snapshots(0.0)
        await run.advance(run.due[0].at_s)
    run.tell_snapshots(0.0)
    for router in run.routers:
        for view in router.fleet.views(loop_time()):
            assert view.load_requests == run.engines[view.name].running.total()
