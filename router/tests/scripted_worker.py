"""A worker that speaks enough of vLLM's HTTP to be routed to, and that can misbehave at any point.

It is a real server on a real socket; only what it answers is scripted.
"""

import asyncio
import contextlib
import itertools
import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs, urlsplit

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.snapshot import Capability, EngineSnapshot, SessionDelta, SessionResidency

_instances = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Received:
    """A request as it arrived, and where to answer it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter

    def json(self) -> Any:
        return json.loads(self.body)


Script = Callable[[Received], Awaitable[None]]


def reply_bytes(body: bytes, status: int = 200, content_type: str = "application/json") -> bytes:
    return (
        f"HTTP/1.1 {status} Scripted\r\ncontent-type: {content_type}\r\ncontent-length: {len(body)}\r\n\r\n"
    ).encode() + body


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(number: int) -> bytes:
    return b'data: {"choices":[{"delta":{"content":"t%d"}}]}\n\n' % number


async def answer_stream(request: Received) -> None:
    """Three events, then the end, as vLLM frames them."""
    request.writer.write(STREAM_HEAD)
    for number in range(3):
        request.writer.write(chunk(event(number)))
        await request.writer.drain()
    request.writer.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def answer_whole(request: Received) -> None:
    """One JSON document."""
    request.writer.write(reply_bytes(b'{"choices":[{"message":{"content":"hello"}}]}'))


async def never_answer(request: Received) -> None:
    """Take the request and say nothing until the connection is closed."""
    await asyncio.Event().wait()


async def close_at_once(request: Received) -> None:
    """Die before the first byte."""
    reset(request.writer)


def reset(writer: asyncio.StreamWriter) -> None:
    """Reset a connection, as a killed process's kernel may do."""
    connected = writer.get_extra_info("socket")
    if connected is None:  # closed already
        return
    with contextlib.suppress(OSError):
        connected.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclass
class ScriptedWorker:
    """One worker; change its fields while it runs."""

    script: Script = answer_stream
    is_coda: bool = True
    models: list[str] = field(default_factory=lambda: ["small"])
    waiting: int = 0
    running: int = 0
    others_running: int = 0
    decode_context_tokens: list[int] = field(default_factory=list)
    draining: bool = False
    is_silent: bool = False
    is_healthy: bool = True
    internal_token: str | None = None
    router_id: str = ""
    port: int = 0
    requests: list[Received] = field(default_factory=list)
    resident: dict[str, int] = field(default_factory=dict)
    shadow: dict[str, int] = field(default_factory=dict)
    removed: list[str] = field(default_factory=list)
    connections: int = 0
    aborted: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.instance_id = f"instance-{next(_instances)}"
        self._version = itertools.count(1)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, limit=2**20)
        self.port = self._server.sockets[0].getsockname()[1]

    async def kill(self) -> None:
        """Vanish like a killed process: no listener, every connection reset."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for writer in list(self._writers):
            reset(writer)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def restart(self) -> None:
        """Come back on the same port with nothing resident."""
        await self.kill()
        self.instance_id = f"instance-{next(_instances)}"
        self.resident, self.shadow, self.removed = {}, {}, []
        await self.start()

    def snapshot(self) -> EngineSnapshot:
        return EngineSnapshot(
            instance_id=self.instance_id,
            version=next(self._version),
            published_at_s=0.0,
            started_at_s=0.0,
            draining=self.draining,
            served_models=self.models,
            max_context_tokens=8192,
            capabilities={Feature.IDENTITY: Capability(enabled=True, reason=Reason.ENABLED)},
            waiting_by_tier={0: self.waiting},
            running_by_tier={0: self.running + self.others_running},
            requests_by_router={self.router_id: self.waiting + self.running} if self.router_id else {},
            decode_context_tokens=self.decode_context_tokens,
        )

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        self.connections += 1
        try:
            while (request := await _read_request(reader, writer)) is not None:
                await self._dispatch(request, reader)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            self._writers.discard(writer)
            writer.close()

    async def _dispatch(self, request: Received, reader: asyncio.StreamReader) -> None:
        path = urlsplit(request.target).path
        if path == "/health":
            request.writer.write(reply_bytes(b"", 200 if self.is_healthy else 503))
        elif path == "/v1/models":
            models = {"object": "list", "data": [{"id": name} for name in self.models]}
            request.writer.write(reply_bytes(json.dumps(models).encode()))
        elif path.startswith("/coda/"):
            await self._coda(request, path)
        else:
            self.requests.append(request)
            await self._run_script(request, reader)

    async def _run_script(self, request: Received, reader: asyncio.StreamReader) -> None:
        """Answer, but notice when the router closes the connection meanwhile, as vLLM does."""
        answering = asyncio.ensure_future(self.script(request))
        watching = asyncio.ensure_future(_until_closed(reader))
        try:
            await asyncio.wait({answering, watching}, return_when=asyncio.FIRST_COMPLETED)
            if watching.done() and not answering.done():
                self.aborted.set()
                raise ConnectionResetError
            await answering
        finally:
            for task in (answering, watching):
                task.cancel()
            await asyncio.gather(answering, watching, return_exceptions=True)

    async def _coda(self, request: Received, path: str) -> None:
        wanted = f"Bearer {self.internal_token}"
        if not self.is_coda:
            request.writer.write(reply_bytes(b"{}", 404))
        elif self.internal_token and request.headers.get("authorization") != wanted:
            request.writer.write(reply_bytes(b"{}", 401))
        elif path == "/coda/snapshot":
            request.writer.write(STREAM_HEAD)
            while True:
                if not self.is_silent:
                    request.writer.write(chunk(self.snapshot().to_json() + b"\n"))
                    await request.writer.drain()
                await asyncio.sleep(0.02)
        elif path == "/coda/sessions":
            request.writer.write(reply_bytes(self._session_delta(request).to_json()))
        else:
            request.writer.write(reply_bytes(b"{}", 404))

    def _session_delta(self, request: Received) -> SessionDelta:
        query = parse_qs(urlsplit(request.target).query)
        since = int(query["since"][0]) if query.get("instance") == [self.instance_id] else 0
        return SessionDelta(
            instance_id=self.instance_id,
            since=since,
            version=since + 1,
            sessions=[
                SessionResidency(
                    key=key, hbm_tokens=self.resident.get(key, 0), shadow_tokens=self.shadow.get(key, 0), last_use_s=0.0
                )
                for key in self.resident | self.shadow
            ],
            removed=self.removed if since else [],
        )


@contextlib.asynccontextmanager
async def running_worker(**fields: Any) -> AsyncIterator[ScriptedWorker]:
    worker = ScriptedWorker(**fields)
    await worker.start()
    try:
        yield worker
    finally:
        await worker.kill()


async def _read_request(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Received | None:
    head = await reader.readuntil(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    method, target, _ = lines[0].split(" ")
    headers = {}
    for line in lines[1:]:
        name, separator, value = line.partition(":")
        if separator:
            headers[name.lower()] = value.strip()
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Received(method, target, headers, body, writer)


async def _until_closed(reader: asyncio.StreamReader) -> None:
    """Return when the peer closed; raises nothing, takes no bytes of a next request."""
    while not reader.at_eof() and reader.exception() is None:
        await asyncio.sleep(0.01)
