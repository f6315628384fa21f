"""Case ``restore``: what the CPU shadow saves when a session returns, and what publishing into it costs.

First token to first token, the same prompt three times on one idle engine: new (computed), after its HBM copies were
dropped (restored), and at once again (HBM hit). Then decode of new replies against that of published ones.
"""

import asyncio
import random
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from coda_bench.engine.cases import KV_BLOCKS
from coda_bench.engine.features import require_features
from coda_bench.engine.first_token import FirstToken, ask
from coda_bench.engine.publication import PublicationSize, measure_publication, publication_rows
from coda_bench.engine.server import EngineSetup, EngineUnderTest, running_engine
from coda_bench.engine.systems import System, system
from coda_bench.engine.workbench import Workbench
from coda_bench.report import Row, paired_ratio
from coda_engine.contract.reasons import Feature
from coda_engine.profiling import EngineClient
from coda_operator.desired.processes import CPU_BLOCK_TOKENS

PROMPT_TOKENS = 3_000
_LOAD_BYTES = "vllm:kv_offload_load_bytes_total"
_LOAD_SECONDS = "vllm:kv_offload_load_time_total"
_METRICS_AFTER_S = 1.0
_FORGET_TRIES = 100
_FORGET_PAUSE_S = 0.2
_SEED = 3_000
_START_S = 40.0


class NotRestoredError(RuntimeError):
    """The engine computed what its shadow should have held."""


@dataclass(frozen=True, slots=True)
class RestoreSize:
    """How much is measured.

    Attributes:
        prompts: Prompts, each asked three times.
        publication: How much decode is measured.
    """

    prompts: int
    publication: PublicationSize

    def expected_s(self) -> float:
        """Return about how long the case takes, seconds."""
        return self.paths_expected_s() + self.publication_expected_s()

    def paths_expected_s(self) -> float:
        """Return about how long the prompts take with their engine's start, seconds."""
        return _START_S + 18.0 * (self.prompts + 1)

    def publication_expected_s(self) -> float:
        """Return about how long decode takes with its engine's start, seconds."""
        return _START_S + self.publication.expected_s()


FULL = RestoreSize(prompts=10, publication=PublicationSize(pairs=16))
QUICK = RestoreSize(prompts=2, publication=PublicationSize(pairs=2, requests=2, output_tokens=64))


async def run_restore_case(bench: Workbench, size: RestoreSize) -> list[Row]:
    """Return the rows of the case.

    Raises:
        EngineStartError: An engine did not start.
        NotRestoredError: The shadow did not give back what it should hold.
    """

    async def measure_paths() -> dict[str, Any]:
        async with running_engine(_setup(bench, system("coda"))) as engine:
            await require_features(engine, {Feature.KV_SHADOW})
            return await _paths(engine, size.prompts)

    what = {
        "measurement": "restore",
        "prompts": size.prompts,
        "shadow_times_hbm": bench.shadow_times_hbm,
        "core": bench.cores[0],
    }
    text = f"restore: {size.prompts} prompts of {PROMPT_TOKENS} tokens"
    paths = await bench.once(what, text, size.paths_expected_s(), measure_paths)
    published = await _publication(bench, size)
    return [*_path_rows(paths["times_ms"]), *_load_rows(paths, size.prompts + 1), *publication_rows(published)]


def _setup(bench: Workbench, chosen: System) -> EngineSetup:
    return replace(bench.setup(chosen, bench.cores[0], KV_BLOCKS), whole_process=False)


async def _paths(engine: EngineUnderTest, prompts: int) -> dict[str, Any]:
    """Return the times to the first token by path, a first prompt's aside, and what all restores have copied."""
    rng = random.Random(_SEED)
    times: dict[str, list[float]] = {"recompute": [], "restore": [], "hbm-hit": []}
    async with aiohttp.ClientSession(engine.url) as client:
        for number in range(prompts + 1):
            prompt = [rng.randrange(1_000, 40_000) for _ in range(PROMPT_TOKENS)]
            computed = await ask(client, engine.model, prompt)
            await _forget_hbm(engine)
            restored = await ask(client, engine.model, prompt)
            _require_restored(restored)
            hit = await ask(client, engine.model, prompt)
            if number > 0:
                for path, answer in zip(times, (computed, restored, hit), strict=True):
                    times[path].append(answer.ms)
        await asyncio.sleep(_METRICS_AFTER_S)
        async with client.get("/metrics") as reply:
            copied = copied_by_loads(await reply.text())
    return {"times_ms": times, "load_bytes": copied[0], "load_s": copied[1]}


def copied_by_loads(metrics: str) -> tuple[float, float]:
    """Return bytes and seconds of all copies from the shadow, checksums included, in vLLM's metrics; 0 without any."""
    totals = {_LOAD_BYTES: 0.0, _LOAD_SECONDS: 0.0}
    for family in text_string_to_metric_families(metrics):
        for sample in family.samples:
            if sample.name in totals:
                totals[sample.name] += sample.value
    return totals[_LOAD_BYTES], totals[_LOAD_SECONDS]


async def _forget_hbm(engine: EngineUnderTest) -> None:
    """Drop what HBM holds once everything has been published: until then the engine is not idle enough."""
    client = EngineClient(engine.url)
    for _ in range(_FORGET_TRIES):
        await asyncio.sleep(_FORGET_PAUSE_S)
        if await asyncio.to_thread(client.forget_hbm):
            return
    raise NotRestoredError("the engine stays busy with transfers although no request is under way")


def _require_restored(answer: FirstToken) -> None:
    if answer.cached_tokens < PROMPT_TOKENS - 2 * CPU_BLOCK_TOKENS:
        raise NotRestoredError(
            f"only {answer.cached_tokens} of {PROMPT_TOKENS} prompt tokens came back after their HBM copies were "
            "dropped: does the engine's /coda/snapshot say that KVShadow is on?"
        )


async def _publication(bench: Workbench, size: RestoreSize) -> dict[str, Any]:
    async def measure() -> dict[str, Any]:
        async with running_engine(_setup(bench, system("coda"))) as engine:
            await require_features(engine, {Feature.KV_SHADOW})
            return await measure_publication(engine, size.publication, lambda: _forget_hbm(engine))

    what = {
        "measurement": "publication",
        "core": bench.cores[0],
        "shadow_times_hbm": bench.shadow_times_hbm,
        **asdict(size.publication),
    }
    text = f"restore: decode of new and of published replies, {size.publication.pairs} pairs"
    published: dict[str, Any] = await bench.once(what, text, size.publication_expected_s(), measure)
    return published


def _path_rows(times: dict[str, list[float]]) -> list[Row]:
    recompute, restore, hit = (times[name] for name in ("recompute", "restore", "hbm-hit"))
    count = len(restore)
    faster = paired_ratio(recompute, restore)
    rows = [Row("engine", "restore", "ttft_p50", "recompute", median(recompute), "ms", reps=count)]
    for name, times_ms in (("restore", restore), ("hbm-hit", hit)):
        ratio = paired_ratio(times_ms, recompute)
        rows.append(
            Row("engine", "restore", "ttft_p50", name, median(times_ms), "ms", "recompute", ratio.ratio, ratio.low,
                ratio.high, count)
        )  # fmt: skip
    rows.append(Row("engine", "restore", "restore_vs_recompute", "coda", faster.ratio, "times faster", reps=count))
    over_hit_ms = median(restored - again for restored, again in zip(restore, hit, strict=True))
    rows.append(Row("engine", "restore", "restore_over_hit", "coda", over_hit_ms, "ms", reps=count))
    return rows


def _load_rows(paths: dict[str, Any], restores: int) -> list[Row]:
    """Return what one restore copied and how long the copy with its checksums took, by the engine's own account."""
    if not paths["load_bytes"]:
        return []
    mb, ms = paths["load_bytes"] / restores / 1e6, paths["load_s"] / restores * 1_000
    return [
        Row("engine", "restore", "restored_bytes", "coda", mb, "MB", reps=restores),
        Row("engine", "restore", "copy_with_checksum", "coda", ms, "ms", reps=restores),
    ]
