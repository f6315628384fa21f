"""Asks a worker and relays its reply: one silent retry before the first byte, none after it."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum

from coda_engine.contract.identity import PRIORITY_HEADER, SESSION_HEADER
from coda_router.dispatch import RETRY_AFTER_S, Dispatcher, RoutedRequest
from coda_router.errors import Refusal, WorkerLostError
from coda_router.faults import EngineFault
from coda_router.fleet.worker import Worker
from coda_router.identity import IdentityWriter
from coda_router.upstream.connection import ReplyHead, UpstreamConnection
from coda_router.upstream.engine_death import tells_engine_death

MAX_ATTEMPTS = 2
"""Workers asked for one request."""

_log = logging.getLogger("coda.router.relay")


class RelayEvent(StrEnum):
    """Something about a relay that is counted."""

    STALE_CONNECTION = "StaleConnection"
    RETRIED_ELSEWHERE = "RetriedElsewhere"
    TRUNCATED = "Truncated"
    CLIENT_LEFT = "ClientLeft"
    KEPT_ALIVE = "KeptAlive"


@dataclass(frozen=True, slots=True)
class OutgoingRequest:
    """A client's request as bytes for a worker.

    Attributes:
        routed: The request as the dispatcher sees it.
        request_line_start: ``POST /v1/...``, up to the space before the HTTP version.
        header_lines: Forwarded headers, each with its line end.
        body: The body, unchanged but for engine controls.
        is_stream: Whether the client asked for a stream of events.
        learn: Told the worker, the status and the body's first bytes of the reply, before the client is; None =
            nobody wants to know.
    """

    routed: RoutedRequest
    request_line_start: bytes
    header_lines: bytes
    body: bytes
    is_stream: bool = False
    learn: Callable[[str, int, bytes], None] | None = None


StartReply = Callable[[ReplyHead], Awaitable[None]]
SendBody = Callable[[bytes, bool], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _BegunReply:
    """A reply of which the head and the first bytes of the body (or its end) have arrived."""

    connection: UpstreamConnection
    head: ReplyHead
    body: bytes
    has_more: bool


class Relay:
    """Carries requests to workers and replies back.

    Args:
        dispatcher: Who decides.
        identity: Writes the identity headers.
        on_event: Called for every :class:`RelayEvent`.
        on_fault: Called for every fault of an engine.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        identity: IdentityWriter,
        on_event: Callable[[RelayEvent], None],
        on_fault: Callable[[EngineFault], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._identity = identity
        self._on_event = on_event
        self._on_fault = on_fault

    async def carry(self, request: OutgoingRequest, start_reply: StartReply, send_body: SendBody) -> None:
        """Have a worker answer ``request`` and pass the reply on as it comes.

        Args:
            request: What to ask.
            start_reply: Called once, with the reply's head.
            send_body: Called with pieces of the body and whether more follow; waits for a slow client. Raises
                :class:`WorkerLostError` where the pieces together are no whole reply.

        Raises:
            Refusal: Nobody could answer, and nothing was sent to the client yet.
            WorkerLostError: The worker was lost in the middle of its reply; what the client has is truncated.
        """
        tried: frozenset[str] = frozenset()
        while True:
            worker = await self._assign(request, tried)
            was_answered = False
            try:
                reply = await self._ask(worker, request, attempt=len(tried))
                worker.request_answered(makes_kv=request.routed.makes_kv)
                was_answered = True
                try:
                    if request.learn is not None:
                        request.learn(worker.name, reply.head.status, reply.body)
                    await self._pass_on(reply, start_reply, send_body)
                finally:
                    worker.pool.give_back(reply.connection)
                return
            except _LostBeforeFirstByteError as lost:
                self._count_failure(worker, request.routed, lost)
                tried |= {worker.name}
                if len(tried) >= MAX_ATTEMPTS:
                    raise _engine_lost() from lost
            finally:
                self._dispatcher.release(worker, makes_kv=request.routed.makes_kv, was_answered=was_answered)

    async def _assign(self, request: OutgoingRequest, tried: frozenset[str]) -> Worker:
        try:
            worker = await self._dispatcher.assign(request.routed, tried)
        except Refusal as refusal:
            if tried and refusal.code == "no_engine":
                raise _engine_lost() from refusal
            raise
        if tried:
            self._on_event(RelayEvent.RETRIED_ELSEWHERE)
        return worker

    async def _ask(self, worker: Worker, request: OutgoingRequest, attempt: int) -> _BegunReply:
        """Return a reply of which the first bytes have arrived."""
        head_bytes = self._head_bytes(worker, request, attempt)
        connection = worker.pool.take_idle()
        try:
            if connection is not None:
                try:
                    return await _begin(connection, head_bytes, request)
                except WorkerLostError as error:
                    if not error.was_reused:
                        raise
                    self._on_event(RelayEvent.STALE_CONNECTION)
            return await _begin(await self._connect(worker), head_bytes, request)
        except WorkerLostError as error:
            raise _LostBeforeFirstByteError(error.fault, str(error)) from error

    def _count_failure(self, worker: Worker, routed: RoutedRequest, lost: WorkerLostError) -> None:
        self._on_fault(lost.fault)
        _log.info("worker %s: lost before the first byte of a reply: %s", worker.name, lost)
        if routed.stored_response is not None and not routed.makes_kv:
            # vLLM ends the connection of a client that wants events of what was made without: no failure of its own.
            return
        if worker.request_failed(asyncio.get_running_loop().time()):
            _log.warning("worker %s is ejected: it fails one request after another", worker.name)

    async def _connect(self, worker: Worker) -> UpstreamConnection:
        try:
            return await worker.pool.connect()
        except WorkerLostError:
            # Its next snapshot or health probe may tell otherwise; until then nobody else is sent there.
            worker.set_health(False)
            raise

    async def _pass_on(self, reply: _BegunReply, start_reply: StartReply, send_body: SendBody) -> None:
        try:
            await start_reply(reply.head)
            await send_body(reply.body, reply.has_more)
            more = reply.has_more
            while more:
                body, more = await _read(reply.connection)
                await send_body(body, more)
        except WorkerLostError as lost:
            self._on_event(RelayEvent.TRUNCATED)
            self._on_fault(lost.fault)
            raise
        if reply.connection.said_too_much:
            self._on_fault(EngineFault.TOO_MUCH)

    def _head_bytes(self, worker: Worker, request: OutgoingRequest, attempt: int) -> bytes:
        routed = request.routed
        ready_age_ms = (asyncio.get_running_loop().time() - routed.ready_at_s) * 1000
        identity = self._identity.header_value(
            routed.tenant, routed.session, attempt=attempt, ready_age_ms=ready_age_ms
        )
        return b"".join(
            (
                request.request_line_start,
                worker.request_line_tail,
                request.header_lines,
                _SESSION_LINE_START, identity, _PRIORITY_LINE,
                b"content-length: %d\r\n\r\n" % len(request.body),
            )
        )  # fmt: skip


class _LostBeforeFirstByteError(WorkerLostError):
    """A worker was lost while nothing of its reply was seen: another one may answer."""


_SESSION_LINE_START = f"{SESSION_HEADER.lower()}: ".encode("ascii")
# One tier so far; engines without Coda's identity hook refuse any other priority than 0.
_PRIORITY_LINE = f"\r\n{PRIORITY_HEADER.lower()}: 0\r\n".encode("ascii")


async def _begin(connection: UpstreamConnection, head: bytes, request: OutgoingRequest) -> _BegunReply:
    """Send the request; return the beginning of its reply, or close the connection."""
    try:
        connection.send(head, request.body)
        reply_head = await connection.head()
        if request.is_stream and not _may_answer_stream(reply_head):
            raise WorkerLostError(EngineFault.CONTENT_TYPE, "the worker's reply to a streaming request is no stream")
        first, more = await _read(connection, is_first=True)
    except BaseException:
        # Also when the client left: only a closed connection makes the engine stop.
        connection.abort()
        raise
    return _BegunReply(connection, reply_head, first, more)


async def _read(connection: UpstreamConnection, *, is_first: bool = False) -> tuple[bytes, bool]:
    body, more = await connection.read()
    if tells_engine_death(body, is_first=is_first):
        connection.abort()
        raise WorkerLostError(EngineFault.ENGINE_DEAD, "the worker says that its engine died")
    return body, more


def _may_answer_stream(head: ReplyHead) -> bool:
    """Return whether a head can be an engine's: errors may look like anything, what claims to be good may not."""
    return head.status != 200 or head.content_type in {b"text/event-stream", b"application/json"}


def _engine_lost() -> Refusal:
    return Refusal(
        503,
        "engine_lost",
        "the engine that had taken the request was lost before it answered; try again",
        retry_after_s=RETRY_AFTER_S,
    )
