"""What is measured."""

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True, slots=True)
class Pace:
    """How a mock worker answers.

    Attributes:
        name: Part of the case's name; ``""`` for the usual pace.
        first_event_ms: Time until the first event.
        gap_ms: Time between events.
        events: Number of events.
    """

    name: str
    first_event_ms: float
    gap_ms: float
    events: int = 32


AGENT = Pace("", first_event_ms=40, gap_ms=10)
"""As a coding agent sees an engine: 40 ms to the first token, then one every 10 ms. Latency is read here."""

SATURATED = Pace("saturated", first_event_ms=0, gap_ms=0)
"""No delay at all: a closed loop then runs at the router's capacity. CPU per request is read here."""


@dataclass(frozen=True, slots=True)
class Case:
    """One load.

    Attributes:
        body_bytes: Size of each request's body.
        concurrency: Connections, each with one request in flight.
        pace: How workers answer.
    """

    body_bytes: int
    concurrency: int
    pace: Pace

    @property
    def name(self) -> str:
        """The case as a row names it, for example ``2KB/c20`` or ``2KB/c20/saturated``."""
        parts = [f"{self.body_bytes // KIB}KB", f"c{self.concurrency}", *([self.pace.name] if self.pace.name else [])]
        return "/".join(parts)


QUICK = (Case(2 * KIB, 20, AGENT), Case(2 * KIB, 20, SATURATED))
FULL = tuple(
    Case(size * KIB, concurrency, pace)
    for size in (2, 128, 220, 1024)
    for concurrency in (1, 20, 100)
    for pace in (AGENT, SATURATED)
    # A mebibyte a hundred times at once measures this machine's memory, not a router.
    if not (size == 1024 and concurrency == 100)
)
