"""The sessions' generator: published statistics, determinism, and what scaling may never break."""

import csv
import random
from collections import defaultdict
from pathlib import Path
from statistics import mean

import pytest

from coda_bench.workload.agents import Provider, agent_shapes, human_wait_s, tool_time
from coda_bench.workload.content import new_text
from coda_bench.workload.sessions import (
    LARGEST_CONTEXT_TOKENS,
    LARGEST_OUTPUT_TOKENS,
    MOST_ROUNDS,
    SMALLEST_NEW_TOKENS,
    SMALLEST_OUTPUT_TOKENS,
    Session,
    mean_rounds,
    poisson_arrivals_s,
    scaled_sessions,
)
from coda_bench.workload.splines import QuantileSpline

_SAMPLE = "shared/data/synthetic/smol_m3.replay.csv"
SAMPLES = [path for folder in Path(__file__).parents[2:4] if (path := folder / _SAMPLE).exists()]


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * len(values))]


@pytest.fixture(scope="module")
def sessions() -> list[Session]:
    return scaled_sessions(2_000, seed=1)


def test_a_spline_returns_the_quantiles_that_it_was_given_and_grows_between_and_beyond():
    given = {0.01: 1.0, 0.25: 2.0, 0.5: 2.1, 0.9: 50.0, 0.99: 60.0, 0.999: 75.0}
    spline = QuantileSpline.through(given, cap=80.0)
    for share, value in given.items():
        assert spline.at_share(share) == pytest.approx(value)
    shares = [number / 2_000 for number in range(1, 2_000)]
    values = [spline.at_share(share) for share in shares]
    assert values == sorted(values)
    assert spline.at_share(1 - 1e-12) == 80.0


@pytest.mark.parametrize(
    "quantiles", [{0.1: 1.0, 0.5: 2.0}, {0.1: 1.0, 0.5: 1.0, 0.9: 3.0}, {0.5: 1.0, 0.1: 2.0, 0.9: 3.0}]
)
def test_quantiles_that_do_not_grow_make_no_spline(quantiles: dict[float, float]):
    with pytest.raises(ValueError, match="growing quantiles"):
        QuantileSpline.through(quantiles)


def test_real_size_sessions_have_the_published_statistics():
    shapes = agent_shapes(4_000, random.Random(5))
    rounds = [shape.rounds for shape in shapes]
    growths = [shape.growth for shape in shapes if shape.rounds > 1]
    assert 0.08 < mean(count == 1 for count in rounds) < 0.13
    assert 8 < mean(shape.turns for shape in shapes) < 10
    assert quantile(growths, 0.5) == pytest.approx(4.45, rel=0.08)
    assert quantile(growths, 0.9) == pytest.approx(13.96, rel=0.10)
    assert mean(growth >= 4 for growth in growths) == pytest.approx(0.546, abs=0.03)
    assert mean(shape.provider is Provider.CLAUDE for shape in shapes) == pytest.approx(0.626, abs=0.03)


def test_longer_sessions_tend_to_grow_more():
    shapes = [shape for shape in agent_shapes(2_000, random.Random(6)) if shape.rounds > 1]
    shapes.sort(key=lambda shape: shape.rounds)
    short, long = shapes[: len(shapes) // 3], shapes[-len(shapes) // 3 :]
    assert mean(shape.growth for shape in long) > 2 * mean(shape.growth for shape in short)


def test_tools_and_humans_take_as_long_as_published():
    rng = random.Random(7)
    calls = [tool_time(rng) for _ in range(8_000)]
    seconds = [taken_s for _, taken_s in calls]
    assert quantile(seconds, 0.5) == pytest.approx(0.209, rel=0.12)
    assert quantile(seconds, 0.9) == pytest.approx(8.866, rel=0.15)
    assert mean(taken_s > 60 for taken_s in seconds) == pytest.approx(0.0397, abs=0.01)
    assert max(seconds) <= 7_200
    assert mean(name == "Bash" for name, _ in calls) > 0.6
    reads = [taken_s for name, taken_s in calls if name == "Read"]
    searches = [taken_s for name, taken_s in calls if name == "WebSearch"]
    assert quantile(reads, 0.5) < 0.2 < quantile(searches, 0.5)
    assert quantile([human_wait_s(rng) for _ in range(4_000)], 0.5) == pytest.approx(86, rel=0.12)


def test_equal_seeds_give_equal_sessions_arrivals_and_text():
    assert scaled_sessions(40, seed=3) == scaled_sessions(40, seed=3)
    assert scaled_sessions(40, seed=3) != scaled_sessions(40, seed=4)
    session = scaled_sessions(4, seed=3)[0]
    assert new_text(session, 0, seed=3) == new_text(session, 0, seed=3)
    assert poisson_arrivals_s(9, 0.4, seed=3) == poisson_arrivals_s(9, 0.4, seed=3)


def test_another_rate_stretches_the_same_arrivals():
    slow, fast = poisson_arrivals_s(50, 0.2, seed=1), poisson_arrivals_s(50, 0.8, seed=1)
    assert slow == pytest.approx([4 * at_s for at_s in fast])
    assert fast == sorted(fast)
    many = poisson_arrivals_s(4_000, 0.5, seed=2)
    assert many[-1] == pytest.approx(8_000, rel=0.06)


def test_a_rate_is_positive():
    with pytest.raises(ValueError, match="positive"):
        poisson_arrivals_s(1, 0.0, seed=1)


def test_no_session_exceeds_the_scaled_limits(sessions: list[Session]):
    for session in sessions:
        assert 1 <= len(session.rounds) <= MOST_ROUNDS
        assert session.prompt_tokens[-1] + session.rounds[-1].output_tokens <= LARGEST_CONTEXT_TOKENS
        assert session.rounds[0].gap_s == 0
        assert session.shared_tokens <= session.rounds[0].new_tokens
        for round_ in session.rounds:
            assert SMALLEST_OUTPUT_TOKENS <= round_.output_tokens <= LARGEST_OUTPUT_TOKENS
            assert round_.new_tokens >= SMALLEST_NEW_TOKENS
        for round_ in session.rounds[1:]:
            assert (0.05 if round_.tool else 0.5) <= round_.gap_s <= 8


def test_a_prompt_is_everything_said_before_plus_the_rounds_own_text(sessions: list[Session]):
    session = next(session for session in sessions if len(session.rounds) > 3)
    first, second = session.rounds[:2]
    assert session.prompt_tokens[:2] == [
        first.new_tokens,
        first.new_tokens + first.output_tokens + second.new_tokens,
    ]
    assert len(new_text(session, 1, seed=1)) == second.new_tokens


def test_sessions_of_a_provider_start_alike_and_only_that_far(sessions: list[Session]):
    one, other = [
        session for session in sessions if session.provider is Provider.CLAUDE and session.shared_tokens == 256
    ][:2]
    first, second = new_text(one, 0, seed=1), new_text(other, 0, seed=1)
    assert first[:256] == second[:256]
    assert first[256:280] != second[256:280]
    assert new_text(one, 1, seed=1) != new_text(one, 1, seed=2)


def test_scaled_sessions_have_the_marginals_of_the_published_rules(sessions: list[Session]):
    rounds = [len(session.rounds) for session in sessions]
    assert mean_rounds(sessions) == pytest.approx(8.0, abs=0.7)
    assert quantile(rounds, 0.5) == pytest.approx(5, abs=1)
    assert quantile([session.prompt_tokens[0] for session in sessions], 0.5) == pytest.approx(298, rel=0.12)
    outputs = [round_.output_tokens for session in sessions for round_ in session.rounds]
    assert quantile(outputs, 0.5) == pytest.approx(28, abs=2)
    gaps = [round_.gap_s for session in sessions for round_ in session.rounds[1:]]
    assert quantile(gaps, 0.5) == pytest.approx(0.38, rel=0.15)


@pytest.mark.skipif(not SAMPLES, reason="the sample trace is not part of the project")
def test_a_sample_trace_made_by_the_same_rules_has_the_same_marginals(sessions: list[Session]):
    sample = defaultdict(list)
    for row in csv.DictReader(SAMPLES[0].read_text().splitlines()):
        sample[row["session_id"]].append(row)
    assert mean(map(len, sample.values())) == pytest.approx(mean_rounds(sessions), rel=0.2)
    outputs = [int(row["output_len"]) for rows in sample.values() for row in rows]
    ours = [round_.output_tokens for session in sessions for round_ in session.rounds]
    for share in (0.1, 0.5, 0.9):
        assert quantile(outputs, share) == pytest.approx(quantile(ours, share), rel=0.15)
    appended = [int(row["input_len"]) for rows in sample.values() for row in rows[1:]]
    ours = [round_.new_tokens for session in sessions for round_ in session.rounds[1:]]
    for share in (0.5, 0.75, 0.9):
        assert quantile(appended, share) == pytest.approx(quantile(ours, share), rel=0.2)
