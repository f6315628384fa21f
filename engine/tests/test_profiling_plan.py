import pytest

from coda_engine.profiling.errors import MeasurementError
from coda_engine.profiling.plan import FULL, PROBE_TOKENS, QUICK, EngineLimits, MeasurementPlan, Part, plan_measurement

SHADOW = EngineLimits(context_tokens=8_192, block_tokens=32, kv_tokens=16_384, shadow_tokens=65_536)
SPEED_MS = PROBE_TOKENS / 1_600 * 1_000


def limits(context_tokens: int = 8_192, **changes: int) -> EngineLimits:
    values = {"context_tokens": context_tokens, "block_tokens": 32, "kv_tokens": 2 * context_tokens}
    return EngineLimits(**values | changes)


def points(plan: MeasurementPlan, part: Part, *, held_out: bool = False) -> list[tuple[int, int, int]]:
    return [(spot.tokens, spot.context_tokens, spot.outstanding) for spot in plan.of(part) if spot.held_out is held_out]


def test_a_quick_profile_of_a_steady_engine_takes_at_most_twenty_seconds() -> None:
    for tokens_per_s in (400, 800, 1_600, 50_000):
        plan = plan_measurement(PROBE_TOKENS / tokens_per_s * 1_000, SHADOW, QUICK)
        assert plan.parts == tuple(Part)
        round_s = sum(spot.expected_s(plan.tokens_per_s) for spot in plan.spots)
        assert round_s * QUICK.rounds <= 20


def test_a_full_profile_reaches_the_context_window_of_a_fast_engine() -> None:
    plan = plan_measurement(5.0, SHADOW, FULL)
    assert 8_192 - 64 <= max(tokens for tokens, _, _ in points(plan, Part.PREFILL)) < 8_192
    assert max(context for _, context, _ in points(plan, Part.GRID)) > 7_000
    assert max(tokens for tokens, _, _ in points(plan, Part.RESTORE)) > 8_000


def test_held_out_spots_are_none_of_those_that_the_costs_are_built_from() -> None:
    for effort in (QUICK, FULL):
        for context_tokens in (512, 2_048, 131_072):
            plan = plan_measurement(100.0, limits(context_tokens, shadow_tokens=10**6), effort)
            for part in plan.parts:
                built, judging = points(plan, part), points(plan, part, held_out=True)
                assert judging
                assert len(set(built)) == len(built)
                assert not set(judging) & set(built)


def test_no_prompt_is_longer_than_the_window_or_than_hbm() -> None:
    for effort in (QUICK, FULL):
        for kv_tokens in (1_024, 8_192):
            plan = plan_measurement(5.0, limits(8_192, kv_tokens=kv_tokens, shadow_tokens=10**6), effort)
            assert all(spot.tokens + spot.context_tokens < min(8_192, kv_tokens) for spot in plan.spots)


def test_contexts_and_restores_are_whole_blocks() -> None:
    plan = plan_measurement(SPEED_MS, SHADOW, FULL)
    assert all(spot.context_tokens % 32 == 0 for spot in plan.of(Part.GRID))
    assert all(spot.tokens % 32 == 0 for spot in plan.of(Part.RESTORE))


def test_each_context_of_the_grid_has_at_least_two_numbers_of_new_tokens() -> None:
    plan = plan_measurement(SPEED_MS, SHADOW, FULL)
    contexts = [context for _, context, _ in points(plan, Part.GRID)]
    assert len(set(contexts)) >= 4
    assert all(contexts.count(context) >= 2 for context in contexts)


def test_without_a_shadow_no_restore_is_measured() -> None:
    assert plan_measurement(SPEED_MS, limits(), FULL).parts == (Part.PREFILL, Part.GRID)


def test_restores_side_by_side_fit_into_hbm_and_shadow() -> None:
    plan = plan_measurement(5.0, limits(8_192, kv_tokens=9_000, shadow_tokens=9_000), FULL)
    restores = plan.of(Part.RESTORE)
    assert restores
    assert all((spot.tokens + 32) * (spot.outstanding + 1) <= 9_000 * 0.9 for spot in restores)


def test_a_slow_engine_still_gets_sizes_that_differ() -> None:
    plan = plan_measurement(60_000.0, limits(), QUICK)
    assert len(points(plan, Part.PREFILL)) == len(QUICK.curve)


@pytest.mark.parametrize("probe_ms", [0.0, -1.0, float("inf"), float("nan")])
def test_an_impossible_probe_is_refused(probe_ms: float) -> None:
    with pytest.raises(MeasurementError, match="cannot be"):
        plan_measurement(probe_ms, limits(), QUICK)


def test_a_context_window_without_room_for_a_curve_is_refused_by_its_field() -> None:
    with pytest.raises(MeasurementError, match=r"spec\.model\.maxContextTokens"):
        plan_measurement(100.0, limits(80), QUICK)
