import pytest

from coda_engine.profiling.errors import MeasurementError
from coda_engine.profiling.plan import FULL, PROBE_TOKENS, QUICK, plan_measurement


def test_a_quick_round_costs_about_three_times_the_largest_prompt() -> None:
    plan = plan_measurement(probe_ms=256.0, max_context_tokens=8192, effort=QUICK)
    assert plan.curve_tokens[-1] == pytest.approx(1_000 * QUICK.largest_s, abs=16)
    assert plan.round_tokens <= 3.1 * plan.curve_tokens[-1]


def test_a_quick_profile_of_a_steady_engine_prefills_at_most_twelve_seconds() -> None:
    for tokens_per_s in (400, 800, 1_600, 50_000):
        plan = plan_measurement(PROBE_TOKENS / tokens_per_s * 1_000, 131_072, QUICK)
        assert plan.round_tokens * QUICK.rounds / tokens_per_s <= 12.5


def test_a_full_profile_reaches_the_context_window_of_a_fast_engine() -> None:
    plan = plan_measurement(probe_ms=5.0, max_context_tokens=8192, effort=FULL)
    assert 8192 - 64 <= plan.curve_tokens[-1] < 8192


def test_held_out_sizes_lie_between_curve_sizes_and_are_none_of_them() -> None:
    for effort in (QUICK, FULL):
        for max_context_tokens in (512, 2048, 131_072):
            plan = plan_measurement(100.0, max_context_tokens, effort)
            assert not set(plan.held_out_tokens) & set(plan.curve_tokens)
            assert plan.curve_tokens[0] < plan.held_out_tokens[0]
            assert plan.held_out_tokens[-1] < plan.curve_tokens[-1] < max_context_tokens


def test_a_slow_engine_still_gets_sizes_that_differ() -> None:
    plan = plan_measurement(probe_ms=60_000.0, max_context_tokens=8192, effort=QUICK)
    assert len(plan.curve_tokens) == len(QUICK.curve_shares)


@pytest.mark.parametrize("probe_ms", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_probe_is_refused(probe_ms: float) -> None:
    with pytest.raises(MeasurementError, match="cannot be"):
        plan_measurement(probe_ms, 8192, QUICK)


def test_a_context_window_without_room_for_a_curve_is_refused_by_its_field() -> None:
    with pytest.raises(MeasurementError, match=r"spec\.model\.maxContextTokens"):
        plan_measurement(100.0, 80, QUICK)
