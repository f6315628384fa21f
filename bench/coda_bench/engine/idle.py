"""Case ``idle``: what the plug-ins cost when there is nothing to decide (output tokens/s against stock vLLM)."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean, median

import aiohttp

from coda_bench.engine.completions import complete, completion_body
from coda_bench.engine.features import accept_profile
from coda_bench.engine.server import EngineSetup, EngineUnderTest, bench_spec, running_engine
from coda_bench.engine.workbench import Workbench
from coda_bench.report import Row, paired_ratio
from coda_bench.workload.content import random_prompt

_MAX_RUNNING = 8
_START_S = 35.0


@dataclass(frozen=True, slots=True)
class IdleLoad:
    """The load of one measurement: fewer requests than run at once, so no order is ever decided.

    Attributes:
        requests: Requests at the same time.
        prompt_tokens: Tokens of each prompt, new in each measurement.
        output_tokens: Tokens that each request generates.
    """

    requests: int = 4
    prompt_tokens: int = 64
    output_tokens: int = 96


@dataclass(frozen=True, slots=True)
class IdleSize:
    """How much is measured: ``repetitions`` pairs of ``load`` in each of the two blocks."""

    load: IdleLoad
    repetitions: int

    def block_expected_s(self) -> float:
        """Return about how long a block takes, seconds."""
        return 2 * _START_S + 2 * (self.repetitions + 1) * self.load.requests * self.load.output_tokens / 60


FULL = IdleSize(IdleLoad(output_tokens=32), repetitions=60)
"""Short turns: what other tenants of the host take changes from one ten seconds to the next."""

QUICK = IdleSize(IdleLoad(output_tokens=48), repetitions=3)


async def run_idle_case(bench: Workbench, size: IdleSize) -> list[Row]:
    """Return the rows of the case, measured in two blocks in which the other system starts first.

    Two equal engines on one core differ by a tenth and more with the order of their start (memory placement); the
    geometric mean of both orders does not.

    Raises:
        EngineStartError: An engine did not start.
    """
    blocks = [await _block(bench, size, order) for order in (("stock", "coda"), ("coda", "stock"))]
    stock_tps, coda_tps = (
        [geometric_mean([block[system] for block in pairs]) for pairs in zip(*blocks, strict=True)]
        for system in ("stock", "coda")
    )
    ratio = paired_ratio(coda_tps, stock_tps)
    repetitions = len(stock_tps)
    return [
        Row("engine", "idle", "output_tps", "stock", median(stock_tps), "tokens/s", reps=repetitions),
        Row("engine", "idle", "output_tps", "coda", median(coda_tps), "tokens/s", "stock", ratio.ratio, ratio.low,
            ratio.high, repetitions),
    ]  # fmt: skip


async def _block(bench: Workbench, size: IdleSize, order: tuple[str, str]) -> list[dict[str, float]]:
    spec = bench_spec(bench.model_path, kv_cache="400M", max_running=_MAX_RUNNING)

    async def measure() -> list[dict[str, float]]:
        one, other = (EngineSetup(name, spec, bench.cores[0], plugins=name == "coda") for name in order)
        async with running_engine(one) as first, running_engine(other) as second:
            await accept_profile(first if first.system == "coda" else second)
            return await alternate((first, second), size.load, size.repetitions)

    what = {
        "measurement": "idle",
        "order": list(order),
        "core": bench.cores[0],
        "repetitions": size.repetitions,
        "load": [size.load.requests, size.load.prompt_tokens, size.load.output_tokens],
    }
    text = f"idle: {order[0]} started first, then {order[1]}, on the same core; {size.repetitions} pairs in turn"
    block: list[dict[str, float]] = await bench.once(what, text, size.block_expected_s(), measure)
    return block


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
