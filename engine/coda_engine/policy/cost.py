"""The computational cost of state preparation (paper eq. 1 and Appendix A)."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True, slots=True)
class PiecewiseLinear:
    """A measured cost curve: linear between points, through the origin below the first.

    Beyond the last point the last segment is continued only if its slope is positive (Appendix A);
    otherwise the last point's slope from the origin is used, so that more work never costs less.

    Attributes:
        xs: Tokens or bytes, growing, at least two.
        ms: Milliseconds at each x.
    """

    xs: tuple[float, ...]
    ms: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.xs) != len(self.ms) or len(self.xs) < 2:
            raise ValueError("a curve needs at least two points")
        if any(left >= right for left, right in pairwise(self.xs)) or self.xs[0] <= 0:
            raise ValueError("a curve's x must be positive and grow")

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> "PiecewiseLinear":
        """Return the curve through (x, ms) points with growing x."""
        return cls(tuple(x for x, _ in points), tuple(ms for _, ms in points))

    def at(self, x: float) -> float:
        """Return the cost of ``x`` tokens or bytes, milliseconds; 0 for x <= 0."""
        if x <= 0:
            return 0.0
        if x <= self.xs[0]:
            return self.ms[0] * x / self.xs[0]
        if x > self.xs[-1]:
            slope = (self.ms[-1] - self.ms[-2]) / (self.xs[-1] - self.xs[-2])
            if slope <= 0:
                slope = self.ms[-1] / self.xs[-1]
            return self.ms[-1] + slope * (x - self.xs[-1])
        right = bisect_left(self.xs, x)
        left = right - 1
        share = (x - self.xs[left]) / (self.xs[right] - self.xs[left])
        return self.ms[left] + share * (self.ms[right] - self.ms[left])


@dataclass(frozen=True, slots=True)
class StateWork:
    """What must be done before a request's KV state is in HBM.

    Attributes:
        prefill_tokens: Tokens without reusable KV: missing prefix plus incremental suffix.
        restore_bytes: KV to copy from the CPU shadow.
        load_bytes: KV to load from SSD.
        outstanding_restore_ms: Time until the transfer domain has finished what it already has to do.
    """

    prefill_tokens: int
    restore_bytes: int = 0
    load_bytes: int = 0
    outstanding_restore_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class StateCostModel:
    """C_state = T_restore + T_load + T_prefill (eq. 1), from profiled curves.

    Attributes:
        prefill: Tokens to milliseconds.
        restore: CPU-to-HBM bytes to milliseconds; None while there is no shadow (the term is 0).
        load: SSD-to-HBM bytes to milliseconds; None without an SSD tier (the term is 0).
    """

    prefill: PiecewiseLinear
    restore: PiecewiseLinear | None = None
    load: PiecewiseLinear | None = None

    def cost_ms(self, work: StateWork) -> float:
        """Return the cost of ``work``, milliseconds."""
        cost = self.prefill.at(work.prefill_tokens)
        if self.restore is not None and work.restore_bytes > 0:
            cost += work.outstanding_restore_ms + self.restore.at(work.restore_bytes)
        if self.load is not None:
            cost += self.load.at(work.load_bytes)
        return cost
