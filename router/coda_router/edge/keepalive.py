"""A stream's reply that says something while the request is held back or prefills, so that nobody cuts it off.

Proxies and clients close connections that are silent for a minute or less, and a long prompt behind a queue takes
longer. Until the first sign of life errors keep their status; after it they are events of the stream.
"""

import asyncio

from starlette.types import Send

from coda_router.edge.client import Client
from coda_router.edge.events import (
    LONGEST_EVENT_END_BYTES,
    closing_events,
    ends_event,
    engine_error_event,
    error_event,
    is_passing,
    keep_alive_event,
)
from coda_router.edge.protocols import Dialect, EventForm
from coda_router.edge.reply import Reply
from coda_router.errors import Refusal, WorkerLostError
from coda_router.faults import EngineFault
from coda_router.metrics import RouterMetrics
from coda_router.relay import RelayEvent
from coda_router.upstream.connection import ReplyHead

LOOKS_PER_PERIOD = 4
"""How often all streams are looked at in a period; one look more without a change than these is a period's silence."""

MAX_LATE_ERROR_BYTES = 64 * 1024
"""Most bytes kept of an engine's error that has to become an event."""

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class KeepAlives:
    """One timer for all streams of a router, so that neither a request nor a piece pays for one of its own.

    Args:
        period_s: Silence after which a stream says something, seconds; 0 = never.
    """

    def __init__(self, period_s: float) -> None:
        self._interval_s = period_s / LOOKS_PER_PERIOD
        self._replies: set[KeptAliveReply] = set()
        self._is_looking = False

    def watch(self, reply: "KeptAliveReply") -> None:
        """Look at a reply from now on."""
        if not self._interval_s:
            return
        self._replies.add(reply)
        if not self._is_looking:
            self._is_looking = True
            self._look_later()

    def forget(self, reply: "KeptAliveReply") -> None:
        """Do not look at a reply any more."""
        self._replies.discard(reply)

    def _look_later(self) -> None:
        asyncio.get_running_loop().call_later(self._interval_s, self._look)

    def _look(self) -> None:
        if not self._replies:
            self._is_looking = False
            return
        self._look_later()
        for reply in self._replies:
            reply.look()


class KeptAliveReply(Reply):
    """The reply to a request for a stream; pieces pay for nothing but to be remembered.

    Args:
        send: ASGI's.
        client: The client's connection.
        dialect: Whose error shape the client understands.
        metrics: Counts.
        received_at_s: When the request was received, event loop's time in seconds.
        keep_alives: Looks at this reply until it is closed.
        form: Whose events the stream consists of.
        model: Name of the model that was asked for.
    """

    def __init__(
        self,
        send: Send,
        client: Client,
        dialect: Dialect,
        metrics: RouterMetrics,
        received_at_s: float,
        keep_alives: KeepAlives,
        *,
        form: EventForm,
        model: str,
    ) -> None:
        super().__init__(send, client, dialect, metrics, received_at_s)
        self._form = form
        self._model = model
        self._keep_alives = keep_alives
        self._head: ReplyHead | None = None
        self._tail = b""
        self._seen_tail = self._tail
        self._quiet_looks = 0
        self._speaking: asyncio.Task[None] | None = None
        self._late_error: bytearray | None = None
        keep_alives.watch(self)

    async def start(self, head: ReplyHead) -> None:
        """Pass the head of an engine's reply on; only take note of it where a head was sent already."""
        if self._speaking is not None:
            await self._speaking
        if not self.status:
            self._head = head
            await super().start(head)
            return
        self._observe_first_byte()
        if not _is_stream(head):
            self.status = head.status if head.status >= 400 else 502
            self._late_error = bytearray()

    async def body(self, body: bytes, more: bool) -> None:
        """Pass a piece of an engine's reply on; waits for a slow client.

        Raises:
            WorkerLostError: The stream ended within an event; the client has what there was of it.
        """
        if self._speaking is not None:
            await self._speaking
        if self._late_error is not None:
            await self._take_late_error(self._late_error, body, more)
            return
        if len(body) >= LONGEST_EVENT_END_BYTES:
            self._tail = body
        elif body:
            self._tail = self._tail[-LONGEST_EVENT_END_BYTES:] + body
        if not more and not ends_event(self._tail) and self._takes_events():
            await super().body(body, True)
            raise WorkerLostError(EngineFault.HALF_EVENT, "the worker's stream ended within an event")
        await self._send({"type": "http.response.body", "body": body, "more_body": more})

    async def refuse(self, refusal: Refusal) -> None:
        """Answer with an error of the router's own, as an event where the stream has begun."""
        if self._speaking is not None:
            await self._speaking
        if not self.status:
            await super().refuse(refusal)
            return
        self.status = refusal.status
        await self._end_with(error_event(self._form, refusal, self._model))

    def close(self) -> None:
        """Say nothing any more."""
        self._keep_alives.forget(self)

    def look(self) -> None:
        """Say something if the stream has been silent for a period."""
        if self._tail is not self._seen_tail:
            self._seen_tail = self._tail
            self._quiet_looks = 1
            return
        self._quiet_looks += 1
        if self._quiet_looks > LOOKS_PER_PERIOD and self._may_speak():
            self._quiet_looks = 1
            self._speaking = asyncio.create_task(self._speak())

    def _may_speak(self) -> bool:
        """Return whether a keep-alive is in place: between two events, and not behind what the client has not taken."""
        if self._speaking is not None or self._late_error is not None or self._client.is_behind:
            return False
        return not self.status or (ends_event(self._tail) and self._takes_events())

    def _takes_events(self) -> bool:
        """Return whether events can be put into the reply: not if it is no stream, or one of a given length."""
        head = self._head
        return head is None or (_is_stream(head) and head.value(b"content-length") is None)

    async def _speak(self) -> None:
        try:
            if not self.status:
                self.status = 200
                await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
            await super().body(keep_alive_event(self._form), True)
            self._metrics.relay_event(RelayEvent.KEPT_ALIVE)
        finally:
            self._speaking = None

    async def _take_late_error(self, error: bytearray, body: bytes, more: bool) -> None:
        """Collect an engine's error whose status nobody can be told any more."""
        if len(error) <= MAX_LATE_ERROR_BYTES:
            error += body
        if not more:
            await self._end_with(engine_error_event(self._form, self.status, bytes(error), self._model))

    async def _end_with(self, event: bytes) -> None:
        """Send a last event.

        After an error that may pass, the stream is not ended but cut: a client that overlooks the event must not
        take what it has for a whole reply, and one that tries again on a lost connection shall.
        """
        if is_passing(self.status):
            await super().body(event, True)
            self._client.hang_up()
        else:
            await super().body(event + closing_events(self._form), False)


def _is_stream(head: ReplyHead) -> bool:
    """Return whether an engine's reply is a plain stream of events."""
    return head.status == 200 and head.content_type == b"text/event-stream" and head.value(b"content-encoding") is None
