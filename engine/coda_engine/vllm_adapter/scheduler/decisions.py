"""The latest state-admission decisions and how long they took, for people and metrics."""

import json
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass

from coda_engine.contract.reasons import AdmissionReason

RING_SIZE = 256

SELECTION_BUCKETS_S = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)
"""Upper bounds of the selection-time histogram, seconds; one more bucket counts the rest."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One admission (or the finding that nothing is feasible), as served by ``/coda/decisions``.

    Attributes:
        request_id: The engine's request id; the native head's when nothing was feasible.
        reason: Why this one.
        wait_ms: Time since its logical readiness, milliseconds.
        state_cost_ms: Its state-preparation cost, milliseconds; 0 where the policy looks at none.
        candidates: Requests that were looked at.
        feasible: Of them those that fitted HBM.
        reordered: It was put before the native head.
    """

    request_id: str
    reason: AdmissionReason
    wait_ms: float
    state_cost_ms: float
    candidates: int
    feasible: int
    reordered: bool


class DecisionLog:
    """Counts every decision, keeps the last :data:`RING_SIZE` encoded."""

    def __init__(self) -> None:
        self.by_reason: dict[str, int] = {}
        self.reordered = 0
        self.next_sequence = 0
        self._encoded: deque[bytes] = deque(maxlen=RING_SIZE)
        self._buckets = [0] * (len(SELECTION_BUCKETS_S) + 1)
        self._seconds = 0.0

    def add(self, decision: Decision) -> None:
        """Count and keep ``decision``."""
        reason = decision.reason.value
        self.by_reason[reason] = self.by_reason.get(reason, 0) + 1
        self.reordered += decision.reordered
        fields = {
            "sequence": self.next_sequence,
            "request_id": decision.request_id,
            "reason": reason,
            "wait_ms": round(decision.wait_ms, 3),
            "state_cost_ms": round(decision.state_cost_ms, 3),
            "candidates": decision.candidates,
            "feasible": decision.feasible,
            "reordered": decision.reordered,
        }
        self._encoded.append(json.dumps(fields, separators=(",", ":")).encode())
        self.next_sequence += 1

    def took(self, seconds: float) -> None:
        """Count the time of one selection, seconds."""
        self._buckets[bisect_left(SELECTION_BUCKETS_S, seconds)] += 1
        self._seconds += seconds

    def encode(self) -> bytes:
        """Return the :class:`~coda_engine.vllm_adapter.telemetry.pages.DecisionsDocument` as JSON."""
        head = f'{{"next":{self.next_sequence},"selection_buckets":{self._buckets},"selection_seconds":{self._seconds}'
        return head.encode() + b',"decisions":[' + b",".join(self._encoded) + b"]}"
