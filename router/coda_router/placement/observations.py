"""What placement sees and what it answers: plain values, no clock, no I/O.

Structs and not dataclasses: several are made for each request, at a fifth of the cost.
"""

from collections.abc import Mapping

import msgspec

from coda_router.placement.decoders import NO_DECODERS, DecodeContexts
from coda_router.placement.home import home_of
from coda_router.placement.reasons import PlacementReason


class WorkerView(msgspec.Struct, frozen=True, gc=False):
    """One worker as the router knows it at the moment of a decision.

    Attributes:
        name: The worker's name in the fleet.
        is_healthy: It answers, by its snapshot stream or a health probe.
        is_ejected: It failed its last requests: it is asked only when nobody else can be.
        is_draining: It takes no new requests.
        has_telemetry: Its snapshots are fresh; without, the load is what this router has in flight there.
        models: Names of the models it serves; empty = not known yet, so it is asked for any.
        in_flight_requests: What this router has in flight there now.
        load_requests: All requests there: the engine's total without this router's, plus those in flight now.
        waiting_requests: Of them waiting for admission, with those still on their way counted as waiting.
        pending_prefill_tokens: Prompt tokens to be computed there, with this router's estimate of those still on
            their way; 0 without telemetry.
        prefill_tokens_per_s: How fast it was seen to prefill, tokens a second; None = not seen yet.
        decode_contexts: Contexts of its decoding requests (eq. 8's C_w).
    """

    name: str
    is_healthy: bool = True
    is_ejected: bool = False
    is_draining: bool = False
    has_telemetry: bool = True
    models: frozenset[str] = frozenset()
    in_flight_requests: int = 0
    load_requests: int = 0
    waiting_requests: int = 0
    pending_prefill_tokens: int = 0
    prefill_tokens_per_s: float | None = None
    decode_contexts: DecodeContexts = NO_DECODERS

    @property
    def is_fit(self) -> bool:
        """Nothing speaks against asking it."""
        return self.is_healthy and not self.is_draining and not self.is_ejected


class PlacementRequest(msgspec.Struct, frozen=True, gc=False):
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
        newcomers: Counts the requests placed elsewhere than at a home; sessions without one take turns by it.
        session_hash: Hash of the session, the same in every router, 64 bits.
        holder: The worker that holds the stored response which the request is about; None = it is about none.
    """

    model: str | None = None
    context_tokens: int = 0
    resident_tokens: Mapping[str, int] = msgspec.field(default_factory=dict)
    history_tokens: int = 0
    recent_worker: str | None = None
    has_lost_home: bool = False
    tried: frozenset[str] = frozenset()
    rotation: int = 0
    newcomers: int = 0
    session_hash: int = 0
    holder: str | None = None

    @property
    def home(self) -> str | None:
        """The worker with the largest resident prefix; the recent one where the engines know of none."""
        return home_of(self.resident_tokens, self.recent_worker, self.session_hash)

    @property
    def had_home(self) -> bool:
        """The session was placed before, even if nothing of it is left there."""
        return self.has_lost_home or self.home is not None

    def new_tokens(self, worker: str) -> int:
        """Return an estimate of the tokens that a worker would have to prefill for this request."""
        known_tokens = self.resident_tokens.get(worker)
        if known_tokens is None:
            known_tokens = self.history_tokens if worker == self.recent_worker else 0
        return max(self.context_tokens - known_tokens, 0)


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A decision.

    Attributes:
        worker: Name of the chosen worker; None = nobody can take the request now.
        reason: Of the stage that decided.
        trail: What every stage on the way found, in order.
    """

    worker: str | None
    reason: PlacementReason
    trail: tuple[PlacementReason, ...]
