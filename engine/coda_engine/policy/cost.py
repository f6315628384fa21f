"""The computational cost of state preparation (paper eq. 1 and Appendix A)."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_engine.contract.measured import CostCurve, CurvePoint, GridRow, RestoreCurve
from coda_engine.contract.profile import Profile
from coda_engine.policy.curves import PiecewiseLinear, PrefillSurface


@dataclass(frozen=True, slots=True)
class StateWork:
    """What must be done before a request's KV state is in HBM.

    Attributes:
        prefill_tokens: Tokens without reusable KV: missing prefix plus incremental suffix.
        context_tokens: Tokens before them whose KV is or will be in HBM (hit, restored or loaded): what the
            new ones attend to.
        restore_bytes: KV to copy from the CPU shadow, over all ranks.
        load_bytes: KV to load from SSD.
        outstanding_restore_bytes: KV that the transfer domain still has to copy for others.
    """

    prefill_tokens: int
    context_tokens: int = 0
    restore_bytes: int = 0
    load_bytes: int = 0
    outstanding_restore_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RestoreCost:
    """T_restore: the bytes' own time plus the outstanding completions of their transfer domain (Appendix A).

    Attributes:
        alone: CPU-to-HBM bytes to milliseconds on an idle transfer domain.
        outstanding: Bytes that the domain still has to copy to the milliseconds that a restore waits for them;
            None = not measured: they take what they would take alone.
    """

    alone: PiecewiseLinear
    outstanding: PiecewiseLinear | None = None

    def at(self, restore_bytes: int, outstanding_bytes: int) -> float:
        """Return the time until ``restore_bytes`` are restored behind ``outstanding_bytes``, milliseconds."""
        if restore_bytes <= 0:
            return 0.0
        return self.alone.at(restore_bytes) + self.queueing_ms(outstanding_bytes)

    def queueing_ms(self, outstanding_bytes: int) -> float:
        """Return how long a restore waits behind ``outstanding_bytes``, milliseconds."""
        return (self.outstanding or self.alone).at(outstanding_bytes)


@dataclass(frozen=True, slots=True)
class StateCostModel:
    """C_state = T_restore + T_load + T_prefill (eq. 1), from profiled curves.

    Attributes:
        prefill: New tokens to milliseconds, on no context (the paper's curve).
        surface: New tokens and context tokens to milliseconds; None = the curve serves every context.
        restore: Restores; None without a shadow (the term is 0).
        load: SSD-to-HBM bytes to milliseconds; None without an SSD tier (the term is 0).
    """

    prefill: PiecewiseLinear
    surface: PrefillSurface | None = None
    restore: RestoreCost | None = None
    load: PiecewiseLinear | None = None

    def cost_ms(self, work: StateWork) -> float:
        """Return the cost of ``work``, milliseconds; never less for more work."""
        if self.surface is None:
            cost = self.prefill.at(work.prefill_tokens)
        else:
            cost = self.surface.at(work.prefill_tokens, work.context_tokens)
        if self.restore is not None:
            cost += self.restore.at(work.restore_bytes, work.outstanding_restore_bytes)
        if self.load is not None:
            cost += self.load.at(work.load_bytes)
        return cost


def cost_model(profile: Profile, *, by_context: bool = True) -> StateCostModel:
    """Return eq. 1's terms as they were measured; those of tiers that were not measured are 0.

    Args:
        profile: The artifact in force.
        by_context: Use the prefill grid where there is one. False = the paper's single curve, whatever the context.
    """
    grid = profile.prefill_grid if by_context else None
    return StateCostModel(
        prefill=_curve(profile.prefill.points),
        surface=prefill_surface(profile.prefill, grid.rows) if grid is not None else None,
        restore=restore_cost(profile.restore.curves) if profile.restore is not None else None,
        load=_curve(profile.load.points) if profile.load is not None else None,
    )


def prefill_surface(prefill: CostCurve, rows: Sequence[GridRow]) -> PrefillSurface:
    """Return the surface through a grid's rows and, for context 0, the prefill curve."""
    return PrefillSurface.through(
        {0: _curve(prefill.points)} | {row.context_tokens: _curve(row.points) for row in rows}
    )


def restore_cost(curves: Sequence[RestoreCurve]) -> RestoreCost:
    """Return restore times from the curves by outstanding depth, that of depth 0 first.

    Beside d others of its size a restore took longer than alone by the time that their bytes need, which is
    taken to depend on their bytes only: held-out points at other depths judge that.
    """
    alone = _curve(curves[0].points)
    waits = [
        (float(point.x * curve.outstanding), max(0.0, point.ms - alone.at(point.x)))
        for curve in curves[1:]
        for point in curve.points
    ]
    several = len({behind_bytes for behind_bytes, _ in waits}) > 1
    return RestoreCost(alone, PiecewiseLinear.growing(waits) if several else None)


def _curve(points: Sequence[CurvePoint]) -> PiecewiseLinear:
    return PiecewiseLinear.growing((float(point.x), point.ms) for point in points)
