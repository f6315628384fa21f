"""One keep-alive HTTP/1.1 connection to a worker, for one exchange at a time.

Replies are handed on as the bytes that arrive: everything that one socket read brought is one chunk, so a
burst of events costs one wake-up. A slow reader stops the socket's reading, never grows a buffer.
"""

import asyncio
import socket
from dataclasses import dataclass
from typing import cast

import httptools

from coda_router.errors import WorkerLostError
from coda_router.faults import EngineFault

PAUSE_READING_BYTES = 256 * 1024
"""Unread reply bytes at which reading from the worker stops until the client has taken them."""

MAX_BODYLESS_BYTES = 64 * 1024
"""Most bytes that may come without any byte of a body: heads, interim replies, framing, trailers."""

_KEEPALIVE_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    # A node that vanished without closing its connections is noticed within 30 s.
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000),
)


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """Status and headers of a reply.

    Attributes:
        status: HTTP status.
        headers: Names (lower case) and values in the order in which they arrived.
    """

    status: int
    headers: list[tuple[bytes, bytes]]

    def value(self, name: bytes) -> bytes | None:
        """Return a header's value, the first one if there are several; None without."""
        for other, value in self.headers:
            if other == name:
                return value
        return None

    @property
    def content_type(self) -> bytes:
        """The media type in lower case, without parameters; empty without."""
        return (self.value(b"content-type") or b"").partition(b";")[0].strip().lower()


class UpstreamConnection(asyncio.Protocol):
    """A connection to one worker.

    Use: :meth:`send`, then :meth:`head`, then :meth:`read` until it returns no more; then give it back to
    its pool, which keeps it only if :attr:`is_reusable`.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._exchanges = 0
        self._is_idle = True
        self._is_closed = False
        self._is_paused = False
        self._is_out_of_step = False
        self._reset()

    def _reset(self) -> None:
        self._headers: list[tuple[bytes, bytes]] = []
        self._status = 0
        self._is_framed = False
        self._is_complete = False
        self._keep_alive = False
        self._chunks: list[bytes] = []
        self._unread_bytes = 0
        self._bodyless_bytes = 0
        self._error: WorkerLostError | None = None

    @property
    def is_open(self) -> bool:
        """Whether the connection is still up, as far as the kernel has told."""
        return not self._is_closed

    @property
    def is_reusable(self) -> bool:
        """Whether the last reply ended completely and another request may follow on this connection."""
        return self._is_complete and self._keep_alive and not self._is_closed and not self._chunks

    @property
    def said_too_much(self) -> bool:
        """Whether bytes came that belong to no reply; the one before them is good, the connection is not."""
        return self._is_out_of_step

    @property
    def waiter(self) -> asyncio.Future[None] | None:
        """What the reader waits for, another one after every receipt; None while it waits for nothing."""
        return self._waiter

    def send(self, head: bytes, body: bytes) -> None:
        """Send one request; ``head`` ends with the empty line."""
        if self._transport is None or self._is_closed:
            raise WorkerLostError(EngineFault.CLOSED, "connection was closed while idle", was_reused=True)
        self._reset()
        self._is_idle = False
        self._exchanges += 1
        self._transport.writelines((head, body))

    async def head(self) -> ReplyHead:
        """Return the reply's head once the first bytes of its body (or its end) have arrived as well.

        vLLM sends the head of a stream before the first token exists. Waiting for the first byte of the body
        keeps the request free to move to another engine for as long as nothing of it was seen.

        Raises:
            WorkerLostError: The connection ended, or spoke something else than HTTP, before or together with that.
        """
        while True:
            if self._error is not None:
                # Also with a piece of the body at hand: nobody has seen it, so another engine can still answer.
                raise self._error
            if self._chunks or self._is_complete:
                return ReplyHead(self._status, self._headers)
            await self._wait()

    async def read(self) -> tuple[bytes, bool]:
        """Return what has arrived of the body since the last call, and whether more will follow.

        Raises:
            WorkerLostError: The connection ended before the reply was complete.
        """
        while not self._chunks and not self._is_complete:
            if self._error is not None:
                raise self._error
            await self._wait()
        chunks = self._chunks
        body = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        self._chunks = []
        self._unread_bytes = 0
        self._bodyless_bytes = 0
        if self._is_paused and self._transport is not None:
            self._is_paused = False
            self._transport.resume_reading()
        return body, not self._is_complete

    def abort(self) -> None:
        """Close at once; the worker sees its client disconnect and aborts the request."""
        self._is_closed = True
        if self._transport is not None:
            self._transport.abort()

    def lose(self, fault: EngineFault, message: str) -> None:
        """Close at once and end the exchange as lost."""
        self.abort()
        self._fail(fault, message)

    async def _wait(self) -> None:
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _fail(self, fault: EngineFault, message: str) -> None:
        if self._error is None and not self._is_complete:
            was_reused = fault is EngineFault.CLOSED and self._exchanges > 1 and self._status == 0
            self._error = WorkerLostError(fault, message, was_reused=was_reused)
        self._wake()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport and set the socket up for small, prompt writes."""
        # uvloop's transports are no subclass of asyncio's, only like it.
        self._transport = cast("asyncio.Transport", transport)
        connected_socket = transport.get_extra_info("socket")
        for level, option, value in _KEEPALIVE_OPTIONS:
            connected_socket.setsockopt(level, option, value)

    def data_received(self, data: bytes) -> None:
        """Parse what arrived and wake the reader."""
        if self._is_idle:
            # Nothing was asked: whatever this is belongs to no request of ours.
            self._is_out_of_step = True
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._is_out_of_step = self._is_complete
            self.lose(EngineFault.NOT_HTTP, f"the worker's reply is not HTTP/1.1: {error}")
            return
        if not self._chunks:
            self._bodyless_bytes += len(data)
            if self._bodyless_bytes > MAX_BODYLESS_BYTES:
                self.lose(EngineFault.NO_BODY, f"the worker sent {self._bodyless_bytes} bytes and no body")
                return
        if self._unread_bytes > PAUSE_READING_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """End the exchange: completely if only the end of the connection marks its end, else as lost."""
        self._is_closed = True
        if exc is None and self._status and not self._is_framed and not self._is_complete and not self._error:
            self._is_complete = True
            self._wake()
            return
        self._fail(EngineFault.CLOSED, f"the worker closed the connection{f' ({exc})' if exc else ''}")

    # httptools callbacks

    def on_message_begin(self) -> None:
        """Notice a second reply to one request: the connection is out of step and must not be used again."""
        if self._is_complete:
            self._is_out_of_step = True
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header of the reply's head; a trailer is none."""
        if self._is_out_of_step or self._status:
            return
        name = name.lower()
        if name in {b"content-length", b"transfer-encoding"}:
            self._is_framed = True
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Take the status, unless it is an interim one (1xx)."""
        if self._is_out_of_step:
            return
        status = self._parser.get_status_code()
        if 100 <= status < 200:
            self._headers = []
            self._is_framed = False
            return
        self._status = status
        if not 200 <= status < 600:
            self.lose(EngineFault.STATUS, f"the worker's reply has the status {status}")

    def on_body(self, body: bytes) -> None:
        """Collect a piece of the body."""
        if self._is_out_of_step:
            return
        self._chunks.append(body)
        self._unread_bytes += len(body)

    def on_message_complete(self) -> None:
        """Mark the reply's end."""
        if self._status:
            self._is_complete = True
            self._is_idle = True
            self._keep_alive = self._parser.should_keep_alive()
