"""How long a session stays away after a turn, by the tool that it called (survival curves).

The fixed prior is **modelled from public statistics**: TraceLab's distribution of tool times (quantiles 10, 25,
50, 75, 90, 95, 99 and 99.9%: 0.02, 0.06, 0.209, 1.5, 8.9, 30, 180 and 1,800 s; 3.97% beyond 60 s), its medians by
tool (shell 409 ms, edit 95 ms, read 36 ms) and mix (execute 76%, write 11%, read 9%); the human wait's quantiles 50,
90 and 99% (86, 1,236 and 50,000 s). How shell commands divide into classes is our assumption; the mixture of all
classes reproduces the published quantiles (tested). The paper's mode uses the prior as it is: nothing is fitted
online. Curves learnt from a running engine's own gaps are an extension (:class:`GapCounts`).
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log
from types import MappingProxyType

from coda_engine.policy.tool_use import ToolKind

TAIL_EXPONENT = 1.5
"""Beyond its last point a curve falls like t^-1.5: an expected rest of twice the time elapsed, always finite."""


@dataclass(frozen=True, slots=True)
class SurvivalCurve:
    """S(t): the share of gaps that last longer than t. A power law between points, linear before the first.

    Attributes:
        times_s: Points in time, growing, seconds > 0.
        survival: S at each, falling, in (0, 1).
        beyond_s: The integral of S from each point to infinity, seconds.
    """

    times_s: tuple[float, ...]
    survival: tuple[float, ...]
    beyond_s: tuple[float, ...]

    @classmethod
    def through(cls, points: Sequence[tuple[float, float]]) -> "SurvivalCurve":
        """Return the curve through (seconds, survival) points.

        Raises:
            ValueError: Fewer than two points, or they do not go forward in time and down within (0, 1).
        """
        if len(points) < 2 or points[0][0] <= 0 or not 0 < points[-1][1] < points[0][1] < 1:
            raise ValueError("a survival curve needs at least two points with time > 0 and survival within (0, 1)")
        if any(left[0] >= right[0] or left[1] <= right[1] for left, right in pairwise(points)):
            raise ValueError("a survival curve's points must go forward in time and down")
        beyond = [points[-1][0] * points[-1][1] / (TAIL_EXPONENT - 1)]
        for left, right in reversed(list(pairwise(points))):
            beyond.append(beyond[-1] + _power_law_area(left, _exponent(left, right), left[0], right[0]))
        times, survival = zip(*points, strict=True)
        return cls(times, survival, tuple(reversed(beyond)))

    def at(self, elapsed_s: float) -> float:
        """Return the share of gaps that last longer than ``elapsed_s``; 1 for 0."""
        times, survival = self.times_s, self.survival
        if elapsed_s <= times[0]:
            return 1.0 - (1.0 - survival[0]) * max(elapsed_s, 0.0) / times[0]
        left = bisect_left(times, elapsed_s) - 1
        return float(survival[left] * (elapsed_s / times[left]) ** -self._exponent_after(left))

    def mean_rest_s(self, elapsed_s: float) -> float:
        """Return how much longer a gap of ``elapsed_s`` lasts on average: the integral of S beyond it over S there."""
        times, survival = self.times_s, self.survival
        if elapsed_s <= times[0]:
            here = self.at(elapsed_s)
            return ((here + survival[0]) / 2 * (times[0] - max(elapsed_s, 0.0)) + self.beyond_s[0]) / here
        left = bisect_left(times, elapsed_s) - 1
        if left == len(times) - 1:
            return elapsed_s / (TAIL_EXPONENT - 1)
        point, exponent = (times[left], survival[left]), self._exponent_after(left)
        area = _power_law_area(point, exponent, elapsed_s, times[left + 1])
        return (area + self.beyond_s[left + 1]) / self.at(elapsed_s)

    def _exponent_after(self, left: int) -> float:
        if left == len(self.times_s) - 1:
            return TAIL_EXPONENT
        return _exponent((self.times_s[left], self.survival[left]), (self.times_s[left + 1], self.survival[left + 1]))


def _exponent(left: tuple[float, float], right: tuple[float, float]) -> float:
    return log(left[1] / right[1]) / log(right[0] / left[0])


def _power_law_area(point: tuple[float, float], exponent: float, start_s: float, end_s: float) -> float:
    """Return the integral of the power law through ``point`` between two times, seconds."""
    time_s, survival = point
    if abs(exponent - 1.0) < 1e-9:
        return survival * time_s * log(end_s / start_s)
    rise = (end_s / time_s) ** (1.0 - exponent) - (start_s / time_s) ** (1.0 - exponent)
    return float(survival * time_s * rise / (1.0 - exponent))


_LEVELS = (0.9, 0.5, 0.1, 0.01, 0.001)


def _prior(*times_s: float) -> SurvivalCurve:
    return SurvivalCurve.through(list(zip(times_s, _LEVELS, strict=True)))


TOOL_PRIOR: Mapping[ToolKind, SurvivalCurve] = MappingProxyType(
    {
        ToolKind.READ: _prior(0.012, 0.05, 0.5, 15, 180),
        ToolKind.EDIT: _prior(0.03, 0.095, 0.9, 25, 300),
        ToolKind.SEARCH: _prior(0.03, 0.16, 1.6, 22, 240),
        ToolKind.VCS: _prior(0.03, 0.16, 2.2, 35, 400),
        ToolKind.RUN: _prior(0.08, 0.65, 22, 240, 2_200),
        ToolKind.TEST: _prior(0.5, 4, 75, 420, 3_000),
        ToolKind.BUILD: _prior(0.5, 4, 80, 480, 3_400),
        ToolKind.INSTALL: _prior(0.8, 5.5, 70, 420, 2_500),
        ToolKind.NETWORK: _prior(0.15, 0.9, 20, 180, 1_500),
        ToolKind.AGENT: _prior(8, 55, 420, 2_400, 7_000),
        ToolKind.PLAN: _prior(0.005, 0.02, 0.2, 10, 120),
        ToolKind.ASK: _prior(4, 40, 900, 10_000, 60_000),
        ToolKind.OTHER: _prior(0.04, 0.25, 9, 180, 1_800),
    }
)
"""Gaps by kind of tool: the times that 90, 50, 10, 1 and 0.1% of them outlast."""

HUMAN_PRIOR = _prior(10, 86, 1_236, 50_000, 1_000_000)
"""Gaps after a final answer."""

GAP_BOUNDS_S = tuple(0.01 * 2.0**step for step in range(21))
"""Bounds of the bins of learnt gaps: 10 ms to about three hours, each twice the one before."""

_PRIOR_GAPS = 20.0
_MAX_GAPS = 512.0


@dataclass(frozen=True, slots=True)
class GapCounts:
    """Gaps seen on a running engine, in bins; old ones fade: from 512 on, all counts are halved.

    Attributes:
        counts: Gaps up to each of :data:`GAP_BOUNDS_S`, then those beyond the last.
    """

    counts: tuple[float, ...] = (0.0,) * (len(GAP_BOUNDS_S) + 1)

    def seen(self, gap_s: float) -> "GapCounts":
        """Return the counts with one more gap."""
        counts = list(self.counts)
        counts[bisect_left(GAP_BOUNDS_S, gap_s)] += 1.0
        if sum(counts) >= _MAX_GAPS:
            counts = [count / 2 for count in counts]
        return GapCounts(tuple(counts))

    def curve(self, prior: SurvivalCurve) -> SurvivalCurve:
        """Return the curve of these gaps and of 20 more that are distributed as the prior says."""
        longer, total, points = sum(self.counts), sum(self.counts) + _PRIOR_GAPS, []
        for bound_s, count in zip(GAP_BOUNDS_S, self.counts, strict=False):
            longer -= count
            points.append((bound_s, (max(longer, 0.0) + _PRIOR_GAPS * prior.at(bound_s)) / total))
        return SurvivalCurve.through(points)
