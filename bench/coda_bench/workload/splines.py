"""A distribution given by some of its quantiles."""

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Self

_NORMAL = NormalDist()


def normal_score(share: float) -> float:
    """Return the standard normal quantile of ``share``, which is in (0, 1)."""
    return _NORMAL.inv_cdf(share)


@dataclass(frozen=True, slots=True)
class QuantileSpline:
    """A positive quantity's quantile function: ln(value) over the normal score, monotone between the given points.

    Piecewise cubic Hermite interpolation (Fritsch-Carlson slopes) keeps the order of the given quantiles; beyond the
    outermost ones the curve goes on straight with its last slope.

    Attributes:
        scores: Normal scores of the given quantiles, growing.
        logs: Natural logarithms of their values.
        slopes: d log / d score at each of them.
        cap: Largest value.
    """

    scores: tuple[float, ...]
    logs: tuple[float, ...]
    slopes: tuple[float, ...]
    cap: float

    @classmethod
    def through(cls, quantiles: Mapping[float, float], cap: float = math.inf) -> Self:
        """Return the spline through ``quantiles`` (share in (0, 1) to value > 0, both growing).

        Raises:
            ValueError: Fewer than three quantiles, or not growing.
        """
        shares = list(quantiles)
        values = [quantiles[share] for share in shares]
        if len(shares) < 3 or any(left >= right for left, right in (*pairwise(shares), *pairwise(values))):
            raise ValueError("a quantile spline needs at least three growing quantiles")
        scores = tuple(normal_score(share) for share in shares)
        logs = tuple(math.log(value) for value in values)
        return cls(scores, logs, _monotone_slopes(scores, logs), cap)

    def at_share(self, share: float) -> float:
        """Return the quantile of ``share``, in (0, 1)."""
        return self.at_score(normal_score(share))

    def at_score(self, score: float) -> float:
        """Return the quantile of a normal score."""
        return min(self.cap, math.exp(self._log_at(score)))

    def _log_at(self, score: float) -> float:
        scores, logs, slopes = self.scores, self.logs, self.slopes
        if score <= scores[0]:
            return logs[0] + slopes[0] * (score - scores[0])
        if score >= scores[-1]:
            return logs[-1] + slopes[-1] * (score - scores[-1])
        left = bisect_right(scores, score) - 1
        width = scores[left + 1] - scores[left]
        t = (score - scores[left]) / width
        return (
            (1 + 2 * t) * (1 - t) ** 2 * logs[left]
            + t * (1 - t) ** 2 * width * slopes[left]
            + t**2 * (3 - 2 * t) * logs[left + 1]
            + t**2 * (t - 1) * width * slopes[left + 1]
        )


def _monotone_slopes(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, ...]:
    widths = [right - left for left, right in pairwise(xs)]
    secants = [(right - left) / width for (left, right), width in zip(pairwise(ys), widths, strict=True)]
    inner = [
        (3 * (before + after)) / ((2 * after + before) / secant + (after + 2 * before) / next_secant)
        for (before, after), (secant, next_secant) in zip(pairwise(widths), pairwise(secants), strict=True)
    ]
    first = _end_slope(widths[0], widths[1], secants[0], secants[1])
    last = _end_slope(widths[-1], widths[-2], secants[-1], secants[-2])
    return (first, *inner, last)


def _end_slope(width: float, next_width: float, secant: float, next_secant: float) -> float:
    """Return the three-point slope at an end, kept within [0, 3 secants] so that the curve stays monotone."""
    slope = ((2 * width + next_width) * secant - width * next_secant) / (width + next_width)
    return min(max(slope, 0.0), 3 * secant)
