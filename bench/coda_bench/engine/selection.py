"""Case ``selection``: what one state-admission decision over a full frontier of long prompts costs.

A closed loop keeps more than 64 requests of 3,000 tokens waiting at a real engine. The prompts share most of
their prefix, so that every look at residency is a long one; with a small KV cache their rest is evicted and
inserted all the time. The engine's own histogram of selection times is read before and after.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from coda_bench.engine.completions import complete, completion_body, random_prompt
from coda_bench.engine.server import EngineUnderTest
from coda_engine.contract.interface import DECISIONS_PATH

CLIENTS = 80
PROMPT_TOKENS = 3_000
SHARED_TOKENS = 2_880
WARM_UP_LIMIT_S = 240.0


@dataclass(frozen=True, slots=True)
class SelectionCost:
    """Selections of one window.

    Attributes:
        selections: How many were made.
        p50_ms: Median time, interpolated in the engine's histogram, milliseconds.
        p99_ms: 99th percentile, milliseconds.
        share: Time in selections over the window's wall time.
        candidates: Median number of requests that a decision looked at.
    """

    selections: int
    p50_ms: float
    p99_ms: float
    share: float
    candidates: int


async def measure(engine: EngineUnderTest, window_s: float) -> SelectionCost:
    """Keep the queue full for ``window_s`` after every prompt has been served once, and return the cost.

    Raises:
        TimeoutError: The engine did not serve every prompt once within WARM_UP_LIMIT_S.
    """
    prompts = _prompts()
    async with aiohttp.ClientSession(engine.url, connector=aiohttp.TCPConnector(limit=CLIENTS + 4)) as client:
        warm = asyncio.Event()
        served: set[int] = set()
        loops = [
            asyncio.create_task(_keep_asking(client, engine, prompts, index, served, warm)) for index in range(CLIENTS)
        ]
        try:
            await asyncio.wait_for(warm.wait(), WARM_UP_LIMIT_S)
            before, started_s = await _histogram(client), time.perf_counter()
            await asyncio.sleep(window_s)
            after, wall_s = await _histogram(client), time.perf_counter() - started_s
            candidates = await _median_candidates(client)
        finally:
            for task in loops:
                task.cancel()
            await asyncio.gather(*loops, return_exceptions=True)
    counts = [(bound, now - then) for (bound, now), (_, then) in zip(after.buckets, before.buckets, strict=True)]
    return SelectionCost(
        selections=round(counts[-1][1]),
        p50_ms=1000 * quantile(counts, 0.50),
        p99_ms=1000 * quantile(counts, 0.99),
        share=(after.seconds - before.seconds) / wall_s,
        candidates=candidates,
    )


def quantile(cumulative: Sequence[tuple[float, float]], share: float) -> float:
    """Return the quantile of a cumulative histogram, linear within its bucket (as Prometheus does).

    Args:
        cumulative: (upper bound, count up to it), growing, the last bound infinite.
        share: In (0, 1).

    Raises:
        ValueError: The histogram is empty.
    """
    total = cumulative[-1][1]
    if total <= 0:
        raise ValueError("no selections in the window")
    rank, lower, below = share * total, 0.0, 0.0
    for bound, count in cumulative:
        if count >= rank:
            return lower if bound == float("inf") else lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


@dataclass(frozen=True, slots=True)
class _Histogram:
    buckets: list[tuple[float, float]]
    seconds: float


def _prompts() -> list[list[int]]:
    rng = random.Random(3_000)
    shared = random_prompt(rng, SHARED_TOKENS)
    return [shared + random_prompt(rng, PROMPT_TOKENS - SHARED_TOKENS) for _ in range(CLIENTS)]


async def _keep_asking(
    client: aiohttp.ClientSession,
    engine: EngineUnderTest,
    prompts: Sequence[Sequence[int]],
    index: int,
    served: set[int],
    warm: asyncio.Event,
) -> None:
    body = completion_body(engine.model, prompts[index], output_tokens=1)
    while True:
        await complete(client, body)
        served.add(index)
        if len(served) == len(prompts):
            warm.set()


async def _histogram(client: aiohttp.ClientSession) -> _Histogram:
    async with client.get("/metrics") as reply:
        text = await reply.text()
    for family in text_string_to_metric_families(text):
        if family.name == "coda_engine_selection_seconds":
            buckets = [(float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")]
            seconds = next(sample.value for sample in family.samples if sample.name.endswith("_sum"))
            return _Histogram(sorted(buckets), seconds)
    raise RuntimeError("the engine has no coda_engine_selection_seconds metric: are its plug-ins loaded?")


async def _median_candidates(client: aiohttp.ClientSession) -> int:
    async with client.get(DECISIONS_PATH) as reply:
        decisions = (await reply.json())["decisions"]
    counts = sorted(int(decision["candidates"]) for decision in decisions)
    return counts[len(counts) // 2] if counts else 0
