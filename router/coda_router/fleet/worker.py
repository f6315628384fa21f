"""What the router knows of one worker."""

from collections import deque
from collections.abc import Callable
from itertools import islice

from coda_engine.contract.interface import FRONTIER_REQUESTS, SNAPSHOT_HEARTBEAT_S
from coda_engine.contract.reasons import Feature
from coda_engine.contract.snapshot import EngineSnapshot, SessionDelta
from coda_router.fleet.address import WorkerAddress
from coda_router.fleet.drain import DrainRate
from coda_router.fleet.ejection import Ejection
from coda_router.fleet.residency import Residency
from coda_router.placement.decoders import NO_DECODERS, DecodeContexts
from coda_router.placement.observations import WorkerView
from coda_router.upstream.pool import ConnectionPool

TELEMETRY_TIMEOUT_S = 2 * SNAPSHOT_HEARTBEAT_S
"""Silence of a snapshot stream after which a worker's telemetry counts as lost."""


class Worker:
    """One worker: its address and connections, its last snapshot, and what is in flight there.

    Times are the event loop's, seconds. Changed only by the event loop's thread.

    Attributes:
        ejection: Whether it gets no requests for a while.
        progress_at_s: When its engine was last known to move on.

    Args:
        address: Where it listens.
        router_id: This router, as engines attribute requests to it.
        residency: The fleet's table of resident sessions, which this worker's table goes to; None = one of its own.
        on_changed: Called with the worker whenever its view may be another one.
    """

    def __init__(
        self,
        address: WorkerAddress,
        router_id: str,
        residency: Residency | None = None,
        on_changed: Callable[["Worker"], None] = lambda _: None,
    ) -> None:
        self.address = address
        self.pool = ConnectionPool(address.host, address.port)
        self.request_line_tail = f" HTTP/1.1\r\nhost: {address.authority}\r\n".encode("ascii")
        self.snapshot: EngineSnapshot | None = None
        self.is_known = False
        self.ejection = Ejection()
        self.progress_at_s = float("-inf")
        self._answers = False
        self._is_hung = False
        self._router_id = router_id
        self._snapshot_at_s = float("-inf")
        self._total_requests = 0
        self._waiting_requests = 0
        self._attributed_requests = 0
        self._in_flight_requests = 0
        self._in_flight_making_kv = 0
        self._unanswered_making_kv = 0
        self._losses = 0
        self._residency = residency if residency is not None else Residency()
        self._residency_version = 0
        self._models: frozenset[str] = frozenset()
        self._decode_contexts = NO_DECODERS
        self._drain = DrainRate()
        self._sent_tokens: deque[int] = deque(maxlen=FRONTIER_REQUESTS)
        self._view: WorkerView | None = None
        self._on_changed = on_changed

    @property
    def name(self) -> str:
        """The worker's name in the fleet."""
        return self.address.name

    @property
    def is_healthy(self) -> bool:
        """Whether it answers, by its snapshot stream or a health probe, and does not hang."""
        return self._answers and not self._is_hung

    @property
    def in_flight_requests(self) -> int:
        """What this router has in flight there."""
        return self._in_flight_requests

    @property
    def models(self) -> frozenset[str]:
        """Names of the models that the worker serves; empty = not known yet."""
        return self._models

    @property
    def incarnation(self) -> str:
        """A value that changes when whatever was resident is gone: the engine's instance id, where it has one."""
        return self.snapshot.instance_id if self.snapshot else f"lost-{self._losses}"

    @property
    def residency_position(self) -> tuple[str, int]:
        """Instance id and version from which session changes are wanted next."""
        return (self.snapshot.instance_id if self.snapshot else ""), self._residency_version

    @property
    def telemetry_until_s(self) -> float:
        """When the worker's telemetry will count as lost unless it says something, seconds."""
        return self._snapshot_at_s + TELEMETRY_TIMEOUT_S

    def has_telemetry(self, now_s: float) -> bool:
        """Return whether the worker's snapshots are fresh."""
        return now_s - self._snapshot_at_s <= TELEMETRY_TIMEOUT_S

    def take_snapshot(self, snapshot: EngineSnapshot, now_s: float) -> None:
        """Take what the worker says of itself; another instance id forgets everything resident."""
        if self.snapshot is None or (self.snapshot.instance_id, self.snapshot.version) != (
            snapshot.instance_id,
            snapshot.version,
        ):
            # A heartbeat says the same again: that the process lives, not that its engine moves.
            self.note_progress(now_s)
        if self.snapshot is None or self.snapshot.instance_id != snapshot.instance_id:
            self._residency.forget(self.name)
            self._residency_version = 0
            self._drain = DrainRate()
            if self.ejection.is_ejected:
                self.readmit(now_s)
        self.snapshot = snapshot
        self._snapshot_at_s = now_s
        if len(snapshot.served_models) != len(self._models) or not self._models.issuperset(snapshot.served_models):
            self._models = frozenset(snapshot.served_models)
        self._waiting_requests = snapshot.waiting
        self._total_requests = total_requests = self._waiting_requests + snapshot.running
        identity = snapshot.capabilities.get(Feature.IDENTITY)
        if identity is not None and identity.enabled:
            self._attributed_requests = snapshot.requests_by_router.get(self._router_id, 0)
        else:
            # Nobody tells whose requests these are: as many as are in flight from here are taken as ours.
            self._attributed_requests = min(total_requests, self._in_flight_requests)
        self._decode_contexts = DecodeContexts(snapshot.decode_context_tokens)
        self._drain.look(snapshot.pending_prefill_tokens, snapshot.published_at_s)
        self._changed()
        self.set_health(True)
        self.view(now_s)  # made here, once for each snapshot, and not while a request waits to be placed

    def take_models(self, models: frozenset[str]) -> None:
        """Take the model names of a worker that publishes no snapshots."""
        self._models = models
        self._changed()

    def take_residency(self, delta: SessionDelta) -> list[int]:
        """Apply a change of the session table; return the hashes of the keys of which nothing remains."""
        if self.snapshot is None or delta.instance_id != self.snapshot.instance_id:
            return []
        # What is only in the shadow any more is restored there, and computed anywhere else.
        tokens = {row.key: max(row.hbm_tokens, row.shadow_tokens) for row in delta.sessions}
        if delta.since == 0:
            gone = self._residency.replace(self.name, tokens)
        elif delta.since != self._residency_version:
            return []
        else:
            gone = self._residency.update(self.name, tokens, delta.removed)
        self._residency_version = delta.version
        return gone

    def resident_tokens(self, key: str) -> int:
        """Return the tokens of a session's prefix in this worker's HBM or shadow, as far as it has told."""
        return self._residency.tokens_at(self.name, key)

    def set_health(self, is_healthy: bool) -> bool:
        """Record whether the worker answers; return whether that is news."""
        is_news = not self.is_known or is_healthy != self._answers
        if self._answers and not is_healthy:
            self._losses += 1
        self.is_known = True
        self._answers = is_healthy
        if is_news:
            self._changed()
        return is_news

    def note_progress(self, now_s: float) -> None:
        """Take note that the worker's engine moves on; one that hung is let back in."""
        self.progress_at_s = now_s
        if self._is_hung:
            self.readmit(now_s)

    def mark_hung(self, now_s: float) -> bool:
        """Take the worker out of service until its engine moves on; return whether that is news."""
        if self._is_hung:
            return False
        self._is_hung = True
        self.ejection.eject(now_s)
        self._changed()
        return True

    def request_failed(self, now_s: float) -> bool:
        """Count a request of whose reply nothing came; return whether that ejects the worker."""
        is_ejected_now = self.ejection.failed(now_s)
        if is_ejected_now:
            self._changed()
        return is_ejected_now

    def request_answered(self, *, makes_kv: bool = True) -> None:
        """Count a request of whose reply the first bytes came; ``makes_kv`` as at :meth:`begin_request`."""
        self.ejection.answered()
        if makes_kv:
            self._unanswered_making_kv -= 1
            self._changed()

    def readmit(self, now_s: float) -> None:
        """Let an ejected or hung worker back in."""
        self._is_hung = False
        self.progress_at_s = now_s
        self.ejection.readmit()
        self._changed()

    def begin_request(self, new_tokens: int = 0, *, makes_kv: bool = True) -> None:
        """Count a request that is sent there now.

        Args:
            new_tokens: Estimate of what the worker will have to prefill for it, tokens.
            makes_kv: Whether it generates, and so waits for its engine's scheduler; others are load only.
        """
        self._in_flight_requests += 1
        if makes_kv:
            self._in_flight_making_kv += 1
            self._unanswered_making_kv += 1
            self._sent_tokens.append(new_tokens)
        self._changed()

    def end_request(self, *, makes_kv: bool = True, was_answered: bool = False) -> None:
        """Count a request as over.

        Args:
            makes_kv: As at :meth:`begin_request`.
            was_answered: Whether :meth:`request_answered` has counted it.
        """
        self._in_flight_requests -= 1
        if makes_kv:
            self._in_flight_making_kv -= 1
            self._unanswered_making_kv -= not was_answered
        self._changed()

    def view(self, now_s: float) -> WorkerView:
        """Return the worker as placement sees it."""
        has_telemetry = self.has_telemetry(now_s)
        if self._view is None or self._view.has_telemetry != has_telemetry:
            self._view = self._make_view(has_telemetry)
        return self._view

    def _make_view(self, has_telemetry: bool) -> WorkerView:
        in_flight = self._in_flight_requests
        if self.snapshot is None or not has_telemetry:
            return WorkerView(
                name=self.name,
                is_healthy=self.is_healthy,
                is_ejected=self.ejection.is_ejected,
                has_telemetry=False,
                models=self._models,
                in_flight_requests=in_flight,
                load_requests=in_flight,
            )
        snapshot = self.snapshot
        others = max(0, self._total_requests - self._attributed_requests)
        on_their_way = self._on_their_way()
        # What was sent last is what the worker has not counted yet.
        sent_tokens = sum(islice(reversed(self._sent_tokens), on_their_way)) if on_their_way else 0
        return WorkerView(
            name=self.name,
            is_healthy=self.is_healthy,
            is_ejected=self.ejection.is_ejected,
            is_draining=snapshot.draining,
            has_telemetry=True,
            models=self._models,
            in_flight_requests=in_flight,
            load_requests=others + in_flight,
            waiting_requests=self._waiting_requests + on_their_way,
            pending_prefill_tokens=snapshot.pending_prefill_tokens + sent_tokens,
            prefill_tokens_per_s=self._drain.tokens_per_s,
            decode_contexts=self._decode_contexts,
        )

    def _on_their_way(self) -> int:
        """Return how many requests the worker has yet to count, at most.

        One whose reply has begun is none of them, though the worker may have finished it before its client has read
        all: it is neither in the worker's count nor on its way.
        """
        uncounted = self._in_flight_making_kv - self._attributed_requests
        return min(max(0, uncounted), self._unanswered_making_kv)

    def _changed(self) -> None:
        self._view = None
        self._on_changed(self)
