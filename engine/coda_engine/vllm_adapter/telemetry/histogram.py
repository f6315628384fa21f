"""A histogram that costs a bisection to feed and nothing until somebody looks."""

from bisect import bisect_left
from collections.abc import Sequence
from typing import TypedDict


class HistogramState(TypedDict):
    """``counts``: observations by bucket, the last beyond all bounds. ``total``: their sum."""

    counts: list[int]
    total: float


class Histogram:
    """Counts observations by bucket.

    Args:
        bounds: Inclusive upper bounds, ascending; one more bucket takes the rest.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        """Count ``value``."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def state(self) -> HistogramState:
        """Return a copy of what was counted."""
        return HistogramState(counts=list(self._counts), total=self._total)
