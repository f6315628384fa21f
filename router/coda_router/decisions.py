"""The placement decisions of the recent past, for people and tests, and their counts since the start."""

from collections import Counter, deque
from dataclasses import asdict, dataclass

from coda_router.placement.observations import Placement

RING_DECISIONS = 512
"""Decisions that are kept."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One placement as it is served at ``GET /coda/decisions``.

    Attributes:
        sequence: Counts this router's decisions from 1.
        at_s: Unix time, seconds.
        session: Key of the session (a hash).
        session_source: Where the session's name came from.
        model: Name that the client asked for.
        worker: The chosen worker; None = nobody could take the request.
        reason: Of the stage that decided.
        trail: What every stage found, in order.
        attempt: 0 for the first worker tried, 1 for a retry elsewhere.
        ready_age_ms: Age of the request then, held back or retried included, milliseconds.
        resident_tokens: Tokens of the session that the engines reported resident at the chosen worker.
        candidates: Workers in the fleet.
    """

    sequence: int
    at_s: float
    session: str
    session_source: str
    model: str | None
    worker: str | None
    reason: str
    trail: tuple[str, ...]
    attempt: int
    ready_age_ms: float
    resident_tokens: int
    candidates: int


class DecisionLog:
    """A ring of decisions and the counts of everything that stages found."""

    def __init__(self) -> None:
        self._ring: deque[Decision] = deque(maxlen=RING_DECISIONS)
        self._next_sequence = 1
        self.decided: Counter[str] = Counter()
        self.found: Counter[str] = Counter()

    @property
    def next_sequence(self) -> int:
        """The sequence number of the next decision."""
        return self._next_sequence

    def count(self, placement: Placement) -> None:
        """Count a decision's reason and what its stages found."""
        self.decided[placement.reason] += 1
        for reason in placement.trail:
            self.found[reason] += 1

    def add(self, decision: Decision) -> None:
        """Append a decision made with :attr:`next_sequence`."""
        self._ring.append(decision)
        self._next_sequence = decision.sequence + 1

    def since(self, sequence: int) -> dict[str, object]:
        """Return the kept decisions from ``sequence`` on, oldest first, and the next sequence to ask for."""
        kept = [asdict(decision) for decision in self._ring if decision.sequence >= sequence]
        return {"next": self._next_sequence, "decisions": kept}
