"""Case ``idle``: what the plug-ins cost when there is nothing to decide (output tokens/s against stock vLLM)."""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp

from coda_bench.engine.completions import complete, completion_body, random_prompt
from coda_bench.engine.server import EngineUnderTest


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
