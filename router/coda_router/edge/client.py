"""A client's connection: uvicorn's protocol plus the two things that ASGI cannot say."""

import socket
import struct
from collections.abc import Callable
from typing import Any, Protocol

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

CLIENT_EXTENSION = "coda.client"
"""Name of the ASGI extension under which a scope carries its :class:`Client`."""

MAX_HEADER_BYTES = 64 * 1024
"""Most bytes of header names and values in one request."""

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Client(Protocol):
    """What the data path needs of a client's connection."""

    is_lost: bool

    def watch(self, on_lost: Callable[[], object] | None) -> None:
        """Call ``on_lost`` as soon as the client is gone; None stops watching."""
        ...

    def abort(self) -> None:
        """End the connection so that the client cannot take a truncated reply for a whole one."""
        ...


class ClientProtocol(HttpToolsProtocol):
    """uvicorn's HTTP/1.1 protocol that also tells at once about a lost client and can reset the connection.

    ASGI offers a lost client only to a task that awaits ``receive()``: one more task for each request.
    """

    is_lost = False
    _on_lost: Callable[[], object] | None = None
    _header_bytes = 0

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
        if self.cycle is not None:
            self.cycle.disconnected = True
        client_socket = self.transport.get_extra_info("socket")
        if client_socket is not None and client_socket.fileno() >= 0:
            client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever watches."""
        super().connection_lost(exc)
        self.is_lost = True
        if self._on_lost is not None:
            self._on_lost()

    def on_message_begin(self) -> None:
        """Hand this connection to the application in the request's scope."""
        super().on_message_begin()
        self._header_bytes = 0
        extensions: dict[str, Any] = {CLIENT_EXTENSION: self}
        self.scope["extensions"] = extensions

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header, within bounds."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > MAX_HEADER_BYTES:
            # Raising inside a parser callback makes uvicorn answer 400 and close.
            raise ValueError("request headers are too large")
        super().on_header(name, value)
