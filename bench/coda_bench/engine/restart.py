"""Case ``warm-restart``: an engine is killed and started again, and the same sessions return.

With its shadow still there it restores them; the cold restart begins with an empty one. Sessions return one after
the other, so that the figures are the engine's and no queue's.
"""

import asyncio
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import aiohttp

from coda_bench.engine.cases import KV_BLOCKS
from coda_bench.engine.features import require_features
from coda_bench.engine.first_token import ask
from coda_bench.engine.server import new_shadow_folder, running_engine
from coda_bench.engine.systems import system
from coda_bench.engine.workbench import Workbench
from coda_bench.report import Row, paired_ratio
from coda_bench.workload.content import random_prompt
from coda_engine.contract.reasons import Feature

_FIRST_TOKENS = range(600, 3_000)
_REPLY_TOKENS = 16
_NEW_TOKENS = 64
_WARM_UP_TOKENS = 256
_PUBLISHED_WITHIN_S = 2.0
_SEED = 9


@dataclass(frozen=True, slots=True)
class RestartSize:
    """How much is measured: ``sessions`` that return, after each of ``restarts`` restarts of both kinds."""

    sessions: int
    restarts: int

    def expected_s(self) -> float:
        """Return about how long the case takes, seconds."""
        return self.restarts * 3 * (35 + 2 * self.sessions)


FULL = RestartSize(sessions=16, restarts=3)
QUICK = RestartSize(sessions=2, restarts=1)


async def run_restart_case(bench: Workbench, size: RestartSize) -> list[Row]:
    """Return the rows of the case.

    Raises:
        EngineStartError: An engine did not start.
    """
    warm, cold, restored = [], [], 0
    for number in range(size.restarts):

        async def measure(seed: int = number) -> list[list[list[float]]]:
            return await _one_restart(bench, size.sessions, _SEED + seed)

        what = {"measurement": "restart", "sessions": size.sessions, "number": number, "shadow": bench.shadow_times_hbm}
        text = f"warm-restart: {size.sessions} sessions, kill, restart"
        warm_answers, cold_answers = await bench.once(what, text, size.expected_s() / size.restarts, measure)
        warm += [ms for ms, _ in warm_answers]
        cold += [ms for ms, _ in cold_answers]
        restored += sum(tokens for _, tokens in warm_answers)
    ratio = paired_ratio(warm, cold)
    count = len(warm)
    return [
        Row("engine", "warm-restart", "ttft_p50", "cold-restart", median(cold), "ms", reps=count),
        Row("engine", "warm-restart", "ttft_p50", "warm-restart", median(warm), "ms", "cold-restart",
            median(warm) / median(cold), ratio.low, ratio.high, count),
        Row("engine", "warm-restart", "restored_tokens", "warm-restart", restored / count, "tokens", reps=count),
    ]  # fmt: skip


async def _one_restart(bench: Workbench, sessions: int, seed: int) -> list[list[list[float]]]:
    """Return (milliseconds, prompt tokens not computed) of each session's return, after a warm and a cold restart."""
    setup = bench.setup(system("coda"), bench.cores[0], KV_BLOCKS)
    rng = random.Random(seed)
    histories = [random_prompt(rng, rng.choice(_FIRST_TOKENS)) for _ in range(sessions)]
    folder = new_shadow_folder()
    try:
        kept = replace(setup, shadow_folder=folder)
        async with running_engine(kept) as engine, aiohttp.ClientSession(engine.url) as client:
            await require_features(engine, {Feature.KV_SHADOW})
            for history in histories:
                history += (await ask(client, engine.model, history, _REPLY_TOKENS)).token_ids
                history += random_prompt(rng, _NEW_TOKENS)
            await asyncio.sleep(_PUBLISHED_WITHIN_S)
            engine.kill()
        answers = []
        for restarted in (kept, setup):
            async with running_engine(restarted) as engine, aiohttp.ClientSession(engine.url) as client:
                await ask(client, engine.model, random_prompt(rng, _WARM_UP_TOKENS))
                answers.append(await _returns(client, engine.model, histories))
        return answers
    finally:
        shutil.rmtree(folder, ignore_errors=True)


async def _returns(client: aiohttp.ClientSession, model: str, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    answers = []
    for prompt in prompts:
        answer = await ask(client, model, prompt)
        answers.append([answer.ms, float(answer.cached_tokens)])
    return answers
