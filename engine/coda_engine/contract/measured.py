"""Measured costs as a profile carries them: points, and the held-out points that judge them (paper Appendix A)."""

from itertools import pairwise
from typing import Annotated

from pydantic import AfterValidator, Field, field_validator

from coda_engine.contract.models import WireModel

MAX_X = 2**50
"""Largest tokens or bytes of a point."""

MAX_POINTS = 64
"""Most points of one curve."""

MAX_CURVES = 16
"""Most contexts of a grid, and most depths of outstanding restores."""

MIN_MEASURED_MS = 0.001
"""Shortest time that a held-out point may have taken: errors are relative to it."""


class CurvePoint(WireModel):
    """One measured point of a cost curve: ``x`` in the curve's unit (tokens or bytes), median and spread in ms."""

    x: int = Field(ge=1, le=MAX_X)
    ms: float = Field(ge=0, allow_inf_nan=False)
    spread_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    repetitions: int = Field(default=1, ge=1)


def require_sorted(points: list[CurvePoint]) -> list[CurvePoint]:
    """Return ``points``.

    Raises:
        ValueError: Their x do not grow.
    """
    if any(left.x >= right.x for left, right in pairwise(points)):
        raise ValueError("points must have growing x")
    return points


def require_growing(points: list[CurvePoint]) -> list[CurvePoint]:
    """Return ``points``.

    Raises:
        ValueError: Fewer than two, their x do not grow, or the last one costs no more than the first.
    """
    if len(require_sorted(points)) < 2:
        raise ValueError("at least two points are needed")
    if points[-1].ms <= points[0].ms:
        raise ValueError("the cost does not grow: the measurement was disturbed, measure again")
    return points


SortedPoints = Annotated[list[CurvePoint], AfterValidator(require_sorted)]
"""Points with growing x."""

GrowingPoints = Annotated[list[CurvePoint], AfterValidator(require_growing)]
"""Points with growing x of which the last costs more than the first."""


class HeldOutPoint(WireModel):
    """A point that the curve was not built from: measured against predicted, milliseconds.

    Attributes:
        x: Tokens or bytes.
        context_tokens: Of a prefill grid: tokens that the new ones attended to.
        outstanding: Of a restore: restores of the same size that were under way.
        measured_ms: What it took.
        predicted_ms: What the engine's cost model says from the other points.
    """

    x: int = Field(ge=1, le=MAX_X)
    context_tokens: int = Field(default=0, ge=0, le=MAX_X)
    outstanding: int = Field(default=0, ge=0, le=MAX_X)
    measured_ms: float = Field(ge=MIN_MEASURED_MS, allow_inf_nan=False)
    predicted_ms: float = Field(ge=0, allow_inf_nan=False)

    @property
    def error_ms(self) -> float:
        """|predicted - measured|."""
        return abs(self.predicted_ms - self.measured_ms)

    @property
    def relative_error(self) -> float:
        """|predicted - measured| / measured."""
        return self.error_ms / self.measured_ms


class CheckedCosts(WireModel):
    """What every kind of measured cost has: its held-out check.

    Attributes:
        held_out: The points that only judge.
        error_bound: Largest accepted relative error of one of them.
        resolution_ms: Errors up to this are the measurement's own noise and accepted, milliseconds.
    """

    held_out: list[HeldOutPoint] = Field(min_length=1, max_length=MAX_POINTS)
    error_bound: float = Field(ge=0, allow_inf_nan=False)
    resolution_ms: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    def misses(self) -> list[HeldOutPoint]:
        """Return the held-out points that are predicted worse than the bound allows."""
        return [
            point
            for point in self.held_out
            if point.relative_error > self.error_bound and point.error_ms > self.resolution_ms
        ]

    @property
    def worst_error(self) -> float:
        """Largest relative error of the held-out points, of those that are off by more than the noise."""
        return max((point.relative_error for point in self.held_out if point.error_ms > self.resolution_ms), default=0)


class CostCurve(CheckedCosts):
    """Time against tokens without reusable KV (prefill), or against bytes (loading)."""

    points: GrowingPoints = Field(min_length=2, max_length=MAX_POINTS)


class GridRow(WireModel):
    """Prefill time against new tokens, all of them after the same number of context tokens in HBM."""

    context_tokens: int = Field(ge=1, le=MAX_X)
    points: SortedPoints = Field(min_length=2, max_length=MAX_POINTS)


class PrefillGrid(CheckedCosts):
    """Prefill time by new tokens and context tokens; the row of context 0 is the profile's prefill curve."""

    rows: list[GridRow] = Field(min_length=1, max_length=MAX_CURVES)

    @field_validator("rows")
    @classmethod
    def _sorted(cls, rows: list[GridRow]) -> list[GridRow]:
        if any(left.context_tokens >= right.context_tokens for left, right in pairwise(rows)):
            raise ValueError("rows must have growing context_tokens")
        return rows


class RestoreCurve(WireModel):
    """Restore time against bytes, beside ``outstanding`` others of the same size that were asked for just before."""

    outstanding: int = Field(ge=0, le=1_000)
    points: SortedPoints = Field(min_length=1, max_length=MAX_POINTS)


class RestoreProfile(CheckedCosts):
    """CPU-to-HBM restore time by bytes and outstanding restores: first token less that of the same prompt's HBM hit."""

    curves: list[RestoreCurve] = Field(min_length=1, max_length=MAX_CURVES)

    @field_validator("curves")
    @classmethod
    def _begins_alone(cls, curves: list[RestoreCurve]) -> list[RestoreCurve]:
        if curves[0].outstanding != 0 or any(a.outstanding >= b.outstanding for a, b in pairwise(curves)):
            raise ValueError("curves must begin with outstanding 0 and have growing outstanding")
        require_growing(curves[0].points)
        return curves
