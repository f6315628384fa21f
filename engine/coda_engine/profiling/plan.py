"""Which prompt sizes are measured, how often, and how well the curve must predict: from a first probe, purely."""

from dataclasses import dataclass

from coda_engine.profiling.errors import MeasurementError

PROBE_TOKENS = 256
SMALLEST_TOKENS = 32

_SIZE_STEP_TOKENS = 16
_RESERVED_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Effort:
    """How much one kind of profile costs and promises.

    Attributes:
        curve_shares: Sizes that the curve is built from, as shares of the largest.
        held_out_shares: Sizes between them that only judge it.
        rounds: Repetitions of every size.
        extra_rounds: Further repetitions when the held-out points are off: noise averages out, a wrong curve does not.
        largest_s: The largest prompt is about as long as the engine prefills in this time, seconds.
        error_bound: Largest accepted relative error of a held-out point.
    """

    curve_shares: tuple[float, ...]
    held_out_shares: tuple[float, ...]
    rounds: int
    extra_rounds: int
    largest_s: float
    error_bound: float


QUICK = Effort(
    curve_shares=(1 / 16, 1 / 4, 1 / 2, 1),
    held_out_shares=(3 / 8, 3 / 4),
    rounds=3,
    extra_rounds=6,
    largest_s=1.3,
    error_bound=0.25,
)
"""About 12 s on any engine that prefills steadily: each round costs three times the largest prompt."""

FULL = Effort(
    curve_shares=(1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1),
    held_out_shares=(3 / 32, 3 / 16, 5 / 8, 7 / 8),
    rounds=5,
    extra_rounds=5,
    largest_s=20.0,
    error_bound=0.15,
)
"""Up to the context window; some minutes on a CPU."""


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """What is measured.

    Attributes:
        curve_tokens: Prompt sizes that the curve is built from, growing.
        held_out_tokens: Prompt sizes that judge it, growing; none is in ``curve_tokens``.
        effort: Repetitions and bound.
    """

    curve_tokens: tuple[int, ...]
    held_out_tokens: tuple[int, ...]
    effort: Effort

    @property
    def round_tokens(self) -> int:
        """Tokens that one round prefills."""
        return sum(self.curve_tokens) + sum(self.held_out_tokens)


def plan_measurement(probe_ms: float, max_context_tokens: int, effort: Effort) -> MeasurementPlan:
    """Return the sizes to measure on an engine.

    Args:
        probe_ms: Time of a warm prefill of :data:`PROBE_TOKENS`, milliseconds.
        max_context_tokens: The engine's context window, tokens.
        effort: Quick or full.

    Raises:
        MeasurementError: The probe took no time, or the context window is too small for different sizes.
    """
    if not 0 < probe_ms < float("inf"):
        raise MeasurementError(f"a prefill of {PROBE_TOKENS} tokens took {probe_ms} ms, which cannot be")
    tokens_per_s = PROBE_TOKENS / probe_ms * 1_000
    largest = min(max_context_tokens - _RESERVED_TOKENS, int(tokens_per_s * effort.largest_s))
    largest = max(largest, min(SMALLEST_TOKENS * 12, max_context_tokens - _RESERVED_TOKENS))
    curve = sorted({_rounded(largest * share) for share in effort.curve_shares})
    held_out = sorted({_rounded(largest * share) for share in effort.held_out_shares} - set(curve))
    held_out = [tokens for tokens in held_out if curve[0] < tokens < curve[-1]]
    if len(curve) < 3 or not held_out:
        raise MeasurementError(
            f"a context window of {max_context_tokens} tokens is too small to measure a curve; at least "
            f"{SMALLEST_TOKENS * 6} are needed (spec.model.maxContextTokens)"
        )
    return MeasurementPlan(tuple(curve), tuple(held_out), effort)


def _rounded(tokens: float) -> int:
    return max(SMALLEST_TOKENS, round(tokens / _SIZE_STEP_TOKENS) * _SIZE_STEP_TOKENS)
