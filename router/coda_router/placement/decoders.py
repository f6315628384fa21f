"""The contexts that a worker decodes, prepared so that eq. 8 is cheap to ask for."""

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from math import log2


def log2_tokens(tokens: int) -> float:
    """Return log2 of a number of tokens; nothing counts as one token."""
    return log2(max(tokens, 1))


class DecodeContexts:
    """The contexts of a worker's decoding requests (eq. 8's C_w); never changed.

    Made once for each snapshot: sorted logarithms and their running sums give the distance to any arriving
    context by one look-up, however many requests decode.

    Args:
        tokens: Context of each decoding request, tokens.

    Attributes:
        tokens: The same.
        mean_log2: Mean log2 of the contexts; 0 without any.
        bounds: ``(mean_log2, weight, least)``: no arriving context, as log2, is nearer than ``least`` nor than
            ``weight * abs(mean_log2 - arriving)``. The weight is 1, or 0 without any decoder.
    """

    __slots__ = ("_log2s", "_sums", "bounds", "mean_log2", "tokens")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = tuple(tokens)
        self._log2s = sorted(map(log2_tokens, self.tokens))
        self._sums = (0.0, *accumulate(self._log2s))
        if not self.tokens:
            self.mean_log2, self.bounds = 0.0, (0.0, 0, 0.0)
            return
        self.mean_log2 = self._sums[-1] / len(self.tokens)
        # The mean absolute difference to a point is smallest at the median.
        self.bounds = self.mean_log2, 1, self.distance_to(self._log2s[len(self._log2s) // 2])

    def distance_to(self, arriving_log2: float) -> float:
        """Return the mean absolute log2 ratio of these contexts to an arriving one, dimensionless (eq. 8).

        An empty population has distance 0: a worker that decodes nothing mixes no contexts.
        """
        count = len(self._log2s)
        if not count:
            return 0.0
        shorter = bisect_right(self._log2s, arriving_log2)
        sums = self._sums
        return (arriving_log2 * (2 * shorter - count) + sums[count] - 2 * sums[shorter]) / count

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DecodeContexts) and self.tokens == other.tokens

    def __hash__(self) -> int:
        return hash(self.tokens)

    def __repr__(self) -> str:
        return f"DecodeContexts({self.tokens!r})"


NO_DECODERS = DecodeContexts()
"""A worker that decodes nothing, or of which nobody knows."""
