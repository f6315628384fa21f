"""Streams that are silent for long: what the router says in them, when, and what becomes of errors after that."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from router_harness import RunningRouter, chat_body, post, raw_exchange, running_router, until
from scripted_worker import (
    STREAM_HEAD,
    Received,
    Script,
    answer_stream,
    chunk,
    event,
    never_answer,
    reply_bytes,
    reset,
    running_worker,
)

from coda_router.edge.events import KEEP_ALIVE_S, ends_event
from coda_router.edge.keepalive import LOOKS_PER_PERIOD
from coda_router.holding import HoldingLimits

pytestmark = pytest.mark.stress

PERIOD_S = 0.2
COMMENT = b": keep-alive\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'
WHOLE = event(0) + event(1) + event(2) + b"data: [DONE]\n\n"

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
KEEP_ALIVES = {CHAT: COMMENT, COMPLETIONS: COMMENT, RESPONSES: COMMENT, MESSAGES: PING}


async def streamed(
    router: RunningRouter, path: str = CHAT, heard: asyncio.Event | None = None, **fields: Any
) -> tuple[int, bytes, bool]:
    """Return status and body of a streaming request, and whether the body was ended rather than cut.

    ``heard`` is set at the first keep-alive.
    """
    request = {"model": "small", "stream": True, "messages": [{"role": "user", "content": "hi"}]} | fields
    body = b""
    async with router.session.post(f"{router.url}{path}", json=request) as reply:
        try:
            async for piece in reply.content.iter_any():
                body += piece
                if heard is not None and (COMMENT in body or PING in body):
                    heard.set()
        except aiohttp.ClientPayloadError:
            return reply.status, body, False
        return reply.status, body, True


def after(heard: asyncio.Event, script: Script) -> Script:
    """Answer only once the client has heard a keep-alive."""

    async def answer(request: Received) -> None:
        await heard.wait()
        await script(request)

    return answer


async def relay_events(router: RunningRouter, event_name: str) -> int:
    _, metrics = await router.get("/metrics")
    line = f'coda_router_relay_events_total{{event="{event_name}"}} '
    return int(float(metrics.partition(line)[2].partition("\n")[0]))


@pytest.mark.parametrize("path", KEEP_ALIVES)
async def test_a_stream_is_kept_alive_while_its_engine_prefills(path: str):
    heard = asyncio.Event()
    async with running_worker(script=after(heard, answer_stream)) as worker:
        async with running_router(worker, keep_alive_s=PERIOD_S) as router:
            status, body, is_whole = await streamed(router, path, heard)
            assert await relay_events(router, "KeptAlive") >= 1
    assert (status, is_whole) == (200, True)
    said, _, rest = body.partition(event(0))
    assert said
    assert not said.replace(KEEP_ALIVES[path], b"")
    assert event(0) + rest == WHOLE


async def test_a_stream_is_kept_alive_while_it_is_held_back():
    async with running_worker(waiting=64) as worker, running_router(worker, keep_alive_s=PERIOD_S) as router:
        async with router.session.post(f"{router.url}{CHAT}", json=json.loads(chat_body()) | {"stream": True}) as reply:
            assert reply.status == 200
            assert reply.headers["content-type"].startswith("text/event-stream")
            assert await reply.content.readuntil(b"\n\n") == COMMENT
            assert await reply.content.readuntil(b"\n\n") == COMMENT
            assert not worker.requests
            worker.waiting = 0
            assert (await reply.content.read()).endswith(WHOLE)


async def test_a_stream_that_begins_in_time_is_left_alone():
    async with running_worker() as worker, running_router(worker, keep_alive_s=10.0) as router:
        assert await streamed(router) == (200, WHOLE, True)
        assert await relay_events(router, "KeptAlive") == 0


async def test_silence_between_two_events_is_broken():
    heard = asyncio.Event()

    async def pause(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)))
        await heard.wait()
        request.writer.write(chunk(event(1)) + b"0\r\n\r\n")

    async with running_worker(script=pause) as worker, running_router(worker, keep_alive_s=PERIOD_S) as router:
        _, body, is_whole = await streamed(router, heard=heard)
    assert is_whole
    assert body.startswith(event(0) + COMMENT)
    assert body.replace(COMMENT, b"") == event(0) + event(1)


async def test_nothing_is_said_within_an_event():
    heard = asyncio.Event()

    async def pause_within(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0) + b"data: {"))
        await asyncio.sleep(3 * PERIOD_S)
        request.writer.write(chunk(b"}\n"))
        await asyncio.sleep(3 * PERIOD_S)
        request.writer.write(chunk(b"\n"))
        await heard.wait()
        request.writer.write(chunk(event(1)) + b"0\r\n\r\n")

    async with running_worker(script=pause_within) as worker, running_router(worker, keep_alive_s=PERIOD_S) as router:
        _, body, is_whole = await streamed(router, heard=heard)
    assert is_whole
    assert body.startswith(event(0) + b"data: {}\n\n" + COMMENT)
    assert body.replace(COMMENT, b"") == event(0) + b"data: {}\n\n" + event(1)


@pytest.mark.parametrize(
    ("tail", "expected"),
    [(b"", True), (b"x\n\n", True), (b"x\r\n\r\n", True), (b"x\r\r", True), (b"x\n", False), (b"x", False)],
)
def test_an_event_ends_with_an_empty_line(tail: bytes, expected: bool):
    assert ends_event(tail) is expected


async def test_a_stream_of_a_given_length_is_not_lengthened():
    body = event(0) + event(1)

    async def answer(request: Received) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: {len(body)}\r\n\r\n"
        request.writer.write(head.encode() + event(0))
        await asyncio.sleep(3 * PERIOD_S)
        request.writer.write(event(1))

    async with running_worker(script=answer) as worker, running_router(worker, keep_alive_s=PERIOD_S) as router:
        assert await streamed(router) == (200, body, True)


@pytest.mark.parametrize("stream", [False, None, "true", 1])
async def test_who_did_not_ask_for_a_stream_gets_the_reply_alone(stream: object):
    async def answer(request: Received) -> None:
        await asyncio.sleep(3 * PERIOD_S)
        request.writer.write(reply_bytes(b'{"n":1}', 418))

    async with running_worker(script=answer) as worker:
        async with running_router(worker, keep_alive_s=PERIOD_S) as router:
            assert await router.chat(stream=stream) == (418, b'{"n":1}')


async def test_without_a_period_nothing_is_said():
    async def answer_late(request: Received) -> None:
        await asyncio.sleep(3 * PERIOD_S)
        await answer_stream(request)

    async with running_worker(script=answer_late) as worker, running_router(worker, keep_alive_s=0) as router:
        assert await streamed(router) == (200, WHOLE, True)


def test_by_default_clients_hear_something_every_15_s():
    assert KEEP_ALIVE_S >= 10
    assert KEEP_ALIVE_S * (1 + 1 / LOOKS_PER_PERIOD) <= 15


ENGINE_ERROR = {"error": {"message": "too long", "type": "BadRequestError", "param": None, "code": 400}}
ANTHROPIC_ERROR = {"type": "error", "error": {"type": "invalid_request_error", "message": "too long"}}


def last_event(body: bytes, keep_alive: bytes) -> tuple[str, Any]:
    """Return name and data of the one event in a body that consists of keep-alives otherwise."""
    assert body.startswith(keep_alive)
    (said,) = (part for part in body.split(b"\n\n") if part + b"\n\n" not in {keep_alive, b"\n\n", b"data: [DONE]\n\n"})
    lines = dict(line.split(": ", 1) for line in said.decode().split("\n"))
    return lines.get("event", ""), json.loads(lines["data"])


async def late_error(path: str, status: int, document: object) -> tuple[int, bytes, bool]:
    async def refuse(request: Received) -> None:
        request.writer.write(reply_bytes(json.dumps(document, indent=1).encode(), status))

    heard = asyncio.Event()
    async with running_worker(script=after(heard, refuse)) as worker:
        async with running_router(worker, keep_alive_s=PERIOD_S) as router:
            reply = await streamed(router, path, heard)
            _, metrics = await router.get("/metrics")
    assert f'coda_router_requests_total{{endpoint="{path}",status="{status}"}} 1.0' in metrics
    return reply


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_an_engine_s_error_after_a_keep_alive_is_an_event_and_ends_the_stream_as_vllm_does(path: str):
    status, body, is_whole = await late_error(path, 400, ENGINE_ERROR)
    assert (status, is_whole) == (200, True)
    assert last_event(body, COMMENT) == ("", ENGINE_ERROR)
    assert body.endswith(b"\n\ndata: [DONE]\n\n")


async def test_an_engine_s_late_error_on_messages_is_an_error_event():
    _, body, is_whole = await late_error(MESSAGES, 400, ANTHROPIC_ERROR)
    assert is_whole
    assert last_event(body, PING) == ("error", ANTHROPIC_ERROR)


@pytest.mark.parametrize(("code", "expected"), [(400, "invalid_prompt"), ("context_length_exceeded",) * 2])
async def test_an_engine_s_late_error_on_responses_is_a_failed_response(code: object, expected: str):
    error = ENGINE_ERROR["error"] | {"code": code}
    _, body, is_whole = await late_error(RESPONSES, 400, {"error": error})
    assert is_whole
    name, failed = last_event(body, COMMENT)
    assert name == failed["type"] == "response.failed"
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["model"] == "small"
    assert failed["response"]["error"] == {"code": expected, "message": "too long"}


@pytest.mark.parametrize(
    ("path", "name"), [(CHAT, ""), (COMPLETIONS, ""), (RESPONSES, "response.failed"), (MESSAGES, "error")]
)
async def test_after_an_error_that_may_pass_the_stream_is_cut_not_ended(path: str, name: str):
    _, body, is_whole = await late_error(path, 500, ENGINE_ERROR)
    assert not is_whole
    assert last_event(body, KEEP_ALIVES[path])[0] == name
    assert b"[DONE]" not in body
    assert b"overloaded" not in body


async def test_what_is_no_stream_after_a_keep_alive_is_an_error():
    async def answer(request: Received) -> None:
        request.writer.write(reply_bytes(b'{"choices":[]}'))

    heard = asyncio.Event()
    async with running_worker(script=after(heard, answer)) as worker:
        async with running_router(worker, keep_alive_s=PERIOD_S) as router:
            _, body, is_whole = await streamed(router, heard=heard)
    assert not is_whole
    assert last_event(body, COMMENT)[1]["error"]["code"] == "engine_error"


async def test_an_error_before_the_first_keep_alive_keeps_its_status():
    async def refuse(request: Received) -> None:
        request.writer.write(reply_bytes(json.dumps(ENGINE_ERROR).encode(), 400))

    async with running_worker(script=refuse) as worker, running_router(worker, keep_alive_s=10.0) as router:
        status, body, _ = await streamed(router)
        assert (status, json.loads(body)) == (400, ENGINE_ERROR)


async def test_who_waited_too_long_in_the_queue_is_told_in_the_stream():
    limits = HoldingLimits(max_wait_s=6 * PERIOD_S)
    async with running_worker(waiting=64) as worker:
        async with running_router(worker, keep_alive_s=PERIOD_S, holding=limits) as router:
            chat = await streamed(router, CHAT)
            messages = await streamed(router, MESSAGES)
            responses = await streamed(router, RESPONSES)
            _, metrics = await router.get("/metrics")
    assert [is_whole for _, _, is_whole in (chat, messages, responses)] == [False] * 3
    assert last_event(chat[1], COMMENT)[1]["error"]["code"] == "queue_timeout"
    assert last_event(messages[1], PING)[1]["error"]["type"] == "overloaded_error"
    assert last_event(responses[1], COMMENT)[1]["response"]["error"]["code"] == "server_error"
    assert f'coda_router_requests_total{{endpoint="{CHAT}",status="503"}} 1.0' in metrics


async def die(request: Received) -> None:
    reset(request.writer)


async def test_an_engine_lost_after_a_keep_alive_is_replaced_as_long_as_nothing_of_it_was_passed_on():
    heard = asyncio.Event()
    async with running_worker(others_running=5) as healthy, running_worker(script=after(heard, die)) as dying:
        async with running_router(dying, healthy, keep_alive_s=PERIOD_S) as router:
            status, body, is_whole = await streamed(router, heard=heard)
    assert len(dying.requests) == len(healthy.requests) == 1
    assert (status, is_whole) == (200, True)
    assert body.startswith(COMMENT)
    assert body.replace(COMMENT, b"") == WHOLE


async def test_an_engine_lost_after_a_keep_alive_without_another_one_is_an_error_in_the_stream():
    heard = asyncio.Event()
    async with running_worker(script=after(heard, die)) as dying:
        async with running_router(dying, keep_alive_s=PERIOD_S) as router:
            status, body, is_whole = await streamed(router, heard=heard)
    assert (status, is_whole) == (200, False)
    assert last_event(body, COMMENT)[1]["error"]["code"] == "engine_lost"


async def test_an_engine_lost_after_its_first_event_resets_the_client_without_a_word():
    async def die_later(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)))
        await asyncio.sleep(3 * PERIOD_S)
        reset(request.writer)

    body = json.dumps(json.loads(chat_body()) | {"stream": True}).encode()
    async with running_worker(script=die_later) as worker, running_router(worker, keep_alive_s=PERIOD_S) as router:
        with pytest.raises(ConnectionResetError):
            await raw_exchange(router.port, post(CHAT, body))
        assert await relay_events(router, "Truncated") == 1


async def test_a_client_that_leaves_a_kept_alive_stream_frees_its_engine():
    body = json.dumps(json.loads(chat_body()) | {"stream": True}).encode()
    async with running_worker(script=never_answer) as worker:
        async with running_router(worker, keep_alive_s=PERIOD_S) as router:
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
            writer.write(post(CHAT, body, close=False))
            await reader.readuntil(COMMENT)
            writer.close()
            await until(worker.aborted.is_set, timeout_s=1.0)
            await until(lambda: router.router.dispatcher.fleet.workers[worker.name].in_flight_requests == 0)
            assert await relay_events(router, "ClientLeft") == 1


async def test_a_client_that_takes_nothing_is_not_talked_to():
    piece = b"data: " + b"x" * 65_536 + b"\n\n"
    pieces = 256
    is_sent = asyncio.Event()

    async def flood_then_pause(request: Received) -> None:
        request.writer.write(STREAM_HEAD)
        for _ in range(pieces):
            request.writer.write(chunk(piece))
        is_sent.set()
        await request.writer.drain()
        request.writer.write(b"0\r\n\r\n")

    body = json.dumps(json.loads(chat_body()) | {"stream": True}).encode()
    async with running_worker(script=flood_then_pause) as worker:
        async with running_router(worker, keep_alive_s=PERIOD_S) as router:
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1024)
            writer.write(post(CHAT, body))
            await is_sent.wait()
            await asyncio.sleep(4 * PERIOD_S)
            assert await relay_events(router, "KeptAlive") == 0
            received = 0
            while taken := await reader.read(2**20):
                received += len(taken)
            writer.close()
    assert received > pieces * len(piece)


@pytest.mark.parametrize("keep_alive_s", [10.0, 0.0])
async def test_a_stream_that_ends_within_an_event_is_cut_whether_streams_are_kept_alive_or_not(keep_alive_s: float):
    async def half_an_event(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)))
        await asyncio.sleep(0.02)
        request.writer.write(chunk(b'data: {"choi') + b"0\r\n\r\n")

    body = json.dumps(json.loads(chat_body()) | {"stream": True}).encode()
    async with (
        running_worker(script=half_an_event) as worker,
        running_router(worker, keep_alive_s=keep_alive_s) as router,
    ):
        with pytest.raises(ConnectionResetError):
            await raw_exchange(router.port, post(CHAT, body))
        _, metrics = await router.get("/metrics")
    assert 'coda_router_engine_faults_total{fault="HalfEvent"} 1.0' in metrics
