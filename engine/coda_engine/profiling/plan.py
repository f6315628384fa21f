"""What is measured, how often, and how well it must predict: from a first probe and the engine's limits, purely."""

from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product

from coda_engine.profiling.errors import MeasurementError

PROBE_TOKENS = 256
SMALLEST_TOKENS = 32

_SIZE_STEP_TOKENS = 16
_RESERVED_TOKENS = 16
_SAMPLE_OVERHEAD_S = 0.12
_KV_SHARE = 0.9
"""Share of HBM that restores side by side may fill."""


class Part(StrEnum):
    """A part of a profile, by its field's name, in the order of measurement."""

    PREFILL = "prefill"
    GRID = "prefill_grid"
    RESTORE = "restore"


@dataclass(frozen=True, slots=True)
class Spot:
    """One thing that is measured.

    Attributes:
        part: The part of the profile that it belongs to.
        tokens: New tokens to prefill; of a restore: tokens to restore.
        context_tokens: Tokens in HBM before the new ones (grid).
        outstanding: Restores of the same size that are asked for just before (restore).
        held_out: It only judges the others.
    """

    part: Part
    tokens: int
    context_tokens: int = 0
    outstanding: int = 0
    held_out: bool = False

    def expected_s(self, tokens_per_s: float) -> float:
        """Return about how long one sample takes on an engine of this prefill speed, seconds."""
        if self.part is Part.RESTORE:
            return (2 + self.outstanding) * _SAMPLE_OVERHEAD_S
        return self.tokens / tokens_per_s + _SAMPLE_OVERHEAD_S

    def __str__(self) -> str:
        if self.part is Part.RESTORE:
            beside = f" beside {self.outstanding} others" if self.outstanding else ""
            return f"restoring {self.tokens} tokens{beside}"
        context = f" on {self.context_tokens} tokens of context" if self.context_tokens else ""
        return f"{self.tokens} new tokens{context}"


@dataclass(frozen=True, slots=True)
class Effort:
    """How much one kind of profile costs and promises. Sizes are shares of the largest prompt.

    Attributes:
        curve: Sizes that the prefill curve is built from.
        curve_held_out: Sizes between them that only judge it.
        contexts: Contexts of the grid's rows.
        grid: New tokens in each row, as far as they fit after its context; 0 = the smallest size.
        grid_held_out: Context and new tokens that judge the grid.
        restores: Sizes restored alone.
        restores_beside: Sizes and numbers of others outstanding.
        restores_held_out: Sizes and numbers of others outstanding that judge the restore curves.
        rounds: Repetitions of every spot.
        extra_rounds: Further ones of a part whose held-out points are off: noise averages out, a wrong curve does not.
        largest_s: The largest prompt is about as long as the engine prefills in this time, seconds.
        error_bound: Largest accepted relative error of a held-out point.
        most_noise: Share of a part's largest time that its noise may be; beyond, its check would say nothing.
        optional_until_s: Costs by context and of restores that still miss their check after this time are left out of
            the profile, and admission counts without them, seconds; None = they may not be missing.
    """

    curve: tuple[float, ...]
    curve_held_out: tuple[float, ...]
    contexts: tuple[float, ...]
    grid: tuple[float, ...]
    grid_held_out: tuple[tuple[float, float], ...]
    restores: tuple[float, ...]
    restores_beside: tuple[tuple[float, int], ...]
    restores_held_out: tuple[tuple[float, int], ...]
    rounds: int
    extra_rounds: int
    largest_s: float
    error_bound: float
    most_noise: float
    optional_until_s: float | None


QUICK = Effort(
    curve=(0, 1 / 4, 1 / 2, 1),
    curve_held_out=(3 / 8, 3 / 4),
    contexts=(3 / 8, 3 / 4),
    grid=(0, 1 / 8),
    grid_held_out=((9 / 16, 1 / 16),),
    restores=(1 / 8, 1 / 2, 1),
    restores_beside=((1 / 2, 1), (1 / 2, 2)),
    restores_held_out=((3 / 4, 0),),
    rounds=3,
    extra_rounds=6,
    largest_s=0.9,
    error_bound=0.25,
    most_noise=1.0,
    optional_until_s=18.0,
)
"""About 20 s with a shadow, 15 s without one, on any engine that prefills steadily."""

THOROUGH = replace(QUICK, largest_s=6.0, optional_until_s=None)
"""The same points of larger prompts, so that even a slow engine's restores stand out; a minute or two."""

FULL = Effort(
    curve=(0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1),
    curve_held_out=(3 / 32, 3 / 16, 5 / 8, 7 / 8),
    contexts=(1 / 16, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 15 / 16),
    grid=(0, 1 / 64, 1 / 16, 1 / 8, 1 / 4),
    grid_held_out=((3 / 16, 3 / 32), (3 / 8, 1 / 32), (5 / 8, 3 / 16), (7 / 8, 3 / 64)),
    restores=(0, 1 / 64, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1),
    restores_beside=((1 / 16, 1), (1 / 4, 1), (1 / 16, 3), (1 / 4, 3)),
    restores_held_out=((3 / 32, 0), (3 / 8, 0), (3 / 4, 0), (1 / 8, 2)),
    rounds=5,
    extra_rounds=5,
    largest_s=20.0,
    error_bound=0.15,
    most_noise=0.5,
    optional_until_s=None,
)
"""Up to the context window; some minutes on a CPU."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine can be asked for.

    Attributes:
        context_tokens: Its context window.
        block_tokens: Tokens of a KV block: reuse ends at whole blocks.
        kv_tokens: Tokens whose KV fits into HBM.
        shadow_tokens: Tokens whose KV fits into the CPU shadow; 0 = there is none.
    """

    context_tokens: int
    block_tokens: int
    kv_tokens: int
    shadow_tokens: int = 0


@dataclass(frozen=True, slots=True)
class MeasurementPlan:
    """What is measured.

    Attributes:
        spots: Everything that one round measures, in order.
        tokens_per_s: Prefill speed of the probe.
        effort: Repetitions and bound.
    """

    spots: tuple[Spot, ...]
    tokens_per_s: float
    effort: Effort

    def of(self, part: Part) -> tuple[Spot, ...]:
        """Return a part's spots."""
        return tuple(spot for spot in self.spots if spot.part is part)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that are measured."""
        return tuple(part for part in Part if self.of(part))


def plan_measurement(probe_ms: float, limits: EngineLimits, effort: Effort) -> MeasurementPlan:
    """Return what to measure on an engine.

    Args:
        probe_ms: Time of a warm prefill of :data:`PROBE_TOKENS`, milliseconds.
        limits: What the engine can be asked for.
        effort: Quick or full.

    Raises:
        MeasurementError: The probe took no time, or the context window is too small for different sizes.
    """
    if not 0 < probe_ms < float("inf"):
        raise MeasurementError(f"a prefill of {PROBE_TOKENS} tokens took {probe_ms} ms, which cannot be")
    tokens_per_s = PROBE_TOKENS / probe_ms * 1_000
    room = min(limits.context_tokens, limits.kv_tokens) - _RESERVED_TOKENS
    largest = max(min(room, int(tokens_per_s * effort.largest_s)), min(SMALLEST_TOKENS * 12, room))
    spots = (*_curve(largest, effort), *_grid(largest, limits, effort), *_restores(largest, limits, effort))
    plan = MeasurementPlan(spots, tokens_per_s, effort)
    curve = plan.of(Part.PREFILL)
    if sum(not spot.held_out for spot in curve) < 3 or not any(spot.held_out for spot in curve):
        raise MeasurementError(
            f"a context window of {limits.context_tokens} tokens ({limits.kv_tokens} fit into HBM) is too small to "
            f"measure a curve; at least {SMALLEST_TOKENS * 6} are needed (spec.model.maxContextTokens, "
            "spec.engine.kvCacheSize)"
        )
    return plan


def _curve(largest: int, effort: Effort) -> list[Spot]:
    sizes = sorted({_new_tokens(largest, share) for share in effort.curve})
    held_out = {_new_tokens(largest, share) for share in effort.curve_held_out} - set(sizes)
    spots = [Spot(Part.PREFILL, tokens) for tokens in sizes]
    spots += [Spot(Part.PREFILL, tokens, held_out=True) for tokens in held_out if sizes[0] < tokens < sizes[-1]]
    return sorted(spots, key=lambda spot: spot.tokens)


def _grid(largest: int, limits: EngineLimits, effort: Effort) -> list[Spot]:
    """Return the grid's spots; none when the window is too small for two rows and a point between them."""
    wanted = [(context, new, False) for context, new in product(effort.contexts, effort.grid)]
    wanted += [(context, new, True) for context, new in effort.grid_held_out]
    spots: dict[tuple[int, int], Spot] = {}
    for context_share, new_share, held_out in wanted:
        context = _whole_blocks(largest, context_share, limits.block_tokens)
        tokens = _new_tokens(largest, new_share)
        if context + tokens <= largest:
            spots.setdefault((context, tokens), Spot(Part.GRID, tokens, context, held_out=held_out))
    rows: dict[int, int] = {}
    for spot in spots.values():
        rows[spot.context_tokens] = rows.get(spot.context_tokens, 0) + (not spot.held_out)
    kept = [spot for spot in spots.values() if spot.held_out or rows[spot.context_tokens] > 1]
    usable = any(spot.held_out for spot in kept) and any(not spot.held_out for spot in kept)
    return sorted(kept, key=lambda spot: (spot.context_tokens, spot.tokens)) if usable else []


def _restores(largest: int, limits: EngineLimits, effort: Effort) -> list[Spot]:
    """Return the restores' spots; none without a shadow that holds what one round publishes."""
    wanted = [(share, 0, False) for share in effort.restores]
    wanted += [(share, others, False) for share, others in effort.restores_beside]
    wanted += [(share, others, True) for share, others in effort.restores_held_out]
    spots: dict[tuple[int, int], Spot] = {}
    for share, others, held_out in wanted:
        tokens = _whole_blocks(largest, share, limits.block_tokens)
        needed = (tokens + limits.block_tokens) * (others + 1)
        if needed <= limits.kv_tokens * _KV_SHARE and needed <= limits.shadow_tokens:
            spots.setdefault((tokens, others), Spot(Part.RESTORE, tokens, outstanding=others, held_out=held_out))
    alone = [spot for spot in spots.values() if not spot.held_out and spot.outstanding == 0]
    usable = len(alone) > 1 and any(spot.held_out for spot in spots.values())
    return sorted(spots.values(), key=lambda spot: (spot.outstanding, spot.tokens)) if usable else []


def _new_tokens(largest: int, share: float) -> int:
    return max(SMALLEST_TOKENS, round(largest * share / _SIZE_STEP_TOKENS) * _SIZE_STEP_TOKENS)


def _whole_blocks(largest: int, share: float, block_tokens: int) -> int:
    return max(1, int(largest * share) // block_tokens) * block_tokens
