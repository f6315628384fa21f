"""From a request to the worker that takes it: gather, decide, apply, report. Knows no HTTP."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import xxhash

from coda_router.decision_file import DecisionFile
from coda_router.decisions import Decision, DecisionLog
from coda_router.errors import Refusal, unknown_model
from coda_router.fleet.fleet import Fleet
from coda_router.fleet.guard import SILENCE_LIMIT_S
from coda_router.fleet.worker import Worker
from coda_router.holding import HoldingLimits, HoldingQueue
from coda_router.identity import Session
from coda_router.live_settings import LiveSettings
from coda_router.placement.candidates import Candidates
from coda_router.placement.chain import PlacementChain
from coda_router.placement.holder import AtHolder
from coda_router.placement.observations import Placement, PlacementRequest
from coda_router.placement.reasons import PlacementReason
from coda_router.responses import StoredResponse, previous_response_not_found, response_not_found
from coda_router.sessions import Home, SessionMap

BYTES_PER_TOKEN = 4
"""Body bytes taken as one token where only an estimate is wanted (context distance is logarithmic)."""

RETRY_AFTER_S = 2
"""Retry-After of a request that no engine can take, seconds."""

_QUEUE_REASONS = {"queue_full": PlacementReason.QUEUE_FULL, "queue_timeout": PlacementReason.QUEUE_TIMEOUT}
_CONTINUING = PlacementChain((AtHolder(takes_draining=False),))
_ASKING = PlacementChain((AtHolder(takes_draining=True),))


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
        visible_models: Models that exist for this client; None = all.
        has_tools: Whether it offers tools to the model.
        stored_response: The stored response that it is about, which only its engine can serve; None = about none.
    """

    model: str | None
    tenant: str
    session: Session
    table_key: str
    body_bytes: int
    ready_at_s: float
    makes_kv: bool
    visible_models: frozenset[str] | None = None
    has_tools: bool = False
    stored_response: StoredResponse | None = None


class Decided(msgspec.Struct, frozen=True, gc=False):
    """A decision with all that it was made of.

    Attributes:
        observed: What was known of the request.
        candidates: What was known of the workers.
        placement: Where the request goes, and why.
    """

    observed: PlacementRequest
    candidates: Candidates
    placement: Placement


class Dispatcher:
    """Assigns requests to workers.

    Args:
        router_id: This router, as engines attribute requests to it.
        internal_token: For the engines' internal endpoints; None = they are open.
        settings: Which placement chain is in force.
        sessions: Where sessions were placed last.
        holding_limits: How much may be held back.
        silence_limit_s: Silence after which a request is taken from an engine that does not move on, seconds.
        decision_file: Gets a line for each decision; None = there is no file.
    """

    def __init__(
        self,
        router_id: str,
        internal_token: str | None,
        settings: LiveSettings,
        sessions: SessionMap,
        holding_limits: HoldingLimits,
        silence_limit_s: float = SILENCE_LIMIT_S,
        decision_file: DecisionFile | None = None,
    ) -> None:
        self.fleet = Fleet(router_id, internal_token, self._on_fleet_change, self._on_evicted, silence_limit_s)
        self.decisions = DecisionLog(decision_file)
        self.sessions = sessions
        self.holding: HoldingQueue[Worker | Refusal] = HoldingQueue(holding_limits)
        self._settings = settings
        self._newcomers = 0

    async def assign(self, request: RoutedRequest, tried: frozenset[str] = frozenset()) -> Worker:
        """Return the worker for ``request``, counted as in flight there until :meth:`release`.

        Args:
            request: What to place.
            tried: Workers that already failed it.

        Raises:
            Refusal: 404 for a model that nobody serves, 503 when no engine can take the request.
        """
        if request.stored_response is not None:
            outcome = self._place_at_holder(request, tried)
        else:
            # Whoever may not go where others may must not keep these waiting.
            line = (request.model, tried)
            try:
                outcome = await self.holding.admit(
                    lambda: self._place(request, tried),
                    lambda placed: self._undo(request, placed),
                    size_bytes=request.body_bytes,
                    ready_at_s=request.ready_at_s,
                    line=line,
                )
            except Refusal as refusal:
                self._report_unplaced(request, tried, refusal)
                raise
        if isinstance(outcome, Refusal):
            raise outcome
        return outcome

    def release(self, worker: Worker, *, makes_kv: bool = True, was_answered: bool = False) -> None:
        """Count a request as over, which may let a held one go; arguments as of :meth:`Worker.end_request`."""
        worker.end_request(makes_kv=makes_kv, was_answered=was_answered)
        self.holding.wake()

    def _place(self, request: RoutedRequest, tried: frozenset[str]) -> Worker | Refusal | None:
        now_s = asyncio.get_running_loop().time()
        decided = self.decide(request, tried, now_s)
        if decided.placement.reason is PlacementReason.ALL_AT_FRONTIER:
            return None
        return self._apply(request, decided, now_s)

    def _place_at_holder(self, request: RoutedRequest, tried: frozenset[str]) -> Worker | Refusal:
        """Place a request about a stored response, past the queue: it waits for nobody but its own engine."""
        now_s = asyncio.get_running_loop().time()
        decided = self.decide(request, tried, now_s, _CONTINUING if request.makes_kv else _ASKING)
        return self._apply(request, decided, now_s)

    def decide(
        self, request: RoutedRequest, tried: frozenset[str], now_s: float, chain: PlacementChain | None = None
    ) -> Decided:
        """Return where a request would go now; changes nothing.

        Args:
            request: What to place.
            tried: Workers that already failed it.
            now_s: The event loop's time, seconds.
            chain: Decides; None = the one in force.
        """
        observed, candidates = self._gather(request, tried, now_s), self.fleet.views(now_s)
        return Decided(observed, candidates, (chain or self._settings.chain).place(observed, candidates))

    def _apply(self, request: RoutedRequest, decided: Decided, now_s: float) -> Worker | Refusal:
        observed, placement = decided.observed, decided.placement
        worker = self.fleet.workers[placement.worker] if placement.worker else None
        if worker is not None:
            worker.begin_request(observed.new_tokens(worker.name), makes_kv=request.makes_kv)
            if request.makes_kv:
                self._newcomers += worker.name != observed.home
                home = Home(worker.name, worker.incarnation, now_s, observed.context_tokens, request.has_tools)
                self.sessions.put(request.table_key, home)
        self._report(request, decided, now_s)
        return worker if worker is not None else self._refusal(request, placement.reason)

    def _gather(self, request: RoutedRequest, tried: frozenset[str], now_s: float) -> PlacementRequest:
        home = self.sessions.get(request.table_key, now_s)
        home_worker = self.fleet.workers.get(home.worker) if home else None
        is_home_alive = home is not None and home_worker is not None and home_worker.incarnation == home.incarnation
        return PlacementRequest(
            model=request.model,
            context_tokens=_context_tokens(request, home),
            resident_tokens=self.fleet.residency.tokens_by_worker(request.table_key),
            recent_worker=home.worker if home and is_home_alive else None,
            history_tokens=home.context_tokens if home else 0,
            has_lost_home=home is not None and not is_home_alive,
            tried=tried,
            holder=request.stored_response.worker if request.stored_response else None,
            rotation=self.decisions.next_sequence,
            newcomers=self._newcomers,
            session_hash=xxhash.xxh3_64_intdigest(request.table_key.encode()),
        )

    def _report(self, request: RoutedRequest, decided: Decided, now_s: float) -> None:
        observed, placement = decided.observed, decided.placement
        self.decisions.count(placement)
        self.decisions.add(
            Decision(
                sequence=observed.rotation,
                at_s=time.time(),
                session=request.table_key,
                session_source=request.session.source,
                model=request.model,
                policy=self._settings.settings.placement.policy,
                worker=placement.worker,
                reason=placement.reason,
                trail=placement.trail,
                attempt=len(observed.tried),
                ready_age_ms=round((now_s - request.ready_at_s) * 1000, 3),
                resident_tokens=observed.resident_tokens.get(placement.worker or "", 0),
                candidates=len(decided.candidates),
            ),
            decided.candidates,
            observed.resident_tokens,
        )

    def _report_unplaced(self, request: RoutedRequest, tried: frozenset[str], refusal: Refusal) -> None:
        """Record a request that the queue refused: no stage decided on it."""
        reason = _QUEUE_REASONS.get(refusal.code)
        if reason is not None:
            now_s = asyncio.get_running_loop().time()
            decided = msgspec.structs.replace(
                self.decide(request, tried, now_s), placement=Placement(None, reason, (reason,))
            )
            self._report(request, decided, now_s)

    def _refusal(self, request: RoutedRequest, reason: PlacementReason) -> Refusal:
        if reason is PlacementReason.RESPONSE_LOST and request.stored_response is not None:
            not_found = previous_response_not_found if request.makes_kv else response_not_found
            return not_found(request.stored_response.id)
        if reason is PlacementReason.MODEL_NOT_SERVED and request.model not in self.fleet.served_models():
            return unknown_model(request.model, self.fleet.served_models(request.visible_models))
        return Refusal(503, "no_engine", f"no engine can take the request now ({reason})", retry_after_s=RETRY_AFTER_S)

    def _on_fleet_change(self) -> None:
        self.holding.wake()

    def _on_evicted(self, worker: Worker, key_hashes: Iterable[int]) -> None:
        self.sessions.mark_evicted(worker.name, key_hashes, asyncio.get_running_loop().time())

    def _undo(self, request: RoutedRequest, outcome: Worker | Refusal) -> None:
        if isinstance(outcome, Worker):
            self.release(outcome, makes_kv=request.makes_kv)


def _context_tokens(request: RoutedRequest, home: Home | None) -> int:
    """Return an estimate of the request's context, tokens; one that continues a stored response sends its end only."""
    sent_tokens = request.body_bytes // BYTES_PER_TOKEN
    continues = request.stored_response is not None and request.makes_kv
    return sent_tokens + home.context_tokens if home is not None and continues else sent_tokens
