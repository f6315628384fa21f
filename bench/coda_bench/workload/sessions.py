"""Coding-agent sessions scaled down to a model of some thousand tokens of context, and when they arrive.

The scaling keeps what scheduling depends on: many rounds of little new text on a long known prefix, growth over
the session, short tool gaps with a long tail, waits for humans between turns, prefixes shared between sessions.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from coda_bench.workload.agents import AgentShape, Provider, agent_shapes, human_wait_s, tool_time

LARGEST_CONTEXT_TOKENS = 3_500
"""Prompt plus output of a session's last round never exceeds it."""

LARGEST_OUTPUT_TOKENS = 96
SMALLEST_OUTPUT_TOKENS = 8
SMALLEST_NEW_TOKENS = 8
MOST_ROUNDS = 24

_REAL_CONTEXT_TOKENS = 200_000
_SMALLEST_FIRST_TOKENS = 64
_PROMPT_LIMIT_TOKENS = LARGEST_CONTEXT_TOKENS - LARGEST_OUTPUT_TOKENS
_SHARED_TOKENS = {Provider.CLAUDE: 256, Provider.CODEX: 112}
_SHARED_STEP_TOKENS = 16
_LONGEST_GAP_S = 8.0


@dataclass(frozen=True, slots=True)
class Round:
    """One request of a session.

    Attributes:
        gap_s: Time between the end of the previous reply and this request, seconds; 0 for the first.
        tool: The tool whose result this request brings; None when a human speaks.
        new_tokens: Text that this request adds to prompt and reply of the previous one, tokens.
        output_tokens: Length of the reply, tokens.
    """

    gap_s: float
    tool: str | None
    new_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Session:
    """A session: each round's prompt is everything said before, plus its new text.

    Attributes:
        index: Place in the list that it was generated in; names its content.
        provider: Whose agent; sessions of one provider start with the same text.
        shared_tokens: Length of that common start, tokens.
        rounds: In order.
    """

    index: int
    provider: Provider
    shared_tokens: int
    rounds: tuple[Round, ...]

    @property
    def prompt_tokens(self) -> list[int]:
        """Prompt length of each round, tokens."""
        lengths, context = [], 0
        for round_ in self.rounds:
            context += round_.new_tokens
            lengths.append(context)
            context += round_.output_tokens
        return lengths


def scaled_sessions(count: int, seed: int) -> list[Session]:
    """Return ``count`` sessions; equal arguments give equal sessions."""
    rng = random.Random(f"sessions/{seed}")
    return [_scaled(index, shape, rng) for index, shape in enumerate(agent_shapes(count, rng))]


def poisson_arrivals_s(count: int, per_s: float, seed: int) -> list[float]:
    """Return when ``count`` sessions start, seconds; at another rate the same pattern, stretched.

    Raises:
        ValueError: The rate is not positive.
    """
    if per_s <= 0:
        raise ValueError("an arrival rate is positive")
    rng = random.Random(f"arrivals/{seed}")
    now_s, arrivals = 0.0, []
    for _ in range(count):
        now_s += rng.expovariate(1.0) / per_s
        arrivals.append(now_s)
    return arrivals


def mean_rounds(sessions: Sequence[Session]) -> float:
    """Return the mean number of rounds."""
    return sum(len(session.rounds) for session in sessions) / len(sessions)


def mean_output_tokens(sessions: Sequence[Session]) -> float:
    """Return the mean number of output tokens of a whole session."""
    return sum(round_.output_tokens for session in sessions for round_ in session.rounds) / len(sessions)


def _scaled(index: int, shape: AgentShape, rng: random.Random) -> Session:
    first = min(
        max(round(shape.first_tokens * LARGEST_CONTEXT_TOKENS / _REAL_CONTEXT_TOKENS), _SMALLEST_FIRST_TOKENS),
        math.floor(_PROMPT_LIMIT_TOKENS / shape.growth),
    )
    room = _PROMPT_LIMIT_TOKENS - first
    fitting_rounds = 1 + room // (SMALLEST_OUTPUT_TOKENS + SMALLEST_NEW_TOKENS)
    rounds = min(max(round(shape.rounds**0.6), 1), MOST_ROUNDS, fitting_rounds)
    turns = min(max(round(shape.turns**0.4), 1), rounds)
    outputs = [_output_tokens(rng) for _ in range(rounds)]
    appends = _appends((shape.growth - 1) * first, outputs, room, rng)
    human = {0, *rng.sample(range(1, rounds), turns - 1)}
    built = [Round(0.0, None, first, outputs[0])]
    for number in range(1, rounds):
        tool, gap_s = (None, _human_gap_s(rng)) if number in human else _tool_gap_s(rng)
        built.append(Round(gap_s, tool, appends[number - 1] - outputs[number - 1], outputs[number]))
    shared = min(_SHARED_TOKENS[shape.provider], first // _SHARED_STEP_TOKENS * _SHARED_STEP_TOKENS)
    return Session(index, shape.provider, shared, tuple(built))


def _appends(grown: float, outputs: list[int], room: int, rng: random.Random) -> list[int]:
    """Return how much each round adds to the previous prompt, its reply included; shortens outputs when nothing fits.

    Args:
        grown: Tokens that the session grows by, before limits.
        outputs: Reply lengths; changed in place when even the smallest additions exceed ``room``.
        room: Most tokens that the session may grow by.
        rng: Source of the additions' shares.
    """
    if len(outputs) == 1:
        return []
    weights = [rng.lognormvariate(0, 1.3) for _ in outputs[1:]]
    if sum(output + SMALLEST_NEW_TOKENS for output in outputs[:-1]) > room:
        outputs[:] = [SMALLEST_OUTPUT_TOKENS] * len(outputs)
    floors = [output + SMALLEST_NEW_TOKENS for output in outputs[:-1]]
    wanted = [grown * weight / sum(weights) for weight in weights]
    above = [max(0, round(tokens) - floor) for tokens, floor in zip(wanted, floors, strict=True)]
    excess_room = room - sum(floors)
    if sum(above) > excess_room:
        above = [math.floor(tokens * excess_room / sum(above)) for tokens in above]
    return [floor + tokens for floor, tokens in zip(floors, above, strict=True)]


def _output_tokens(rng: random.Random) -> int:
    real = rng.lognormvariate(math.log(214), 1.617)
    return min(max(round(28 * math.sqrt(real / 214)), SMALLEST_OUTPUT_TOKENS), LARGEST_OUTPUT_TOKENS)


def _tool_gap_s(rng: random.Random) -> tuple[str, float]:
    tool, seconds = tool_time(rng)
    return tool, min(max(0.3 * math.sqrt(seconds / 0.209), 0.05), _LONGEST_GAP_S)


def _human_gap_s(rng: random.Random) -> float:
    return min(max(2 * math.pow(human_wait_s(rng) / 86, 0.4), 0.5), _LONGEST_GAP_S)
