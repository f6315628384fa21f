"""What placement sees and what it answers: plain values, no clock, no I/O."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from coda_router.placement.reasons import PlacementReason


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One worker as the router knows it at the moment of a decision.

    Attributes:
        name: The worker's name in the fleet.
        is_healthy: It answers, by its snapshot stream or a health probe.
        is_draining: It takes no new requests.
        has_telemetry: Its snapshots are fresh; without, the load is what this router has in flight there.
        models: Names of the models it serves; empty = not known yet, so it is asked for any.
        in_flight_requests: What this router has in flight there now.
        load_requests: All requests there: the engine's total without this router's, plus those in flight now.
        waiting_requests: Of them waiting for admission, with those still on their way counted as waiting.
        decode_context_tokens: Context of each decoding request, tokens (eq. 8's C_w).
    """

    name: str
    is_healthy: bool = True
    is_draining: bool = False
    has_telemetry: bool = True
    models: frozenset[str] = frozenset()
    in_flight_requests: int = 0
    load_requests: int = 0
    waiting_requests: int = 0
    decode_context_tokens: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class PlacementRequest:
    """What placement needs to know of a request.

    Attributes:
        model: Name that the client asked for; None = any.
        context_tokens: Estimate of the request's context (reusable prefix plus new input), tokens.
        resident_tokens: Worker name to tokens of the session's prefix known to be resident there.
        history_tokens: Estimate of the context of the session's previous request, tokens; 0 = none is known.
        recent_worker: Where this router placed the session's last request, if that worker still runs as it did.
        has_lost_home: The session had a home whose residency is gone (restarted, evicted or removed).
        tried: Workers that already failed this request.
        rotation: Counts decisions; breaks ties so that equal workers take turns.
    """

    model: str | None = None
    context_tokens: int = 0
    resident_tokens: Mapping[str, int] = field(default_factory=dict)
    history_tokens: int = 0
    recent_worker: str | None = None
    has_lost_home: bool = False
    tried: frozenset[str] = frozenset()
    rotation: int = 0

    @property
    def home(self) -> str | None:
        """The worker with the largest resident prefix; the recent one where the engines know of none."""
        if not self.resident_tokens:
            return self.recent_worker
        longest_tokens = max(self.resident_tokens.values())
        if self.recent_worker and self.resident_tokens.get(self.recent_worker) == longest_tokens:
            return self.recent_worker
        return max(self.resident_tokens, key=self.resident_tokens.__getitem__)

    @property
    def had_home(self) -> bool:
        """The session was placed before, even if nothing of it is left there."""
        return self.has_lost_home or self.home is not None


@dataclass(frozen=True, slots=True)
class Narrowed:
    """What one stage leaves.

    Attributes:
        candidates: The workers that remain; empty = the request cannot be placed now.
        reason: What the stage found.
        is_final: The stage decided; later stages are not asked.
    """

    candidates: Sequence[WorkerView]
    reason: PlacementReason
    is_final: bool = False


class Stage(Protocol):
    """One step of the chain: narrows the candidates and says why."""

    def narrow(self, request: PlacementRequest, candidates: Sequence[WorkerView]) -> Narrowed:
        """Return which of ``candidates`` remain; pure."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """A decision.

    Attributes:
        worker: Name of the chosen worker; None = nobody can take the request now.
        reason: Of the stage that decided.
        trail: What every stage on the way found, in order.
    """

    worker: str | None
    reason: PlacementReason
    trail: tuple[PlacementReason, ...]
