"""Case ``idle``: what the plug-ins cost when there is nothing to decide (output tokens/s against stock vLLM).

Two equal engines on one core differ by several percent from one start to the next (where their memory lies), far more
than repetitions within a start do. So many starts are compared with few pairs each, and the interval is over starts.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import geometric_mean, median

import aiohttp

from coda_bench.engine.completions import complete, completion_body
from coda_bench.engine.features import accept_profile
from coda_bench.engine.server import EngineSetup, EngineUnderTest, bench_spec, running_engine
from coda_bench.engine.workbench import Workbench
from coda_bench.report import Row, paired_ratio
from coda_bench.workload.content import random_prompt

_MAX_RUNNING = 16
_START_S = 50.0


@dataclass(frozen=True, slots=True)
class IdleLoad:
    """The load of one measurement: no more requests than run at once, so no order is ever decided.

    Attributes:
        requests: Requests at the same time.
        prompt_tokens: Tokens of each prompt, new in each measurement.
        output_tokens: Tokens that each request generates.
    """

    requests: int = 4
    prompt_tokens: int = 64
    output_tokens: int = 32


@dataclass(frozen=True, slots=True)
class IdleSize:
    """How much is measured.

    Attributes:
        load: Of one measurement.
        starts: How often both engines are started; which comes first alternates.
        pairs: Measurements of each system in each start.
    """

    load: IdleLoad
    starts: int
    pairs: int

    def expected_s(self) -> float:
        """Return about how long the case takes, seconds."""
        return self.starts * self.start_expected_s()

    def start_expected_s(self) -> float:
        """Return about how long one start with its measurements takes, seconds."""
        return _START_S + 2 * (self.pairs + 1) * self.load.requests * self.load.output_tokens / 50


FULL = IdleSize(IdleLoad(), starts=14, pairs=6)
QUICK = IdleSize(IdleLoad(), starts=1, pairs=3)


async def run_idle_case(bench: Workbench, size: IdleSize) -> list[Row]:
    """Return the rows of the case.

    Raises:
        EngineStartError: An engine did not start.
    """
    starts = [await _start(bench, size, number) for number in range(size.starts)]
    stock_tps, coda_tps = (
        [geometric_mean([pair[system] for pair in pairs]) for pairs in starts] for system in ("stock", "coda")
    )
    ratio = paired_ratio(coda_tps, stock_tps)
    return [
        Row("engine", "idle", "output_tps", "stock", median(stock_tps), "tokens/s", reps=size.starts),
        Row("engine", "idle", "output_tps", "coda", median(coda_tps), "tokens/s", "stock", ratio.ratio, ratio.low,
            ratio.high, size.starts),
    ]  # fmt: skip


async def _start(bench: Workbench, size: IdleSize, number: int) -> list[dict[str, float]]:
    order = ("stock", "coda") if number % 2 == 0 else ("coda", "stock")

    async def measure() -> list[dict[str, float]]:
        spec = bench_spec(bench.model_path, kv_cache="400M", max_running=_MAX_RUNNING)
        one, other = (EngineSetup(name, spec, bench.cores[0], plugins=name == "coda") for name in order)
        async with running_engine(one) as first, running_engine(other) as second:
            await accept_profile(first if first.system == "coda" else second)
            return await alternate((first, second), size.load, size.pairs)

    what = {"measurement": "idle", "start": number, "core": bench.cores[0], "pairs": size.pairs, **asdict(size.load)}
    text = f"idle: start {number + 1} of {size.starts}, {' and '.join(order)} in turn on one core"
    pairs: list[dict[str, float]] = await bench.once(what, text, size.start_expected_s(), measure)
    return pairs


async def output_tokens_per_s(engine: EngineUnderTest, load: IdleLoad, seed: int) -> float:
    """Return generated tokens per second of one measurement; every request must succeed."""
    rng = random.Random(seed)
    bodies = [
        completion_body(engine.model, random_prompt(rng, load.prompt_tokens), load.output_tokens)
        for _ in range(load.requests)
    ]
    async with aiohttp.ClientSession(engine.url) as client:
        started_s = time.perf_counter()
        generated = await asyncio.gather(*(complete(client, body) for body in bodies))
        return sum(generated) / (time.perf_counter() - started_s)


async def alternate(engines: Sequence[EngineUnderTest], load: IdleLoad, repetitions: int) -> list[dict[str, float]]:
    """Return tokens/s by system for each repetition; systems alternate, their order turns each time."""
    for engine in engines:
        await output_tokens_per_s(engine, load, seed=-1)  # warm-up, not counted
    results = []
    for repetition in range(repetitions):
        order = engines if repetition % 2 == 0 else list(reversed(engines))
        results.append({engine.system: await output_tokens_per_s(engine, load, repetition) for engine in order})
    return results
