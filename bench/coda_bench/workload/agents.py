"""Sessions of coding agents at their real size, as published trace statistics describe them.

Turns, tool rounds, growth, first context, tool times and human waits have the quantiles of TraceLab's sanitized
sessions (Claude and Codex); growth is coupled to the number of rounds by a Gaussian copula.
"""

import math
import random
from dataclasses import dataclass
from enum import StrEnum

from coda_bench.workload.splines import QuantileSpline, normal_score

LARGEST_CONTEXT_TOKENS = 198_000
_MOST_TURNS = 450
_ROUNDS_TO_GROWTH = 0.75

_TOOL_ROUNDS = QuantileSpline.through({0.45: 0.6, 0.50: 1, 0.65: 3, 0.75: 6.2, 0.90: 19.5, 0.99: 84, 0.999: 180})
_NO_TOOL_ROUNDS = 0.45
_SINGLE_TURN_TOOL_ROUNDS = QuantileSpline.through(
    {0.19: 0.6, 0.25: 3, 0.50: 9, 0.75: 22, 0.90: 48, 0.99: 160, 0.999: 350}
)
_SINGLE_TURN_NO_TOOL_ROUNDS = 0.19
_GROWTH = QuantileSpline.through(
    {0.01: 1.02, 0.10: 1.55, 0.25: 2.45, 0.4536: 4.0, 0.5: 4.45, 0.75: 8.2, 0.9: 13.96, 0.99: 37.77, 0.999: 80}
)
_TOOL_S = QuantileSpline.through(
    {0.01: 0.005, 0.10: 0.02, 0.25: 0.06, 0.5: 0.209, 0.75: 1.5, 0.9: 8.866, 0.95: 30.013, 0.9603: 60,
     0.99: 180.002, 0.999: 1_800},
    cap=7_200,
)  # fmt: skip
_HUMAN_S = QuantileSpline.through({0.01: 3, 0.10: 12, 0.50: 86, 0.90: 1_236, 0.99: 50_000}, cap=200_000)


class Provider(StrEnum):
    """Whose agent it is: they differ in the length of their first context."""

    CLAUDE = "claude"
    CODEX = "codex"


_CLAUDE_SHARE = 0.626
_FIRST_CONTEXT = {Provider.CLAUDE: (math.log(25_000), 0.45), Provider.CODEX: (math.log(12_000), 0.5)}

_TOOLS = (
    # name, share of calls, median seconds, spread of ln(seconds)
    ("Bash", 0.76, 0.409, 2.2),
    ("Edit", 0.11, 0.095, 0.8),
    ("Read", 0.09, 0.036, 0.8),
    ("WebSearch", 0.04, 8.0, 1.5),
)


@dataclass(frozen=True, slots=True)
class AgentShape:
    """One session's structure at real size.

    Attributes:
        provider: Whose agent.
        turns: Times that a human speaks.
        rounds: Requests to the model.
        growth: Last context over first context.
        first_tokens: Context of the first request, tokens.
    """

    provider: Provider
    turns: int
    rounds: int
    growth: float
    first_tokens: float


def agent_shapes(count: int, rng: random.Random) -> list[AgentShape]:
    """Return the shapes of ``count`` sessions."""
    lengths = [_turns_and_rounds(rng) for _ in range(count)]
    growths = _growths([rounds for _, rounds in lengths], rng)
    shapes = []
    for (turns, rounds), growth in zip(lengths, growths, strict=True):
        provider = Provider.CLAUDE if rng.random() < _CLAUDE_SHARE else Provider.CODEX
        first_tokens = min(rng.lognormvariate(*_FIRST_CONTEXT[provider]), LARGEST_CONTEXT_TOKENS / growth)
        shapes.append(AgentShape(provider, turns, rounds, growth, first_tokens))
    return shapes


def tool_time(rng: random.Random) -> tuple[str, float]:
    """Return a tool's name and how long a call of it took, seconds."""
    seconds = _TOOL_S.at_share(_open_share(rng))
    weights = [
        share / spread * math.exp(-0.5 * (math.log(seconds / median_s) / spread) ** 2)
        for _, share, median_s, spread in _TOOLS
    ]
    return rng.choices([name for name, *_ in _TOOLS], weights)[0], seconds


def human_wait_s(rng: random.Random) -> float:
    """Return how long a human took to answer, seconds."""
    return _HUMAN_S.at_share(_open_share(rng))


def _turns_and_rounds(rng: random.Random) -> tuple[int, int]:
    turns = min(_MOST_TURNS, max(1, math.floor(rng.lognormvariate(0.40, 1.943))))
    if turns == 1:
        return 1, 1 + _tool_rounds(rng, _SINGLE_TURN_TOOL_ROUNDS, _SINGLE_TURN_NO_TOOL_ROUNDS)
    return turns, sum(1 + _tool_rounds(rng, _TOOL_ROUNDS, _NO_TOOL_ROUNDS) for _ in range(turns))


def _tool_rounds(rng: random.Random, spline: QuantileSpline, none_share: float) -> int:
    share = _open_share(rng)
    return 0 if share < none_share else max(1, round(spline.at_share(share)))


def _growths(rounds: list[int], rng: random.Random) -> list[float]:
    """Return each session's growth: its quantiles are the published ones, longer sessions tend to grow more."""
    ties = [rng.random() for _ in rounds]
    several = sorted((index for index, count in enumerate(rounds) if count > 1), key=lambda i: (rounds[i], ties[i]))
    growths = [1.0] * len(rounds)
    for rank, index in enumerate(several):
        score = normal_score((rank + 0.5) / len(several))
        coupled = _ROUNDS_TO_GROWTH * score + math.sqrt(1 - _ROUNDS_TO_GROWTH**2) * rng.gauss(0, 1)
        growths[index] = max(1.0, _GROWTH.at_score(coupled))
    return growths


def _open_share(rng: random.Random) -> float:
    return min(max(rng.random(), 1e-12), 1 - 1e-12)
