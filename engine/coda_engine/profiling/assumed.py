"""Profiles that nobody measured: straight lines, for tests and for benchmarks that need decisions, not true costs."""

from collections.abc import Sequence
from typing import Any

from coda_engine.contract.measured import (
    CostCurve,
    CurvePoint,
    GridRow,
    HeldOutPoint,
    PrefillGrid,
    RestoreCurve,
    RestoreProfile,
)
from coda_engine.contract.profile import FullKey, Profile, Provenance, SpecKey

ASSUMED = "assumed, not measured"
"""What such a profile says in place of the time at which it was measured."""

_ERROR_BOUND = 0.25


def assumed_key(spec: SpecKey | None = None, **changes: Any) -> FullKey:
    """Return a full key of no real engine; ``changes`` replace its fields."""
    fields: dict[str, Any] = {
        "spec": spec or SpecKey(model="m"),
        "model_digest": "d",
        "hardware": "a CPU, 1 threads",
        "vllm_version": "0.32.0",
        "adapter_digest": "a",
        "block_size": 32,
        "kv_block_bytes": 737_280,
        "attention_backend": "CPU_ATTN",
        "graph_mode": "NONE",
        "max_batched_tokens": 512,
        "max_context_tokens": 8_192,
        "driver": "kernel 6",
        "runtime": "torch 2",
    }
    return FullKey(**{**fields, **changes})


def assumed_profile(
    key: FullKey,
    ms_per_token: float = 1.0,
    *,
    ms_per_context_token: float | None = None,
    restore_ms_per_mb: float | None = None,
    new_tokens: Sequence[int] = (64, 512, 4_096),
) -> Profile:
    """Return a profile of ``key`` whose every cost is a straight line.

    Args:
        key: The engine's own.
        ms_per_token: Prefill time of a new token.
        ms_per_context_token: Prefill time that a token of context adds to any number of new ones; None = no grid.
        restore_ms_per_mb: Restore time of 1,000,000 bytes; None = no restore curve.
        new_tokens: At least two sizes that the lines are drawn through, growing.
    """
    prefill = CostCurve(
        points=_points(new_tokens, ms_per_token),
        held_out=[_held_out(max(1, new_tokens[-1] // 2), ms_per_token)],
        error_bound=_ERROR_BOUND,
    )
    grid = restore = None
    if ms_per_context_token is not None:
        grid = _grid(new_tokens, key.max_context_tokens, ms_per_token, ms_per_context_token)
    if restore_ms_per_mb is not None:
        restore = RestoreProfile(
            curves=[RestoreCurve(outstanding=0, points=_points((1_000_000, 100_000_000), restore_ms_per_mb / 1e6))],
            held_out=[_held_out(50_000_000, restore_ms_per_mb / 1e6)],
            error_bound=_ERROR_BOUND,
        )
    return Profile(
        full_key=key,
        prefill=prefill,
        prefill_grid=grid,
        restore=restore,
        provenance=Provenance(measured_at=ASSUMED, duration_s=0.0, coda_version="", quick=True),
    )


def _points(xs: Sequence[int], ms_per_unit: float, offset_ms: float = 0.0) -> list[CurvePoint]:
    return [CurvePoint(x=x, ms=offset_ms + x * ms_per_unit) for x in xs]


def _held_out(x: int, ms_per_unit: float, offset_ms: float = 0.0, context_tokens: int = 0) -> HeldOutPoint:
    ms = offset_ms + x * ms_per_unit
    return HeldOutPoint(x=x, context_tokens=context_tokens, measured_ms=ms, predicted_ms=ms)


def _grid(
    new_tokens: Sequence[int], context_tokens: int, ms_per_token: float, ms_per_context_token: float
) -> PrefillGrid:
    between = context_tokens // 4
    return PrefillGrid(
        rows=[
            GridRow(context_tokens=context, points=_points(new_tokens, ms_per_token, context * ms_per_context_token))
            for context in (context_tokens // 2, context_tokens)
        ],
        held_out=[_held_out(new_tokens[0], ms_per_token, between * ms_per_context_token, between)],
        error_bound=_ERROR_BOUND,
    )
