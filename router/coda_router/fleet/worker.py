"""What the router knows of one worker."""

from collections.abc import Mapping

from coda_engine.contract.interface import SNAPSHOT_HEARTBEAT_S
from coda_engine.contract.reasons import Feature
from coda_engine.contract.snapshot import EngineSnapshot, SessionDelta
from coda_router.fleet.address import WorkerAddress
from coda_router.placement.observations import WorkerView
from coda_router.upstream.pool import ConnectionPool

TELEMETRY_TIMEOUT_S = 2 * SNAPSHOT_HEARTBEAT_S
"""Silence of a snapshot stream after which a worker's telemetry counts as lost."""


class Worker:
    """One worker: its address and connections, its last snapshot, and what is in flight there.

    Times are the event loop's, seconds. Changed only by the event loop's thread.
    """

    def __init__(self, address: WorkerAddress, router_id: str) -> None:
        self.address = address
        self.pool = ConnectionPool(address.host, address.port)
        self.request_line_tail = f" HTTP/1.1\r\nhost: {address.authority}\r\n".encode("ascii")
        self.snapshot: EngineSnapshot | None = None
        self.is_healthy = False
        self.is_known = False
        self._router_id = router_id
        self._snapshot_at_s = float("-inf")
        self._attributed_requests = 0
        self._in_flight_requests = 0
        self._losses = 0
        self._resident_tokens: dict[str, int] = {}
        self._residency_version = 0
        self._models: frozenset[str] = frozenset()
        self._view: WorkerView | None = None

    @property
    def name(self) -> str:
        """The worker's name in the fleet."""
        return self.address.name

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

    def has_telemetry(self, now_s: float) -> bool:
        """Return whether the worker's snapshots are fresh."""
        return now_s - self._snapshot_at_s <= TELEMETRY_TIMEOUT_S

    def take_snapshot(self, snapshot: EngineSnapshot, now_s: float) -> None:
        """Take what the worker says of itself; another instance id forgets everything resident."""
        if self.snapshot is None or self.snapshot.instance_id != snapshot.instance_id:
            self._resident_tokens = {}
            self._residency_version = 0
        self.snapshot = snapshot
        self._snapshot_at_s = now_s
        if len(snapshot.served_models) != len(self._models) or not self._models.issuperset(snapshot.served_models):
            self._models = frozenset(snapshot.served_models)
        total_requests = snapshot.waiting + snapshot.running
        identity = snapshot.capabilities.get(Feature.IDENTITY)
        if identity is not None and identity.enabled:
            self._attributed_requests = snapshot.requests_by_router.get(self._router_id, 0)
        else:
            # Nobody tells whose requests these are: as many as are in flight from here are taken as ours.
            self._attributed_requests = min(total_requests, self._in_flight_requests)
        self._view = None
        self.set_health(True)

    def take_models(self, models: frozenset[str]) -> None:
        """Take the model names of a worker that publishes no snapshots."""
        self._models = models
        self._view = None

    def take_residency(self, delta: SessionDelta) -> list[str]:
        """Apply a change of the session table; return the keys of sessions of which nothing remains."""
        if self.snapshot is None or delta.instance_id != self.snapshot.instance_id:
            return []
        if delta.since == 0:
            gone = list(self._resident_tokens.keys() - {row.key for row in delta.sessions})
            self._resident_tokens = {}
        elif delta.since != self._residency_version:
            return []
        else:
            gone = []
        gone += delta.removed
        for key in delta.removed:
            self._resident_tokens.pop(key, None)
        for row in delta.sessions:
            if row.hbm_tokens > 0:
                self._resident_tokens[row.key] = row.hbm_tokens
            else:
                self._resident_tokens.pop(row.key, None)
                gone.append(row.key)
        self._residency_version = delta.version
        return gone

    def resident_tokens(self, key: str) -> int:
        """Return the tokens of a session's prefix in this worker's HBM, as far as it has told."""
        return self._resident_tokens.get(key, 0)

    def set_health(self, is_healthy: bool) -> bool:
        """Record whether the worker answers; return whether that is news."""
        is_news = not self.is_known or is_healthy != self.is_healthy
        if self.is_healthy and not is_healthy:
            self._losses += 1
        self.is_known = True
        self.is_healthy = is_healthy
        if is_news:
            self._view = None
        return is_news

    def begin_request(self) -> None:
        """Count a request that is sent there now."""
        self._in_flight_requests += 1
        self._view = None

    def end_request(self) -> None:
        """Count a request as over."""
        self._in_flight_requests -= 1
        self._view = None

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
                has_telemetry=False,
                models=self._models,
                in_flight_requests=in_flight,
                load_requests=in_flight,
            )
        snapshot = self.snapshot
        others = max(0, snapshot.waiting + snapshot.running - self._attributed_requests)
        on_their_way = max(0, in_flight - self._attributed_requests)
        return WorkerView(
            name=self.name,
            is_healthy=self.is_healthy,
            is_draining=snapshot.draining,
            has_telemetry=True,
            models=self._models,
            in_flight_requests=in_flight,
            load_requests=others + in_flight,
            waiting_requests=snapshot.waiting + on_their_way,
            decode_context_tokens=tuple(snapshot.decode_context_tokens),
        )


def residency_of(workers: Mapping[str, Worker], key: str) -> dict[str, int]:
    """Return worker name to resident tokens of a session, for the workers that have any of it."""
    return {name: tokens for name, worker in workers.items() if (tokens := worker.resident_tokens(key)) > 0}
