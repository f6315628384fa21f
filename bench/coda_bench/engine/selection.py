"""Case ``selection``: what one state-admission decision over a full frontier of long prompts costs.

A closed loop keeps more than 64 requests of 3,000 tokens waiting at a real engine. The prompts share most of
their prefix, so that every look at residency is a long one; with a small KV cache their rest is evicted and
inserted all the time. The engine's own histogram of selection times is read before and after.
"""

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from coda_bench.engine.completions import complete, completion_body
from coda_bench.engine.features import accept_profile
from coda_bench.engine.server import EngineSetup, EngineUnderTest, bench_spec, running_engine
from coda_bench.engine.workbench import Workbench
from coda_bench.report import Row
from coda_bench.workload.content import random_prompt
from coda_engine.contract.interface import DECISIONS_PATH
from coda_operator.spec import CodaClusterSpec

CLIENTS = 80
PROMPT_TOKENS = 3_000
SHARED_TOKENS = 2_880
WARM_UP_LIMIT_S = 240.0
_WARM_UP_EXPECTED_S = 100.0
_MAX_RUNNING = 4


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


@dataclass(frozen=True, slots=True)
class SelectionSize:
    """How much is measured.

    Attributes:
        window_s: Window of each measurement, seconds.
        churn: Also measure while blocks are evicted and inserted all the time.
    """

    window_s: float
    churn: bool

    def caches(self) -> dict[str, str]:
        """Return the KV cache of each case that is run."""
        return {"selection": "1400M", "selection-churn": "400M"} if self.churn else {"selection": "1400M"}

    def expected_s(self) -> float:
        """Return about how long the case takes, seconds."""
        return len(self.caches()) * (_WARM_UP_EXPECTED_S + self.window_s)


FULL = SelectionSize(window_s=60, churn=True)
QUICK = SelectionSize(window_s=15, churn=False)


async def run_selection_case(bench: Workbench, size: SelectionSize) -> list[Row]:
    """Return the rows of the case.

    Raises:
        EngineStartError: The engine did not start.
        TimeoutError: The engine did not serve every prompt once within WARM_UP_LIMIT_S.
    """
    rows: list[Row] = []
    for case, kv_cache in size.caches().items():
        spec = bench_spec(bench.model_path, kv_cache=kv_cache, max_running=_MAX_RUNNING)

        async def one(case: str = case, spec: CodaClusterSpec = spec) -> dict[str, float]:
            async with running_engine(EngineSetup("coda", spec, bench.cores[0])) as coda:
                await accept_profile(coda)
                return asdict(await measure(coda, size.window_s))

        what = {"measurement": case, "window_s": size.window_s, "core": bench.cores[0]}
        text = f"{case}: filling the queue, then {size.window_s:.0f} s"
        cost = SelectionCost(**await bench.once(what, text, _WARM_UP_EXPECTED_S + size.window_s, one))
        figures = (
            ("selection_p50_ms", cost.p50_ms, "ms"),
            ("selection_p99_ms", cost.p99_ms, "ms"),
            ("selection_share", cost.share, "of engine time"),
            ("candidates_p50", float(cost.candidates), "requests"),
        )
        rows += [
            Row("engine", case, metric, "coda", value, unit, reps=cost.selections) for metric, value, unit in figures
        ]
    return rows


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
