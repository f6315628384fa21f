"""How fast a worker prefills, from what it says is still to be prefilled."""

from collections import deque

SAMPLES = 64
"""Samples of which the rate is taken (SMetric, arXiv 2607.08565)."""

MIN_SAMPLES = 8
"""Samples from which a rate is told."""

_PERCENTILE = 0.9


class DrainRate:
    """The 90th percentile of the rates at which pending prefill tokens fell between two looks.

    What arrives between two looks makes a rate look slower than it was, so the fast ones tell more; above the
    percentile are those that looked fast because a waiting request was given up.
    """

    def __init__(self) -> None:
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        self._pending_tokens = 0
        self._looked_at_s = 0.0
        self._tokens_per_s: float | None = None
        self._new_samples = 0

    @property
    def tokens_per_s(self) -> float | None:
        """The rate, tokens a second; None = too little was seen yet."""
        return self._tokens_per_s

    def look(self, pending_tokens: int, at_s: float) -> None:
        """Take what is pending now.

        Args:
            pending_tokens: Prompt tokens that still have to be computed.
            at_s: When the worker said so, seconds of any clock of its own.
        """
        fallen_tokens, passed_s = self._pending_tokens - pending_tokens, at_s - self._looked_at_s
        self._pending_tokens, self._looked_at_s = pending_tokens, at_s
        if fallen_tokens <= 0 or passed_s <= 0:
            return
        self._rates.append(fallen_tokens / passed_s)
        self._new_samples += 1
        if self._new_samples >= MIN_SAMPLES:
            self._new_samples = 0
            self._tokens_per_s = sorted(self._rates)[int(_PERCENTILE * (len(self._rates) - 1))]
