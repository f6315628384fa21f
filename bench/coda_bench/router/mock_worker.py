"""A mock worker for load: replies are made once, and nothing of a request but its length is read.

``python -m coda_bench.router.mock_worker MODEL PORT...`` serves several workers in one process until it is ended.
``POST /pace`` with a JSON object sets how they answer.
"""

import asyncio
import json
import sys
from dataclasses import dataclass

import uvloop

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_EMPTY = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_NOT_FOUND = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"


@dataclass
class Answers:
    """How the workers of this process answer now."""

    first_event_s: float = 0.0
    gap_s: float = 0.0
    events: int = 32

    @property
    def event(self) -> bytes:
        """One event as a chunk."""
        data = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","choices":[{"delta":{"content":"word "}}]}'
        return b"%x\r\n%b\n\n\r\n" % (len(data) + 2, data)


class MockWorker(asyncio.Protocol):
    """One connection of a mock worker."""

    def __init__(self, answers: Answers, model: str) -> None:
        self._answers = answers
        body = json.dumps({"object": "list", "data": [{"id": model, "object": "model"}]}).encode()
        self._models = (
            b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        )
        self._received = bytearray()
        self._answering: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Remember the transport."""
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop answering."""
        if self._answering is not None:
            self._answering.cancel()

    def data_received(self, data: bytes) -> None:
        """Answer as soon as a request is whole."""
        self._received += data
        head_end = self._received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = bytes(self._received[:head_end]).lower()
        _, found, rest = head.partition(b"content-length:")
        length = int(rest.split(b"\r\n", 1)[0]) if found else 0
        if len(self._received) < head_end + 4 + length:
            return
        body = bytes(self._received[head_end + 4 :])
        self._received.clear()
        self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"post /pace"):
            for name, value in json.loads(body).items():
                setattr(self._answers, name, value)
            self._transport.write(_EMPTY)
        elif head.startswith(b"post "):
            if self._answers.first_event_s or self._answers.gap_s:
                self._answering = asyncio.get_running_loop().create_task(self._stream())
            else:
                self._transport.write(_HEAD + self._answers.event * self._answers.events + _END)
        elif b"/v1/models" in head:
            self._transport.write(self._models)
        elif b" /health" in head:
            self._transport.write(_EMPTY)
        else:
            self._transport.write(_NOT_FOUND)

    async def _stream(self) -> None:
        self._transport.write(_HEAD)
        await asyncio.sleep(self._answers.first_event_s)
        event = self._answers.event
        for _ in range(self._answers.events):
            self._transport.write(event)
            await asyncio.sleep(self._answers.gap_s)
        self._transport.write(_END)


async def serve(ports: list[int], model: str) -> None:
    """Serve a mock worker on each port of this machine until cancelled."""
    loop = asyncio.get_running_loop()
    answers = Answers()
    servers = [await loop.create_server(lambda: MockWorker(answers, model), "127.0.0.1", port) for port in ports]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    uvloop.run(serve([int(port) for port in sys.argv[2:]], sys.argv[1]))
