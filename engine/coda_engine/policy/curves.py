"""Measured cost functions: linear between measured points, never cheaper for more work."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


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
    def growing(cls, points: Iterable[tuple[float, float]]) -> "PiecewiseLinear":
        """Return the curve through (x, ms) points in any order, raised where noise would let it fall.

        Of points with the same x the mean counts.
        """
        by_x: dict[float, list[float]] = {}
        for x, ms in points:
            by_x.setdefault(x, []).append(ms)
        xs = sorted(by_x)
        return cls(tuple(xs), tuple(accumulate((sum(by_x[x]) / len(by_x[x]) for x in xs), max)))

    @property
    def end_slope(self) -> float:
        """Milliseconds for each token or byte beyond the last point; never negative."""
        slope = (self.ms[-1] - self.ms[-2]) / (self.xs[-1] - self.xs[-2])
        return slope if slope > 0 else self.ms[-1] / self.xs[-1]

    def at(self, x: float) -> float:
        """Return the cost of ``x`` tokens or bytes, milliseconds; 0 for x <= 0."""
        if x <= 0:
            return 0.0
        if x <= self.xs[0]:
            return self.ms[0] * x / self.xs[0]
        if x > self.xs[-1]:
            return self.ms[-1] + self.end_slope * (x - self.xs[-1])
        right = bisect_left(self.xs, x)
        left = right - 1
        share = (x - self.xs[left]) / (self.xs[right] - self.xs[left])
        return self.ms[left] + share * (self.ms[right] - self.ms[left])


@dataclass(frozen=True, slots=True)
class PrefillSurface:
    """Prefill time by new tokens and by the tokens of context that they attend to, bilinear between points.

    One curve cannot serve 900 new tokens on a context of 70,000 and 70,000 new tokens on none. Below the
    smallest measured number of new tokens its cost holds, since a step has a least duration; beyond the
    largest of either axis the last segment is continued. More work never costs less anywhere.

    Attributes:
        contexts: Context tokens of the rows, growing, from 0, at least two.
        new_tokens: New tokens of the columns, growing, positive, at least two.
        ms: Milliseconds, a row for each context; growing along both axes.
        beyond_new: Milliseconds for each new token beyond the last column, by row.
        beyond_context: Milliseconds for each context token beyond the last row, by column.
    """

    contexts: tuple[float, ...]
    new_tokens: tuple[float, ...]
    ms: tuple[tuple[float, ...], ...]
    beyond_new: tuple[float, ...]
    beyond_context: tuple[float, ...]

    @classmethod
    def through(cls, curves: Mapping[int, PiecewiseLinear]) -> "PrefillSurface":
        """Return the surface through one curve over new tokens for each context, raised where noise would let it fall.

        The curves need not have the same points: where one ends (a long context leaves room for few new
        tokens), its last segment is continued.

        Args:
            curves: Context tokens to the curve of prefill time over new tokens; one of them for context 0.

        Raises:
            ValueError: Fewer than two contexts, or none of 0.
        """
        contexts = sorted(curves)
        if len(contexts) < 2 or contexts[0] != 0:
            raise ValueError("a surface needs the curve of context 0 and at least another one")
        columns = sorted({x for curve in curves.values() for x in curve.xs})
        rows: list[tuple[float, ...]] = []
        for context in contexts:
            row = tuple(accumulate((curves[context].at(x) for x in columns), max))
            rows.append(tuple(map(max, row, rows[-1])) if rows else row)
        above, last = rows[-2:]
        height = contexts[-1] - contexts[-2]
        return cls(
            contexts=tuple(float(context) for context in contexts),
            new_tokens=tuple(columns),
            ms=tuple(rows),
            beyond_new=tuple(accumulate((curves[context].end_slope for context in contexts), max)),
            beyond_context=tuple(
                accumulate(((lower - upper) / height for upper, lower in zip(above, last, strict=True)), max)
            ),
        )

    def at(self, new_tokens: float, context_tokens: float) -> float:
        """Return the cost of ``new_tokens`` on ``context_tokens``, milliseconds; 0 for no new tokens."""
        if new_tokens <= 0:
            return 0.0
        row, down = _cell(self.contexts, context_tokens)
        column, across = _cell(self.new_tokens, new_tokens)
        upper, lower = self.ms[row], self.ms[row + 1]
        left = upper[column] + down * (lower[column] - upper[column])
        right = upper[column + 1] + down * (lower[column + 1] - upper[column + 1])
        cost = left + across * (right - left)
        if context_tokens > self.contexts[-1]:
            slope = self.beyond_context[column]
            slope += across * (self.beyond_context[column + 1] - slope)
            cost += slope * (context_tokens - self.contexts[-1])
        if new_tokens > self.new_tokens[-1]:
            slope = self.beyond_new[row]
            slope += down * (self.beyond_new[row + 1] - slope)
            cost += slope * (new_tokens - self.new_tokens[-1])
        return cost


def _cell(edges: Sequence[float], x: float) -> tuple[int, float]:
    """Return the segment of ``edges`` that holds ``x`` and how far into it; outside, the nearest end."""
    if x <= edges[0]:
        return 0, 0.0
    if x >= edges[-1]:
        return len(edges) - 2, 1.0
    left = bisect_left(edges, x) - 1
    return left, (x - edges[left]) / (edges[left + 1] - edges[left])
