"""The service level that output counts for, fixed before anything was measured."""

from collections.abc import Sequence
from dataclasses import dataclass

from coda_bench.engine.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep.

    Attributes:
        ttft_s: Longest time to the first token, seconds.
        mean_tbt_s: Longest mean time between tokens, seconds.
    """

    ttft_s: float
    mean_tbt_s: float = 0.2

    def holds(self, record: RequestRecord) -> bool:
        """Return whether the request has kept it with the tokens that it got so far; without a token it has not."""
        if record.ttft_s is None or record.ttft_s > self.ttft_s:
            return False
        return mean_tbt_s(record.token_s) <= self.mean_tbt_s


STANDARD = Slo(ttft_s=4.0)
"""The one that figures called ``slo`` mean."""

OTHERS = (Slo(ttft_s=1.0), Slo(ttft_s=2.0), Slo(ttft_s=8.0))
"""Printed beside it, to show how much depends on the choice."""


def mean_tbt_s(token_s: Sequence[float]) -> float:
    """Return the mean time between tokens, seconds; 0 for a single one."""
    return (token_s[-1] - token_s[0]) / (len(token_s) - 1) if len(token_s) > 1 else 0.0
