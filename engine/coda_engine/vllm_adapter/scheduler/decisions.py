"""The latest state-admission decisions and how long they took, for people and metrics."""

import json
from collections import Counter, deque
from dataclasses import dataclass

from coda_engine.contract.reasons import AdmissionReason, PreparationPath
from coda_engine.vllm_adapter.telemetry.histogram import Histogram

RING_SIZE = 256

SELECTION_BUCKETS_S = (0.00003, 0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03)
"""Upper bounds of the selection-time histogram, seconds; one more bucket counts the rest."""


@dataclass(frozen=True, slots=True)
class StatePath:
    """How a request's KV state gets into HBM, as vLLM did it, tokens.

    Attributes:
        hbm_tokens: Found in HBM.
        shadow_tokens: Restored from the CPU shadow.
        prefill_tokens: Computed.
    """

    hbm_tokens: int = 0
    shadow_tokens: int = 0
    prefill_tokens: int = 0

    @property
    def kind(self) -> PreparationPath:
        """Where most of the tokens come from."""
        return PreparationPath.of(self.hbm_tokens, self.shadow_tokens, self.prefill_tokens)


UNKNOWN_PATH = StatePath()
"""The path of a finding, by which nobody was admitted."""


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
        path: Where its tokens' KV comes from.
    """

    request_id: str
    reason: AdmissionReason
    wait_ms: float
    state_cost_ms: float
    candidates: int
    feasible: int
    reordered: bool
    path: StatePath = UNKNOWN_PATH


class DecisionLog:
    """Counts every decision, keeps the last :data:`RING_SIZE` encoded.

    Attributes:
        by_reason: Decisions by AdmissionReason.
        by_path: Admitted requests by PreparationPath.
        tokens_by_path: Their tokens by the path that each took.
        reordered: Admissions before the native head.
        next_sequence: Number of the next decision.
        selection: Time of one selection, seconds.
    """

    def __init__(self) -> None:
        self.by_reason: Counter[str] = Counter()
        self.by_path: Counter[str] = Counter()
        self.tokens_by_path: Counter[str] = Counter()
        self.selection = Histogram(SELECTION_BUCKETS_S)
        self.reordered = 0
        self.next_sequence = 0
        self._encoded: deque[bytes] = deque(maxlen=RING_SIZE)

    def add(self, decision: Decision) -> None:
        """Count and keep ``decision``."""
        reason = decision.reason.value
        self.by_reason[reason] += 1
        self.reordered += decision.reordered
        self._count_path(decision.path)
        fields = {
            "sequence": self.next_sequence,
            "request_id": decision.request_id,
            "reason": reason,
            "wait_ms": round(decision.wait_ms, 3),
            "state_cost_ms": round(decision.state_cost_ms, 3),
            "candidates": decision.candidates,
            "feasible": decision.feasible,
            "reordered": decision.reordered,
            "hbm_tokens": decision.path.hbm_tokens,
            "shadow_tokens": decision.path.shadow_tokens,
            "prefill_tokens": decision.path.prefill_tokens,
        }
        self._encoded.append(json.dumps(fields, separators=(",", ":")).encode())
        self.next_sequence += 1

    def took(self, seconds: float) -> None:
        """Count the time of one selection, seconds."""
        self.selection.observe(seconds)

    def encode(self) -> bytes:
        """Return the :class:`~coda_engine.vllm_adapter.telemetry.pages.DecisionsDocument` as JSON."""
        return b'{"next":%d,"decisions":[%s]}' % (self.next_sequence, b",".join(self._encoded))

    def _count_path(self, path: StatePath) -> None:
        if path is UNKNOWN_PATH:
            return
        self.by_path[path.kind.value] += 1
        self.tokens_by_path[PreparationPath.HBM.value] += path.hbm_tokens
        self.tokens_by_path[PreparationPath.SHADOW.value] += path.shadow_tokens
        self.tokens_by_path[PreparationPath.RECOMPUTE.value] += path.prefill_tokens
