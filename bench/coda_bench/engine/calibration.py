"""How much this machine serves: the arrival rate of every case is a multiple of it, so that figures compare.

The time that FIFO with a shadow spends on a session is taken apart into prefill, measured by itself, and the rest,
which is decoding. Counting sessions or tokens of a short run alone would not do: it holds more of the sessions'
beginnings, where there is more prefill for each output token, than a long one.
"""

import random
import time
from dataclasses import dataclass
from statistics import median

import aiohttp

from coda_bench.engine.cases import LOAD
from coda_bench.engine.completions import complete, completion_body
from coda_bench.engine.records import RequestRecord
from coda_bench.engine.replay import Target, Trace, play_until
from coda_bench.workload.content import random_prompt
from coda_bench.workload.sessions import Session, mean_output_tokens, poisson_arrivals_s, scaled_sessions

_PROBE_TOKENS = 1_024
_PROBES = 5
_USUAL_MS_PER_TOKEN = 0.6
_USUAL_PER_S = 0.3
_FIRST_SESSIONS, _FIRST_WITHIN_S = 16, 10.0
_START_S, _END_S = 30.0, 130.0
_SEED = 77
_POPULATION = 2_000

EXPECTED_S = 190.0
"""About how long calibration takes with its engines' start."""


@dataclass(frozen=True, slots=True)
class SessionCost:
    """What an average session costs one engine.

    Attributes:
        prefill_s: Time in prefill of its new text, and of what has to be computed again, seconds.
        decode_s: All other time, seconds.
    """

    prefill_s: float
    decode_s: float

    @property
    def sessions_per_s(self) -> float:
        """Sessions that the engine serves in a second when it is never idle."""
        return 1 / (self.prefill_s + self.decode_s)


async def measure_capacity(target: Target) -> SessionCost:
    """Return what a session costs an idle engine with first come, first served order.

    Raises:
        ReplayError: A request failed.
        ValueError: The engine was not busy: nothing was served in the window.
    """
    ms_per_token = await _prefill_ms_per_token(target)
    population = scaled_sessions(_POPULATION, _SEED)
    arrivals = overload_arrivals_s(_USUAL_PER_S * _USUAL_MS_PER_TOKEN / ms_per_token)
    trace = Trace(population[: len(arrivals)], arrivals[: len(population)], _SEED)
    records = await play_until(target, trace, _END_S)
    return session_cost(records, population, ms_per_token / 1_000, _START_S, _END_S)


def overload_arrivals_s(guessed_per_s: float) -> list[float]:
    """Return when sessions arrive that keep an engine busy as the cases do, seconds.

    A queue stands at once and then grows by the cases' own overload. (With all sessions at once, first come, first
    served has each returning turn wait behind every other session, loses more of its prefixes and serves about a
    seventh less than in the cases.)

    Args:
        guessed_per_s: About what the engine serves, sessions/s; may be off by a half either way.
    """
    first = poisson_arrivals_s(_FIRST_SESSIONS, _FIRST_SESSIONS / _FIRST_WITHIN_S, _SEED)
    later_per_s = LOAD * guessed_per_s
    later = poisson_arrivals_s(max(1, round(later_per_s * _END_S)), later_per_s, _SEED + 1)
    return sorted([*first, *(at_s for at_s in later if at_s < _END_S)])


def session_cost(
    records: list[RequestRecord], population: list[Session], prefill_s_per_token: float, start_s: float, end_s: float
) -> SessionCost:
    """Return an average session's cost from a part of a run during which the engine was never idle.

    Args:
        records: Requests of the run.
        population: Sessions whose average is meant.
        prefill_s_per_token: Seconds for each prompt token computed.
        start_s: Where the part begins, seconds.
        end_s: Where it ends, seconds.

    Raises:
        ValueError: No output in that part, or prefill alone would have taken longer than it.
    """
    output = sum(start_s <= at_s < end_s for record in records for at_s in record.token_s)
    served = [r for r in records if r.token_s and start_s <= r.token_s[0] < end_s]
    new = sum(r.new_tokens for r in served)
    known = [r for r in served if r.cached_tokens is not None]
    again = 1.0
    if known:
        again = max(
            1.0, sum(r.prompt_tokens - (r.cached_tokens or 0) for r in known) / sum(r.new_tokens for r in known)
        )
    decode_s = end_s - start_s - new * again * prefill_s_per_token
    if output == 0 or decode_s <= 0:
        raise ValueError("the engine's capacity cannot be told from this run; give it with --capacity")
    mean_new = sum(round_.new_tokens for session in population for round_ in session.rounds) / len(population)
    return SessionCost(
        prefill_s=mean_new * again * prefill_s_per_token,
        decode_s=mean_output_tokens(population) * decode_s / output,
    )


async def _prefill_ms_per_token(target: Target) -> float:
    rng = random.Random(_SEED)
    times_ms = []
    async with aiohttp.ClientSession(target.url) as client:
        for _ in range(_PROBES + 1):
            body = completion_body(target.model, random_prompt(rng, _PROBE_TOKENS), output_tokens=1)
            started_s = time.perf_counter()
            await complete(client, body)
            times_ms.append((time.perf_counter() - started_s) * 1_000)
    return median(times_ms[1:]) / _PROBE_TOKENS
