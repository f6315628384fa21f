"""A client's connection: uvicorn's protocol plus the two things that ASGI cannot say."""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

CLIENT_EXTENSION = "coda.client"
"""Name of the ASGI extension under which a scope carries its :class:`Client`."""

MAX_HEADER_BYTES = 64 * 1024
"""Most bytes of header names and values in one request, and of anything else that is not body."""

HEAD_TIMEOUT_S = 60.0
"""Longest time that a client may take to send a request's head, from its connection or the head's first byte on."""

MAX_PIPELINED = 8
"""Most requests that may wait on one connection for the replies to those before them."""

MAX_WAITING_BODY_BYTES = 1024 * 1024
"""Bytes of a waiting request's body beyond which nothing more is read, not even the client's end."""

_KEEPALIVE_OPTIONS = (
    # A client that vanished without closing its connection, or takes nothing of its reply any more, is noticed
    # within two minutes, however silent the reply is meanwhile.
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000),
)

_BODY_HEADERS = frozenset({b"content-length", b"transfer-encoding"})

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Client(Protocol):
    """What the data path needs of a client's connection."""

    is_lost: bool

    @property
    def is_behind(self) -> bool:
        """Whether the client has yet to take much of what was sent."""
        ...

    @property
    def has_whole_request(self) -> bool:
        """Whether all of the running request's body is here."""
        ...

    def watch(self, on_lost: Callable[[], object] | None) -> None:
        """Call ``on_lost`` as soon as the client is gone; None stops watching."""
        ...

    def abort(self) -> None:
        """End the connection so that the client cannot take a truncated reply for a whole one."""
        ...

    def hang_up(self) -> None:
        """End the connection in the same way, but only after all that was sent."""
        ...


class ClientProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol that also tells at once about a lost client and can reset the connection.

    ASGI offers a lost client only to a task that awaits ``receive()``: one more task for each request.
    It also bounds what uvicorn does not: the size of a request's head, the time until it is there, and the number
    of requests that wait for their turn.
    """

    is_lost = False
    _on_lost: Callable[[], object] | None = None
    _running: RequestResponseCycle | None = None  # uvicorn's ``cycle`` is the newest one, which may have to wait
    _header_bytes = 0
    _undelivered_bytes = 0
    _is_in_head = False
    _head_timer: asyncio.TimerHandle | None = None

    @property
    def is_behind(self) -> bool:
        """Whether the client has yet to take much of what was sent."""
        return self.flow.write_paused

    @property
    def has_whole_request(self) -> bool:
        """Whether all of the running request's body is here."""
        return self._running is not None and not self._running.more_body

    def watch(self, on_lost: Callable[[], object] | None) -> None:
        """Call ``on_lost`` as soon as the client is gone; None stops watching."""
        self._on_lost = on_lost
        if on_lost is None:
            return
        if self.is_lost:
            on_lost()
        else:
            # A body beyond uvicorn's high-water mark leaves reading paused, and then nobody notices the end.
            self.flow.resume_reading()

    def abort(self) -> None:
        """Reset the connection: a truncated reply must never look like a whole one."""
        self._disconnect_running()
        client_socket = self.transport.get_extra_info("socket")
        if client_socket is not None and client_socket.fileno() >= 0:
            client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    def hang_up(self) -> None:
        """Close once all that was sent is on its way; the reply's end is not."""
        self._disconnect_running()
        self.transport.close()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first request."""
        super().connection_made(transport)
        connected_socket = transport.get_extra_info("socket")
        for level, option, value in _KEEPALIVE_OPTIONS:
            connected_socket.setsockopt(level, option, value)
        self._await_head()

    def data_received(self, data: bytes) -> None:
        """Parse what arrived; refuse a client that goes on sending without ever coming to a head's end or a body."""
        self._undelivered_bytes += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._undelivered_bytes > MAX_HEADER_BYTES:
            self.send_400_response("Request head is too large.")
        elif self._head_timer is None and self.cycle is not None and self.cycle.response_complete:
            # uvicorn has stopped its keep-alive timer, and this was not yet a whole head.
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever watches."""
        super().connection_lost(exc)
        self._disconnect_running()
        self._end_awaiting_head()
        self.is_lost = True
        if self._on_lost is not None:
            self._on_lost()

    def on_message_begin(self) -> None:
        """Hand this connection to the application in the request's scope, unless too many requests wait already."""
        if len(self.pipeline) >= MAX_PIPELINED:
            # An answer would get into the running reply.
            self.abort()
            raise ValueError("too many pipelined requests")
        super().on_message_begin()
        self._is_in_head = True
        self._header_bytes = 0
        extensions: dict[str, Any] = {CLIENT_EXTENSION: self}
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header, within bounds; a trailer is none and is dropped."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            # Raising inside a parser callback makes uvicorn answer 400 and close.
            raise ValueError("request headers are too large")
        if self._is_in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Hand the request to the application."""
        self._is_in_head = False
        self._undelivered_bytes = 0
        self._end_awaiting_head()
        if self.parser.should_upgrade() and any(name in _BODY_HEADERS for name, _ in self.headers):
            # The parser takes what follows for the other protocol, not for a body: it would be lost, or, arriving
            # on its own, be read as a request. (curl --http2 and Java's client ask for h2c unless told not to.)
            raise ValueError("a request with a body must not ask for another protocol")
        super().on_headers_complete()
        if not self.pipeline:
            self._running = self.cycle
        self._read_on()

    def on_body(self, body: bytes) -> None:
        """Collect a piece of the body."""
        self._undelivered_bytes = 0
        super().on_body(body)
        self._read_on()

    def on_message_complete(self) -> None:
        """Mark the request's end."""
        self._undelivered_bytes = 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Go on with the request that has waited longest."""
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()

    def _read_on(self) -> None:
        """Notice the end of a client whose reply is under way, although uvicorn stops reading for a request behind."""
        if self._on_lost is not None and len(self.cycle.body) <= MAX_WAITING_BODY_BYTES:
            self.flow.resume_reading()

    def _disconnect_running(self) -> None:
        """Tell uvicorn that the running request's reply will not be completed."""
        if self._running is not None:
            self._running.disconnected = True

    def _await_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self._on_slow_head)

    def _end_awaiting_head(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if not self.transport.is_closing():
            self.transport.close()
