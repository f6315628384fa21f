"""When a worker that fails one request after another gets none for a while, and when it is asked again."""

from dataclasses import dataclass

_MOST_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class EjectionPolicy:
    """How many failures eject a worker, and for how long.

    A failure is a request that the worker took, or should have taken, and of whose reply nothing came.

    Attributes:
        max_failures: Failures in a row, of any requests, from which a worker is ejected; >= 1.
        first_back_off_s: Time until the first probe, seconds; each ejection without an answered request between
            doubles it.
        longest_back_off_s: Longest time until a probe, seconds.
    """

    max_failures: int = 3
    first_back_off_s: float = 1.0
    longest_back_off_s: float = 30.0

    def back_off_s(self, attempts: int) -> float:
        """Return the time until the next probe, seconds, after ``attempts`` >= 1 ejections and failed probes."""
        return min(self.first_back_off_s * (1 << min(attempts - 1, _MOST_DOUBLINGS)), self.longest_back_off_s)


class Ejection:
    """Whether one worker is ejected. Times are the event loop's, seconds.

    Attributes:
        ejections: How often it was ejected since the start.
    """

    def __init__(self, policy: EjectionPolicy | None = None) -> None:
        self.ejections = 0
        self._policy = policy or EjectionPolicy()
        self._failures = 0
        self._attempts = 0
        self._probe_at_s: float | None = None

    @property
    def is_ejected(self) -> bool:
        """Whether the worker gets no requests while another one can take them."""
        return self._probe_at_s is not None

    def failed(self, now_s: float) -> bool:
        """Count a failure; return whether it ejects the worker."""
        self._failures += 1
        if self.is_ejected or self._failures < self._policy.max_failures:
            return False
        self.eject(now_s)
        return True

    def answered(self) -> None:
        """Take note of a reply: earlier failures are forgotten."""
        self._failures = 0
        if not self.is_ejected:
            self._attempts = 0

    def eject(self, now_s: float) -> None:
        """Eject the worker, whatever its failures."""
        self.ejections += 1
        self._put_off(now_s)

    def readmit(self) -> None:
        """Let the worker back in; the very next failure ejects it again, until it has answered a request."""
        self._probe_at_s = None
        self._failures = self._policy.max_failures - 1

    def is_probe_due(self, now_s: float) -> bool:
        """Return whether the worker is ejected and should be asked whether it answers again."""
        return self._probe_at_s is not None and now_s >= self._probe_at_s

    def probe_failed(self, now_s: float) -> None:
        """Put the next probe off for longer; says nothing of a worker that was let back in meanwhile."""
        if self.is_ejected:
            self._put_off(now_s)

    def _put_off(self, now_s: float) -> None:
        self._attempts += 1
        self._probe_at_s = now_s + self._policy.back_off_s(self._attempts)
