"""How long to wait before a process that ended is started again."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Exponential back-off that forgives after a while.

    Attributes:
        first_s: Wait before the first restart, seconds.
        factor: Growth from one restart to the next.
        longest_s: Longest wait, seconds.
        stable_s: A process that served this long starts again with the first wait, seconds.
    """

    first_s: float = 1.0
    factor: float = 2.0
    longest_s: float = 30.0
    stable_s: float = 60.0

    def failures_in_a_row(self, before: int, served_s: float) -> int:
        """Return the count of quick failures after another one that came ``served_s`` after being ready."""
        return 1 if served_s >= self.stable_s else before + 1

    def wait_s(self, failures: int) -> float:
        """Return the wait before the restart that follows ``failures`` quick failures in a row, seconds."""
        return float(min(self.longest_s, self.first_s * self.factor ** max(0, failures - 1)))
