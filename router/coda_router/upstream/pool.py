"""Keep-alive connections to one worker."""

import asyncio
from collections import deque
from collections.abc import Iterable
from weakref import WeakSet

from coda_router.errors import WorkerLostError
from coda_router.faults import EngineFault
from coda_router.upstream.connection import UpstreamConnection

CONNECT_TIMEOUT_S = 3.0
"""Longest time to wait for a worker to accept a connection."""

MAX_IDLE_S = 3.5
"""Longest time a connection is kept unused: vLLM's server closes its own after 5 s."""

MAX_IDLE_CONNECTIONS = 256
"""Most unused connections kept to one worker."""


class ConnectionPool:
    """The connections to one worker; the most recently used is used first, so that the others can age out."""

    def __init__(self, host: str, port: int) -> None:
        self._host = host
        self._port = port
        self._idle: deque[tuple[float, UpstreamConnection]] = deque()
        self._connections: WeakSet[UpstreamConnection] = WeakSet()
        self._is_closed = False

    @property
    def connections(self) -> Iterable[UpstreamConnection]:
        """The connections that were made and may still be in use, idle ones included."""
        return self._connections

    def take_idle(self) -> UpstreamConnection | None:
        """Return an open connection that was used a moment ago, or None."""
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            idle_since_s, connection = self._idle.pop()
            if connection.is_open and now_s - idle_since_s < MAX_IDLE_S:
                return connection
            connection.abort()
        return None

    async def connect(self) -> UpstreamConnection:
        """Return a new connection.

        Raises:
            WorkerLostError: The worker did not accept it in time.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                _, connection = await loop.create_connection(lambda: UpstreamConnection(loop), self._host, self._port)
        except TimeoutError as error:
            message = f"no connection to {self._host}:{self._port} in {CONNECT_TIMEOUT_S:g} s"
            raise WorkerLostError(EngineFault.UNREACHABLE, message) from error
        except OSError as error:
            message = f"no connection to {self._host}:{self._port}: {error}"
            raise WorkerLostError(EngineFault.UNREACHABLE, message) from error
        self._connections.add(connection)
        return connection

    def give_back(self, connection: UpstreamConnection) -> None:
        """Keep a connection whose reply ended completely; close any other."""
        if self._is_closed or not connection.is_reusable or len(self._idle) >= MAX_IDLE_CONNECTIONS:
            connection.abort()
            return
        now_s = asyncio.get_running_loop().time()
        self._idle.append((now_s, connection))
        while now_s - self._idle[0][0] >= MAX_IDLE_S:
            self._idle.popleft()[1].abort()

    def close(self) -> None:
        """Close every unused connection, for good; those in use end with their requests."""
        self._is_closed = True
        while self._idle:
            self._idle.pop()[1].abort()
