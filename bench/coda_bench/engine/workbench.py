"""What every case of one benchmark shares: the model, the cores, what is finished, and what was measured first."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coda_bench.engine import calibration
from coda_bench.engine.cases import (
    ASSUMED_CAPACITY_PER_S,
    KV_BLOCKS,
    MAX_CONTEXT_TOKENS,
    MAX_RUNNING,
    QUICK_SHADOW_TIMES_HBM,
    SHADOW_TIMES_HBM,
)
from coda_bench.engine.features import accept_profile, require_features
from coda_bench.engine.finished import Finished
from coda_bench.engine.progress import Progress
from coda_bench.engine.replay import Target
from coda_bench.engine.server import (
    EngineSetup,
    EngineUnderTest,
    bench_spec,
    kv_block_bytes,
)
from coda_bench.engine.server import running_engine as start_engine
from coda_bench.engine.systems import System, system
from coda_engine.contract.profile import Profile
from coda_engine.profiling import THOROUGH, EngineClient, measure_profile

PROFILE_EXPECTED_S = 150.0


@dataclass(frozen=True, slots=True)
class Workbench:
    """The surroundings of all cases of one run of the benchmark.

    Attributes:
        model_path: Folder of the model.
        cores: CPUs that engines are bound to, one each.
        finished: Measurements of earlier, interrupted runs.
        progress: Told what begins.
        capacity_per_s: FIFO's capacity as given on the command line, sessions/s; None = measured.
        quick: Leave out what only true figures need: profile and capacity are assumed.
    """

    model_path: Path
    cores: tuple[int, ...]
    finished: Finished
    progress: Progress
    capacity_per_s: float | None
    quick: bool

    async def once(
        self, what: Mapping[str, Any], text: str, expected_s: float, measure: Callable[[], Awaitable[Any]]
    ) -> Any:
        """Return the result of a measurement that an earlier run finished, or measure it now and keep it.

        Args:
            what: Everything that the measurement depends on, the surroundings aside.
            text: What people read while it goes on.
            expected_s: About how long it takes, seconds.
            measure: Gives a result that JSON can hold.
        """
        kept = self.finished.get(what)
        if kept is not None:
            self.progress.skip(text, expected_s)
            return kept
        self.progress.begin(text, expected_s)
        result = await measure()
        self.finished.put(what, result)
        return result

    def setup(
        self, chosen: System, core: int, kv_blocks: int, placement: Mapping[str, Any] | None = None
    ) -> EngineSetup:
        """Return how to start an engine of a system, alone on ``core``.

        Raises:
            DocumentError: This version has no such settings.
        """
        kv_bytes = kv_blocks * kv_block_bytes(self.model_path)
        spec = bench_spec(
            self.model_path,
            kv_cache=str(kv_bytes),
            max_running=MAX_RUNNING,
            max_context_tokens=MAX_CONTEXT_TOKENS,
            shadow_bytes=self.shadow_times_hbm * kv_bytes if chosen.shadow else 0,
            admission=chosen.admission(),
            placement=placement,
        )
        return EngineSetup(chosen.name, spec, core, chosen.plugins, whole_process=True)

    @property
    def shadow_times_hbm(self) -> int:
        """Size of the CPU shadow as a multiple of the KV cache in HBM; the quick size runs on small machines."""
        return QUICK_SHADOW_TIMES_HBM if self.quick else SHADOW_TIMES_HBM

    def engine_cores(self, count: int) -> list[int]:
        """Return a core for each of ``count`` engines that run together; they share where there are too few."""
        return [self.cores[number % len(self.cores)] for number in range(count)]

    def prepare_expected_s(self) -> float:
        """Return about how long profile and capacity will take, seconds."""
        if self.quick:
            return 0.0
        return PROFILE_EXPECTED_S + (0.0 if self.capacity_per_s is not None else calibration.EXPECTED_S)

    async def profile(self) -> Profile | None:
        """Return this configuration's profile, measured once; None in the quick size, which assumes one.

        It is complete: orders by true costs are to be compared with those costs.
        """
        if self.quick:
            return None

        async def measure() -> str:
            async with start_engine(self.setup(system("coda"), self.cores[0], KV_BLOCKS)) as engine:
                client = EngineClient(engine.url)
                profile = await asyncio.to_thread(measure_profile, client, effort=THOROUGH, progress=lambda line: None)
                return profile.to_json().decode()

        what = {"measurement": "profile", "core": self.cores[0]}
        return Profile.from_json(await self.once(what, "the engine's profile", PROFILE_EXPECTED_S, measure))

    async def fifo_capacity(self) -> tuple[float, str]:
        """Return FIFO's sessions/s of one core, the mean over the cores, and how it was come by."""
        if self.capacity_per_s is not None:
            return self.capacity_per_s, "given"
        if self.quick:
            return ASSUMED_CAPACITY_PER_S, "assumed"

        async def measure() -> list[float]:
            costs = await asyncio.gather(*(self._capacity_of(core) for core in self.cores))
            return [cost.sessions_per_s for cost in costs]

        what = {"measurement": "capacity", "cores": list(self.cores)}
        text = "how much first come, first served can serve"
        capacities = await self.once(what, text, calibration.EXPECTED_S, measure)
        return sum(capacities) / len(capacities), "measured"

    async def deliver(self, profile: Profile | None, engine: EngineUnderTest, chosen: System) -> None:
        """Hand the profile to an engine that has plug-ins, and see that it then is the system that it should be.

        Raises:
            EngineStartError: A feature stays off without which it is another system, with the engine's reason.
            ProfileRefusedError: The engine says that it is not its own.
            ProfilingError: The engine does not answer.
        """
        if not chosen.plugins:
            return
        if profile is None:
            await accept_profile(engine)
        else:
            await asyncio.to_thread(EngineClient(engine.url).put_profile, profile)
        await require_features(engine, chosen.needed())

    async def _capacity_of(self, core: int) -> calibration.SessionCost:
        async with start_engine(self.setup(system("fifo"), core, KV_BLOCKS)) as engine:
            return await calibration.measure_capacity(Target(engine.url, engine.model))
