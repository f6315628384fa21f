"""From a request to the worker that takes it: gather, decide, apply, report. Knows no HTTP."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

from coda_router.decisions import Decision, DecisionLog
from coda_router.errors import Refusal
from coda_router.fleet.fleet import Fleet
from coda_router.fleet.worker import Worker, residency_of
from coda_router.holding import HoldingLimits, HoldingQueue
from coda_router.identity import Session
from coda_router.live_settings import LiveSettings
from coda_router.placement.observations import Placement, PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.sessions import Home, SessionMap

BYTES_PER_TOKEN = 4
"""Body bytes taken as one token where only an estimate is wanted (context distance is logarithmic)."""

RETRY_AFTER_S = 2
"""Retry-After of a request that no engine can take, seconds."""


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """A request as the dispatcher sees it.

    Attributes:
        model: Name that the client asked for; None = any.
        tenant: Owner of the API key.
        session: The client's session.
        table_key: The session's key in engines' session tables.
        body_bytes: Size of the body.
        ready_at_s: When it became logically ready: its receipt here, event loop's time in seconds.
        makes_kv: Whether its KV is worth coming back to (generation; not counting tokens or embedding).
    """

    model: str | None
    tenant: str
    session: Session
    table_key: str
    body_bytes: int
    ready_at_s: float
    makes_kv: bool


class Dispatcher:
    """Assigns requests to workers.

    Args:
        router_id: This router, as engines attribute requests to it.
        internal_token: For the engines' internal endpoints; None = they are open.
        settings: Which placement chain is in force.
        sessions: Where sessions were placed last.
        holding_limits: How much may be held back.
    """

    def __init__(
        self,
        router_id: str,
        internal_token: str | None,
        settings: LiveSettings,
        sessions: SessionMap,
        holding_limits: HoldingLimits,
    ) -> None:
        self.fleet = Fleet(router_id, internal_token, self._on_fleet_change, self._on_evicted)
        self.decisions = DecisionLog()
        self.sessions = sessions
        self.holding: HoldingQueue[Worker | Refusal] = HoldingQueue(holding_limits, self._undo)
        self._settings = settings

    async def assign(self, request: RoutedRequest, tried: frozenset[str] = frozenset()) -> Worker:
        """Return the worker for ``request``, counted as in flight there until :meth:`release`.

        Args:
            request: What to place.
            tried: Workers that already failed it.

        Raises:
            Refusal: 404 for a model that nobody serves, 503 when no engine can take the request.
        """
        outcome = await self.holding.admit(lambda: self._place(request, tried), request.body_bytes)
        if isinstance(outcome, Refusal):
            raise outcome
        return outcome

    def release(self, worker: Worker) -> None:
        """Count a request as over, which may let a held one go."""
        worker.end_request()
        self.holding.wake()

    def _place(self, request: RoutedRequest, tried: frozenset[str]) -> Worker | Refusal | None:
        now_s = asyncio.get_running_loop().time()
        observed = self._gather(request, tried, now_s)
        placement = self._settings.chain.place(observed, self.fleet.views(now_s))
        if placement.reason is PlacementReason.ALL_AT_FRONTIER:
            return None
        worker = self.fleet.workers[placement.worker] if placement.worker else None
        if worker is not None:
            worker.begin_request()
            if request.makes_kv:
                home = Home(worker.name, worker.incarnation, now_s, observed.context_tokens)
                self.sessions.put(request.table_key, home)
        self._report(request, observed, placement, now_s)
        return worker if worker is not None else self._refusal(request.model, placement.reason)

    def _gather(self, request: RoutedRequest, tried: frozenset[str], now_s: float) -> PlacementRequest:
        home = self.sessions.get(request.table_key, now_s)
        home_worker = self.fleet.workers.get(home.worker) if home else None
        is_home_alive = home is not None and home_worker is not None and home_worker.incarnation == home.incarnation
        return PlacementRequest(
            model=request.model,
            context_tokens=request.body_bytes // BYTES_PER_TOKEN,
            resident_tokens=residency_of(self.fleet.workers, request.table_key),
            recent_worker=home.worker if home and is_home_alive else None,
            history_tokens=home.context_tokens if home else 0,
            has_lost_home=home is not None and not is_home_alive,
            tried=tried,
            rotation=self.decisions.next_sequence,
        )

    def _report(self, request: RoutedRequest, observed: PlacementRequest, placement: Placement, now_s: float) -> None:
        self.decisions.count(placement)
        self.decisions.add(
            Decision(
                sequence=observed.rotation,
                at_s=time.time(),
                session=request.table_key,
                session_source=request.session.source,
                model=request.model,
                worker=placement.worker,
                reason=placement.reason,
                trail=placement.trail,
                attempt=len(observed.tried),
                ready_age_ms=round((now_s - request.ready_at_s) * 1000, 3),
                resident_tokens=observed.resident_tokens.get(placement.worker or "", 0),
                candidates=len(self.fleet.workers),
            )
        )

    def _refusal(self, model: str | None, reason: PlacementReason) -> Refusal:
        if reason is PlacementReason.MODEL_NOT_SERVED:
            served = self.fleet.served_models()
            if model not in served:
                return Refusal(
                    404,
                    "model_not_found",
                    f"the model {model!r} does not exist here; served: {', '.join(served) or 'none'}",
                    param="model",
                )
        return Refusal(503, "no_engine", f"no engine can take the request now ({reason})", retry_after_s=RETRY_AFTER_S)

    def _on_fleet_change(self) -> None:
        self.holding.wake()

    def _on_evicted(self, worker: Worker, keys: Iterable[str]) -> None:
        self.sessions.forget_evicted(worker.name, keys, asyncio.get_running_loop().time())

    def _undo(self, outcome: Worker | Refusal) -> None:
        if isinstance(outcome, Worker):
            self.release(outcome)
