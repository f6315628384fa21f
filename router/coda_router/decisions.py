"""The placement decisions of the recent past, for people and tests, and their counts since the start."""

import json
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import msgspec

from coda_router.decision_file import DecisionFile
from coda_router.placement.candidates import Candidates
from coda_router.placement.observations import Placement, WorkerView

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
        policy: The placement policy in force.
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
    policy: str
    worker: str | None
    reason: str
    trail: tuple[str, ...]
    attempt: int
    ready_age_ms: float
    resident_tokens: int
    candidates: int


class DecisionLog:
    """A ring of decisions, the counts of everything that stages found, and a file of all decisions, if there is one.

    Args:
        file: Gets a line for each decision; None = there is no file.
    """

    def __init__(self, file: DecisionFile | None = None) -> None:
        self.file = file
        self._texts = _WorkerTexts()
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

    def add(self, decision: Decision, candidates: Candidates, resident_tokens: Mapping[str, int]) -> None:
        """Append a decision made with :attr:`next_sequence`.

        Args:
            decision: What was decided.
            candidates: The workers that it was decided on, with their signals.
            resident_tokens: Worker name to tokens of the session that are resident there.
        """
        self._ring.append(decision)
        self._next_sequence = decision.sequence + 1
        if self.file is not None:
            resident = msgspec.json.encode(resident_tokens)
            text = msgspec.json.encode(decision)
            if not text.isascii():  # some programs end a line at U+2028 and the like
                text = json.dumps(msgspec.json.decode(text), separators=(",", ":")).encode("ascii")
            workers = self._texts.of(candidates)
            self.file.add(b'%b,"resident_tokens_by_worker":%b,"workers":[%b]}' % (text[:-1], resident, workers))

    def since(self, sequence: int) -> dict[str, object]:
        """Return the kept decisions from ``sequence`` on, oldest first, and the next sequence to ask for."""
        kept = [asdict(decision) for decision in self._ring if decision.sequence >= sequence]
        return {"next": self._next_sequence, "decisions": kept}


class _WorkerTexts:
    """Workers' signals as JSON, written anew only for those that changed since the decision before."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[WorkerView, bytes]] = {}

    def of(self, candidates: Candidates) -> bytes:
        """Return the signals of all candidates, separated by commas."""
        if len(self._known) > len(candidates):
            self._known.clear()  # workers have left
        return b",".join([self._text(view) for view in candidates])

    def _text(self, view: WorkerView) -> bytes:
        known = self._known.get(view.name)
        if known is not None and known[0] is view:
            return known[1]
        text = msgspec.json.encode(
            {
                "name": view.name,
                "is_fit": view.is_fit,
                "has_telemetry": view.has_telemetry,
                "in_flight_requests": view.in_flight_requests,
                "load_requests": view.load_requests,
                "waiting_requests": view.waiting_requests,
                "pending_prefill_tokens": view.pending_prefill_tokens,
                "decoding_requests": len(view.decode_contexts.tokens),
                "mean_decode_context_log2": round(view.decode_contexts.mean_log2, 3),
            }
        )
        self._known[view.name] = view, text
        return text
