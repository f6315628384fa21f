"""Thousands of requests that make little sense, the same ones each time: no failure inside, no hang, no leak."""

import asyncio
import json
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from router_harness import RunningRouter, post, running_router, until
from scripted_worker import (
    STREAM_HEAD,
    Received,
    answer_stream,
    answer_whole,
    chunk,
    event,
    reply_bytes,
    reset,
    running_worker,
)

from coda_router.edge.protocols import ENDPOINTS

pytestmark = pytest.mark.stress

CASES = 20_000 if os.environ.get("CODA_TEST_LONG") else 2_500
AT_ONCE = 8
HANG_S = 30.0
UNREAD_BYTES = 32_768

PATHS = [
    *ENDPOINTS, *ENDPOINTS,
    "/v1/responses/resp_1", "/v1/responses/resp_1/cancel", "/v1/responses/%2e%2e/x", "/v1/responses/",
    "/v1/models", "/v1/models/small", "/v1/models/%00%0a%ff", "/v1/", "/v1/%F0%9F%92%A9",
    "/", "/health", "/healthz", "/readyz", "/metrics", "/coda/status", "/coda/decisions", "/coda/settings", "/nowhere",
]  # fmt: skip
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE"]

DOCUMENTS: list[dict[str, Any]] = [
    {"model": "small", "stream": True, "messages": [{"role": "user", "content": "hi"}], "tools": [{"name": "t"}]},
    {"model": "small", "messages": [{"role": "system", "content": [{"type": "text", "text": "x"}]}], "n": 1},
    {"model": "small", "system": [{"type": "text", "text": "x"}], "metadata": {"user_id": '{"session_id":"s"}'}},
    {"model": "small", "input": [{"role": "user", "content": "hi"}], "previous_response_id": "resp_1", "store": True},
    {"model": "small", "prompt": ["a", "b"], "session_id": "s", "priority": 1, "cache_salt": "x", "vllm_xargs": {}},
    {"version": 1, "placement": {"policy": "coda"}},
]

ODD_JSON = [
    b"null", b"true", b"false", b"0", b"-0.0", b"1e400", b"9" * 400, b'""', b'"\\u0000\\n"', b'"\\ud800"', b'"\xff"',
    b"[]", b"{}", b"[[[[]]]]", b"[" * 600 + b"]" * 600, b'{"a":' * 300 + b"1" + b"}" * 300, b'{"a":1,"a":2}',
    b'"' + b"x" * 70_000 + b'"', b"NaN", b"", b"[,]", b'"small"', b'"x-anthropic-billing-header: a=b;"',
]  # fmt: skip

ODD_HEADERS = [
    b"x-coda-session: " + b"s" * 5000, b"x-coda-session: \xff\xfe", b"session-id: ", b"x-session-id: coda1.a.b",
    b"authorization: Bearer", b"authorization: Basic \xff", b"accept-encoding: gzip, br", b"expect: 100-continue",
    b"content-type: multipart/form-data; boundary=x", b"connection: x-a, keep-alive", b"x-a: 1", b"cookie: a=b",
    b"x-claude-code-session-id: a", b"x-claude-code-agent-id: b", b"transfer-encoding: chunked", b"te: trailers",
    b"content-length: 3", b"host: other", b"upgrade: websocket", b"x-forwarded-for: 1.2.3.4\x00", b": x", b" folded: 1",
]  # fmt: skip

QUERIES = [b"", b"", b"", b"?", b"?stream=true", b"?since=-1", b"?since=" + b"9" * 30, b"?since=x", b"?%00=%ff&&&==#"]


@dataclass(frozen=True)
class Case:
    """One request's bytes, and whether its end may be missing or disputed."""

    sent: bytes
    is_whole: bool


def cases(seed: int) -> Iterator[Case]:
    choose = random.Random(seed)
    for _ in range(CASES):
        body = odd_body(choose)
        headers = [b"host: r", b"connection: close", *choose.sample(ODD_HEADERS, choose.choice((0, 0, 0, 1, 2)))]
        if choose.random() < 0.2:
            headers.append(b"transfer-encoding: chunked")
            framed = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces(choose, body)) + b"0\r\n\r\n"
        else:
            headers.append(b"content-length: %d" % len(body))
            framed = body
        path = choose.choice(PATHS)
        method = "POST" if path in ENDPOINTS and choose.random() < 0.9 else choose.choice(METHODS)
        line = b"%b %b%b HTTP/1.1" % (method.encode(), path.encode(), choose.choice(QUERIES))
        sent = b"\r\n".join((line, *headers, b"", framed))
        is_whole = len(headers) == 3
        if choose.random() < 0.1:
            sent, is_whole = damaged(choose, sent), False
        yield Case(sent, is_whole)


def odd_body(choose: random.Random) -> bytes:
    """Return a request's document with something odd in it."""
    document = choose.choice(DOCUMENTS)
    fields = [(name, json.dumps(value).encode()) for name, value in document.items()]
    for _ in range(choose.choice((0, 1, 1, 2))):
        name, _ = choose.choice(fields)
        fields.append((choose.choice((name, name, "x", "stream", "model")), choose.choice(ODD_JSON)))
    if choose.random() < 0.5:
        choose.shuffle(fields)
    body = b"{" + b",".join(b'"%b":%b' % (name.encode(), value) for name, value in fields) + b"}"
    return damaged(choose, body) if choose.random() < 0.1 else body


def damaged(choose: random.Random, data: bytes) -> bytes:
    """Return the bytes with some of them lost, doubled or changed, or without their end."""
    if not data:
        return data
    start = choose.randrange(len(data))
    end = min(len(data), start + choose.choice((1, 2, 10, 1000)))
    match choose.randrange(4):
        case 0:
            return data[:start] + data[end:]
        case 1:
            return data[:end] + data[start:]
        case 2:
            return data[:start] + bytes(choose.randrange(256) for _ in range(end - start)) + data[end:]
        case _:
            return data[:start]


def pieces(choose: random.Random, body: bytes) -> Iterator[bytes]:
    while body:
        size = choose.choice((1, 7, 1000, 70_000))
        yield body[:size]
        body = body[size:]


async def exchange(router: RunningRouter, case: Case) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
    try:
        writer.write(case.sent)
        if not case.is_whole:
            # Nothing more will come: what the router still waits for is over.
            writer.write_eof()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def check(router: RunningRouter, case: Case) -> None:
    async with asyncio.timeout(HANG_S):
        raw = await exchange(router, case)
    start = case.sent[:200]
    assert b" 500 " not in raw[:20], start
    # The answer to a large body that nobody wants may be lost, since the connection is closed at once.
    if case.is_whole and len(case.sent) < UNREAD_BYTES:
        assert raw.startswith(b"HTTP/1.1 "), start


async def test_requests_without_sense_do_no_harm(caplog: pytest.LogCaptureFixture):
    async def answer(request: Received) -> None:
        await (answer_stream if b'"stream": true' in request.body else answer_whole)(request)

    async with running_worker(script=answer) as worker, running_router(worker) as router:
        queue = iter(cases(seed=20_301_205))

        async def take_cases() -> None:
            for case in queue:
                await check(router, case)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(AT_ONCE):
                tasks.create_task(take_cases())
        (known,) = router.router.dispatcher.fleet.workers.values()
        await until(lambda: known.in_flight_requests == 0)
        assert len(router.router.dispatcher.holding) == 0
        assert (await router.chat())[0] == 200
        _, metrics = await router.get("/metrics")
    assert len(worker.requests) > CASES // 10
    assert 'status="500"' not in metrics
    assert not [record for record in caplog.records if record.exc_info and record.name.startswith("coda")]


REPLIES = [
    STREAM_HEAD + b"".join(chunk(event(n)) for n in range(3)) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
    reply_bytes(b'{"choices":[{"message":{"content":"hello"}}]}'),
    reply_bytes(b'{"error":{"message":"no","type":"BadRequestError","code":400}}', 400),
    b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + reply_bytes(b"{}"),
]


async def test_replies_without_sense_do_no_harm(caplog: pytest.LogCaptureFixture):
    choose = random.Random(20_301_205)

    async def answer(request: Received) -> None:
        reply = damaged(choose, choose.choice(REPLIES))
        for piece in pieces(choose, reply):
            request.writer.write(piece)
            await asyncio.sleep(0)
        if choose.random() < 0.5:
            reset(request.writer)
        else:
            request.writer.close()

    body = b'{"model":"small","stream":true,"messages":[]}'
    async with running_worker(script=answer) as worker, running_router(worker) as router:
        for _ in range(CASES // 5):
            async with asyncio.timeout(HANG_S):
                raw = await exchange(router, Case(post("/v1/chat/completions", body), is_whole=True))
            assert b" 500 " not in raw[:20]
        (known,) = router.router.dispatcher.fleet.workers.values()
        await until(lambda: known.in_flight_requests == 0)
        worker.script = answer_whole
        assert (await router.chat())[0] == 200
        _, metrics = await router.get("/metrics")
    assert 'status="500"' not in metrics
    assert not [record for record in caplog.records if record.exc_info and record.name.startswith("coda")]
