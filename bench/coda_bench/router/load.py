"""A closed loop of streaming requests: a fixed number of connections, each with one request in flight.

``python -m coda_bench.router.load FILE`` reads a :class:`Load` as JSON from standard input, says on standard
output when counting begins and ends, and writes a :class:`LoadResult` as JSON to FILE: it has a time for each
request and may be far larger than a pipe takes at once. A process of its own, so that nothing shares its
interpreter.
"""

import asyncio
import contextlib
import gc
import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import uvloop

LAST_REPLIES_S = 5.0
"""Time that requests in flight get at the end."""

_END = b"0\r\n\r\n"
_OK = b"HTTP/1.1 200"


@dataclass(frozen=True, slots=True)
class Load:
    """What to send where.

    Attributes:
        ports: Ports of this machine, used in turn by the connections.
        model: Model to ask for.
        body_bytes: Size of each body.
        concurrency: Connections.
        warm_up_s: Time over which the connections start, and again before figures count.
        duration_s: Time during which they count.
    """

    ports: list[int]
    model: str
    body_bytes: int
    concurrency: int
    warm_up_s: float
    duration_s: float


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What came of it, within the time that counts.

    Attributes:
        requests: Requests answered whole.
        errors: Requests that failed.
        seconds: Time that counted.
        first_event_ms: Time to the first event, of each request.
    """

    requests: int
    errors: int
    seconds: float
    first_event_ms: list[float]


class _Connection(asyncio.Protocol):
    def __init__(self, run: "_Run", request: bytes) -> None:
        self._run = run
        self._request = request
        self._closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._send()

    def _send(self) -> None:
        self._is_first = True
        self._head = b""
        self._tail = b""
        self._sent_at_s = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        if self._is_first:
            self._head += data
            if b"data:" in self._head:
                self._is_first = False
                self._first_event_ms = (time.perf_counter() - self._sent_at_s) * 1000
            elif b"\r\n\r\n" in self._head and not self._head.startswith(_OK):
                self._transport.abort()  # counted as it is lost
                return
        self._tail = (self._tail + data[-5:])[-5:]
        if self._tail == _END:
            self._run.done(self._first_event_ms)
            if self._run.is_over:
                self._transport.close()
            else:
                self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        self._run.lost(self)


class _Run:
    def __init__(self, load: Load) -> None:
        self._load = load
        self._connections: set[_Connection] = set()
        self.first_event_ms: list[float] = []
        self.errors = 0
        self.is_counting = False
        self.is_over = False
        self._all_closed = asyncio.Event()

    def done(self, first_event_ms: float) -> None:
        if self.is_counting:
            self.first_event_ms.append(first_event_ms)

    def lost(self, connection: _Connection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._all_closed.set()
        if not self.is_over:
            self.errors += 1

    async def run(self) -> LoadResult:
        loop = asyncio.get_running_loop()
        for index in range(self._load.concurrency):
            port = self._load.ports[index % len(self._load.ports)]
            request = _request(self._load, index)
            _, connection = await loop.create_connection(partial(_Connection, self, request), "127.0.0.1", port)
            self._connections.add(connection)
            # Not all at once: paced replies would keep the connections in step for ever, and every figure would
            # be that of a burst of `concurrency` requests.
            await asyncio.sleep(self._load.warm_up_s / self._load.concurrency)
        await asyncio.sleep(self._load.warm_up_s)
        self.is_counting, counted_from_s = True, time.monotonic()
        # The orchestrator reads the router's CPU time at the same two moments.
        print("counting", flush=True)
        await asyncio.sleep(self._load.duration_s)
        self.is_counting, seconds = False, time.monotonic() - counted_from_s
        print("counted", flush=True)
        self.is_over = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_REPLIES_S):
                await self._all_closed.wait()
        return LoadResult(len(self.first_event_ms), self.errors, seconds, self.first_event_ms)


def _request(load: Load, index: int) -> bytes:
    text = f"conversation {index} "
    filler = load.body_bytes - len(_body(load.model, text))
    body = _body(load.model, text + "x" * max(filler, 0))
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
        f"x-session-id: bench-{index}\r\naccept: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _body(model: str, text: str) -> bytes:
    messages = [{"role": "user", "content": text}]
    return json.dumps({"model": model, "stream": True, "max_tokens": 32, "messages": messages}).encode()


def main() -> None:
    """Run one load."""
    load = Load(**json.loads(sys.stdin.readline()))
    gc.disable()
    result = uvloop.run(_Run(load).run())
    Path(sys.argv[1]).write_text(json.dumps(asdict(result)))


if __name__ == "__main__":
    main()
