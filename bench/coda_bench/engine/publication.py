"""What publishing into the CPU shadow costs decode: the same replies on one engine, new ones against published ones.

Two engines, one with a shadow and one without, differ by several percent from start to start, far more than what is
looked for. One engine that generates a reply a second time finds each of its blocks published already and copies
nothing; everything else is the same work.
"""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from coda_bench.engine.completions import complete
from coda_bench.engine.server import EngineUnderTest
from coda_bench.report import Row, paired_ratio
from coda_bench.workload.content import random_prompt

_PROMPT_TOKENS = 16
"""Less than a block, so that neither time finds a prefix: both prefill alike."""

_ONLY_TOKEN = 1_000
"""Generated again and again: the same reply both times, however a step's batch rounds."""

_STORE_BYTES = "vllm:kv_offload_store_bytes_total"
_METRICS_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class PublicationSize:
    """How much is measured.

    Attributes:
        pairs: How often new replies are compared with published ones.
        requests: Requests at the same time.
        output_tokens: Tokens that each of them generates.
    """

    pairs: int
    requests: int = 4
    output_tokens: int = 128

    def expected_s(self) -> float:
        """Return about how long it takes, seconds."""
        return 2 * (self.pairs + 1) * self.requests * self.output_tokens / 60


async def measure_publication(
    engine: EngineUnderTest, size: PublicationSize, until_published: Callable[[], Awaitable[None]]
) -> dict[str, Any]:
    """Return tokens/s and published bytes of every pair, ``new`` and ``published``.

    Which comes first alternates: the published reply is that of this pair or of the one before.

    Args:
        engine: With a CPU shadow, otherwise idle.
        size: How much is measured.
        until_published: Waits until all copies have ended.
    """
    tps: dict[str, list[float]] = {"new": [], "published": []}
    stored: dict[str, list[float]] = {"new": [], "published": []}

    async with aiohttp.ClientSession(engine.url) as client:

        async def reply(kind: str, number: int) -> None:
            before = await _stored_bytes(client)
            tps[kind].append(await _tokens_per_s(client, engine.model, size, number))
            await until_published()
            await asyncio.sleep(_METRICS_AFTER_S)
            stored[kind].append(await _stored_bytes(client) - before)

        await _tokens_per_s(client, engine.model, size, number=0)  # warm-up, and the first published reply
        await until_published()
        for number in range(1, size.pairs + 1):
            kinds = (
                (("new", number), ("published", number)) if number % 2 else (("published", number - 1), ("new", number))
            )
            for kind, reply_number in kinds:
                await reply(kind, reply_number)
    return {"tps": tps, "stored_bytes": stored}


def publication_rows(measured: dict[str, Any]) -> list[Row]:
    """Return the rows of :func:`measure_publication`; what was published each time shows that the comparison holds."""
    new, published = measured["tps"]["new"], measured["tps"]["published"]
    ratio, count = paired_ratio(new, published), len(new)
    rows = [
        Row("engine", "restore", "decode_tps", "published-before", median(published), "tokens/s", reps=count),
        Row("engine", "restore", "decode_tps", "publishing", median(new), "tokens/s", "published-before", ratio.ratio,
            ratio.low, ratio.high, count),
    ]  # fmt: skip
    rows += [
        Row(
            "engine", "restore", "published_bytes", name, median(measured["stored_bytes"][kind]) / 1e6, "MB", reps=count
        )
        for kind, name in (("published", "published-before"), ("new", "publishing"))
    ]
    return rows


async def _tokens_per_s(client: aiohttp.ClientSession, model: str, size: PublicationSize, number: int) -> float:
    rng = random.Random(number)
    bodies = [_body(model, random_prompt(rng, _PROMPT_TOKENS), size.output_tokens) for _ in range(size.requests)]
    started_s = time.perf_counter()
    generated = await asyncio.gather(*(complete(client, body) for body in bodies))
    return sum(generated) / (time.perf_counter() - started_s)


def _body(model: str, prompt: list[int], output_tokens: int) -> bytes:
    return json.dumps(
        {
            "model": model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "allowed_token_ids": [_ONLY_TOKEN],
        }
    ).encode()


async def _stored_bytes(client: aiohttp.ClientSession) -> float:
    async with client.get("/metrics") as reply:
        families = text_string_to_metric_families(await reply.text())
    return sum(sample.value for family in families for sample in family.samples if sample.name == _STORE_BYTES)
