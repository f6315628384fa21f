"""The data path: bytes, connections, failures of either side."""

import asyncio
import json

import pytest
from router_harness import SECRET, chat_body, post, raw_exchange, running_router, until
from scripted_worker import (
    STREAM_HEAD,
    Received,
    answer_stream,
    answer_whole,
    chunk,
    close_at_once,
    event,
    never_answer,
    reply_bytes,
    reset,
    running_worker,
)

from coda_engine.contract.identity import unpack


async def test_the_body_reaches_the_engine_byte_for_byte():
    body = b'{ "model":"small",\n\t"messages" : [ {"content":"\\u00e9\xc3\xa9","role":"user"} ] , "n":1e0}'
    async with running_worker(script=answer_whole) as worker, running_router(worker) as router:
        await raw_exchange(router.port, post("/v1/chat/completions?beta=true", body))
    assert worker.requests[0].body == body
    assert worker.requests[0].target == "/v1/chat/completions?beta=true"


async def test_a_whole_reply_comes_back_byte_for_byte_with_its_status_and_headers():
    async def answer(request: Received) -> None:
        request.writer.write(
            b"HTTP/1.1 418 I'm a teapot\r\ncontent-type: text/odd\r\nx-request-id: 7\r\n"
            b"content-length: 5\r\n\r\n a\x00b "
        )

    async with running_worker(script=answer) as worker, running_router(worker) as router:
        raw = await raw_exchange(router.port, post("/v1/completions", b'{"model":"small","prompt":"x"}'))
    head, _, body = raw.partition(b"\r\n\r\n")
    assert body == b" a\x00b "
    assert head.startswith(b"HTTP/1.1 418 ")
    assert b"content-type: text/odd" in head
    assert b"x-request-id: 7" in head


async def test_a_stream_comes_back_byte_for_byte():
    async with running_worker() as worker, running_router(worker) as router:
        status, body = await router.chat(stream=True)
    assert status == 200
    assert body == event(0) + event(1) + event(2) + b"data: [DONE]\n\n"


async def test_events_are_passed_on_as_they_come():
    go_on = asyncio.Event()

    async def answer(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)))
        await go_on.wait()
        request.writer.write(chunk(event(1)) + b"0\r\n\r\n")

    async with running_worker(script=answer) as worker, running_router(worker) as router:
        async with router.session.post(f"{router.url}/v1/chat/completions", data=chat_body()) as reply:
            assert await reply.content.readany() == event(0)
            go_on.set()
            assert await reply.content.read() == event(1)


async def test_a_chunked_request_body_reaches_the_engine_whole():
    body = chat_body("in pieces")
    request = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: router\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    async with running_worker() as worker, running_router(worker) as router:
        await raw_exchange(router.port, request, chunk(body[:10]), chunk(body[10:]), b"0\r\n\r\n")
    assert worker.requests[0].body == body
    assert worker.requests[0].headers["content-length"] == str(len(body))
    assert "transfer-encoding" not in worker.requests[0].headers


async def test_a_body_of_one_mebibyte_passes():
    text = "x" * 2**20
    async with running_worker() as worker, running_router(worker) as router:
        raw = await raw_exchange(router.port, post("/v1/chat/completions", chat_body(text)))
    assert raw.startswith(b"HTTP/1.1 200 ")
    assert worker.requests[0].json()["messages"][0]["content"] == text


async def test_a_client_that_waits_for_100_continue_is_told_to_go_on():
    body = chat_body()
    async with running_worker() as worker, running_router(worker) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        head, _, _ = post("/v1/chat/completions", body, "expect: 100-continue").partition(b"\r\n\r\n")
        writer.write(head + b"\r\n\r\n")
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(body)
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert "expect" not in worker.requests[0].headers


async def test_pipelined_requests_are_answered_in_order():
    async def answer(request: Received) -> None:
        request.writer.write(reply_bytes(json.dumps(request.json()["messages"][0]["content"]).encode()))

    first = post("/v1/chat/completions", chat_body("one"), close=False)
    second = post("/v1/chat/completions", chat_body("two"))
    async with running_worker(script=answer) as worker, running_router(worker) as router:
        raw = await raw_exchange(router.port, first + second)
    assert raw.index(b'"one"') < raw.index(b'"two"')


async def test_connections_to_engines_are_used_again():
    async with running_worker() as worker, running_router(worker) as router:
        await router.chat()
        before = worker.connections
        for _ in range(5):
            await router.chat()
        assert worker.connections == before


async def test_a_kept_connection_that_the_engine_closed_costs_nobody_anything():
    async with running_worker() as worker, running_router(worker) as router:
        await router.chat()
        served: list[asyncio.StreamWriter] = [worker.requests[0].writer]

        async def close_kept_connections(request: Received) -> None:
            if request.writer in served:
                reset(request.writer)
            else:
                await answer_stream(request)

        worker.script = close_kept_connections
        status, _ = await router.chat()
        assert status == 200
        assert len(worker.requests) == 3
        _, metrics = await router.get("/metrics")
    assert 'coda_router_relay_events_total{event="StaleConnection"} 1.0' in metrics


@pytest.mark.parametrize("stream", [True, False])
async def test_when_the_client_leaves_the_engine_sees_it_within_a_second(stream: bool):
    async def first_event_only(request: Received) -> None:
        if stream:
            request.writer.write(STREAM_HEAD + chunk(event(0)))
        await asyncio.Event().wait()

    async with running_worker(script=first_event_only) as worker, running_router(worker) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post("/v1/chat/completions", chat_body(), close=False))
        if stream:
            await reader.readuntil(b"\n\n")
        await until(lambda: worker.requests)
        writer.close()
        await until(worker.aborted.is_set, timeout_s=1.0)
        await until(lambda: router.router.dispatcher.fleet.workers[worker.name].in_flight_requests == 0)
        _, metrics = await router.get("/metrics")
    assert 'coda_router_relay_events_total{event="ClientLeft"} 1.0' in metrics


async def test_a_client_that_leaves_after_a_large_body_is_noticed_too():
    async with running_worker(script=never_answer) as worker, running_router(worker) as router:
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post("/v1/chat/completions", chat_body("x" * 300_000), close=False))
        await until(lambda: worker.requests)
        writer.close()
        await until(worker.aborted.is_set, timeout_s=1.0)


async def test_an_engine_that_dies_before_the_first_byte_is_replaced_by_another():
    async with running_worker() as healthy, running_worker(script=close_at_once) as dying:
        async with running_router(dying, healthy) as router:
            statuses = [(await router.chat(f"conversation {n}"))[0] for n in range(4)]
            decisions = await router.decisions()
    assert statuses == [200] * 4
    assert dying.requests
    assert len(healthy.requests) == 4
    assert {d["attempt"] for d in decisions} == {0, 1}


async def test_a_head_without_a_body_does_not_count_as_the_first_byte():
    async def head_then_death(request: Received) -> None:
        request.writer.write(STREAM_HEAD)
        await request.writer.drain()
        await asyncio.sleep(0.05)
        reset(request.writer)

    async with running_worker() as healthy, running_worker(script=head_then_death) as dying:
        async with running_router(dying, healthy) as router:
            results = [await router.chat(f"conversation {n}", stream=True) for n in range(4)]
    assert dying.requests
    assert all(status == 200 and body.endswith(b"[DONE]\n\n") for status, body in results)


async def test_the_retry_tells_the_engine_its_attempt_and_its_age():
    async def die_after_a_moment(request: Received) -> None:
        await asyncio.sleep(0.02)
        reset(request.writer)

    async with running_worker() as healthy, running_worker(script=die_after_a_moment) as dying:
        async with running_router(dying, healthy) as router:
            for n in range(4):
                await router.chat(f"conversation {n}")
    answered = [unpack(r.headers["x-session-id"], SECRET) for r in healthy.requests]
    first_tries = [unpack(r.headers["x-session-id"], SECRET) for r in dying.requests]
    retried = [identity for identity in answered if identity.attempt == 1]
    assert {identity.attempt for identity in first_tries} == {0}
    assert retried
    # The event loop's clock counts whole milliseconds.
    assert all(identity.ready_age_ms >= 18 for identity in retried)


async def test_an_engine_that_dies_in_mid_reply_resets_the_client():
    async def die_in_the_middle(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)))
        await request.writer.drain()
        await asyncio.sleep(0.05)
        reset(request.writer)

    async with running_worker(script=die_in_the_middle) as worker, running_router(worker) as router:
        with pytest.raises(ConnectionResetError):
            await raw_exchange(router.port, post("/v1/chat/completions", chat_body()))
        assert len(worker.requests) == 1
        _, metrics = await router.get("/metrics")
    assert 'coda_router_relay_events_total{event="Truncated"} 1.0' in metrics


DEAD = (
    b'{"error":{"message":"EngineCore encountered an issue. See stack trace","type":"InternalServerError","code":500}}'
)
SPACED_DEAD = json.dumps(json.loads(DEAD)).encode()
ANTHROPIC_DEAD = (
    b'{"type":"error","error":{"type":"InternalServerError","message":"EngineCore encountered an issue. See stack"}}'
)


@pytest.mark.parametrize(
    "last_words",
    [
        STREAM_HEAD + chunk(b"data: " + DEAD + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n",
        STREAM_HEAD + chunk(b"data: " + SPACED_DEAD + b"\n\ndata: [DONE]\n\n") + b"0\r\n\r\n",
        STREAM_HEAD + chunk(b"event: error\ndata: " + ANTHROPIC_DEAD + b"\n\n") + b"0\r\n\r\n",
        reply_bytes(DEAD, 500),
        reply_bytes(ANTHROPIC_DEAD, 500),
    ],
    ids=["stream", "spaced stream", "messages stream", "whole", "messages"],
)
async def test_an_api_process_that_reports_its_engine_s_death_first_is_replaced_by_another(last_words: bytes):
    async def die(request: Received) -> None:
        request.writer.write(last_words)

    async with (
        running_worker() as healthy,
        running_worker(script=die) as dying,
        running_router(dying, healthy) as router,
    ):
        results = [await router.chat(f"conversation {n}", stream=True) for n in range(4)]
        assert dying.requests
        assert all(status == 200 and b"EngineCore" not in body for status, body in results)


async def test_a_stream_that_ends_with_its_engine_s_death_resets_the_client():
    async def die_politely(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)))
        await request.writer.drain()
        await asyncio.sleep(0.05)
        request.writer.write(chunk(b"data: " + DEAD + b"\n\n") + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with running_worker(script=die_politely) as worker, running_router(worker) as router:
        with pytest.raises(ConnectionResetError):
            await raw_exchange(router.port, post("/v1/chat/completions", chat_body()))


async def test_a_reply_that_only_talks_about_a_dead_engine_passes():
    body = json.dumps({"choices": [{"message": {"content": DEAD.decode()}}]}, separators=(",", ":")).encode()

    async def quote(request: Received) -> None:
        request.writer.write(reply_bytes(body))

    async with running_worker(script=quote) as worker, running_router(worker) as router:
        assert await router.chat() == (200, body)


REPEATED = {
    "metadata": b'{"id":"resp_1","metadata":{"error":"EngineCore encountered an issue"}}',
    "tools": b'{"id":"resp_1","tools":[{"parameters":' + DEAD + b"}]}",
    "an event in a string": json.dumps({"instructions": f"\n\ndata: {DEAD.decode()}"}).encode(),
    "an event that is a name": b'{"input":{"\\n\\ndata: {":' + DEAD + b"}}",
    "an error about it": b'{"error":{"message":"no model EngineCore encountered an issue","code":404}}',
}


@pytest.mark.parametrize("said", REPEATED.values(), ids=REPEATED)
@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
async def test_a_client_cannot_make_an_engine_count_as_dead_by_what_replies_repeat_of_its_request(
    said: bytes, is_stream: bool
):
    body = b"event: response.created\ndata: " + said + b"\n\n" if is_stream else said

    async def repeat(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(body) + b"0\r\n\r\n" if is_stream else reply_bytes(body))

    async with running_worker(script=repeat) as worker, running_router(worker) as router:
        assert await router.chat(stream=is_stream) == (200, body)
        assert len(worker.requests) == 1


async def test_an_engine_does_not_count_as_dead_when_a_later_piece_begins_like_its_error():
    first, rest = b'{"id":"resp_1","tools":[', DEAD + b"]}"

    async def repeat_in_pieces(request: Received) -> None:
        head, _, _ = reply_bytes(first + rest).partition(b"{")
        request.writer.write(head + first)
        await request.writer.drain()
        await asyncio.sleep(0.05)
        request.writer.write(rest)

    async with running_worker(script=repeat_in_pieces) as worker, running_router(worker) as router:
        assert await router.chat() == (200, first + rest)


async def test_a_reply_shorter_than_announced_resets_the_client():
    async def promise_more(request: Received) -> None:
        request.writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort")
        await request.writer.drain()
        request.writer.close()

    async with running_worker(script=promise_more) as worker, running_router(worker) as router:
        with pytest.raises(ConnectionResetError):
            await raw_exchange(router.port, post("/v1/chat/completions", chat_body()))


async def test_garbage_instead_of_http_is_a_lost_engine():
    async def garbage(request: Received) -> None:
        request.writer.write(b"\x16\x03\x01 not http at all\r\n\r\n")
        await asyncio.Event().wait()

    async with running_worker(script=garbage) as worker, running_router(worker) as router:
        status, body = await router.chat()
    assert status == 503
    assert json.loads(body)["error"]["code"] == "engine_lost"


async def test_a_connection_on_which_the_engine_said_more_than_asked_is_not_used_again():
    async def answer_twice(request: Received) -> None:
        request.writer.write(reply_bytes(b'{"n":1}') + reply_bytes(b'{"n":2}'))

    async with running_worker(script=answer_twice) as worker, running_router(worker) as router:
        bodies = [(await router.chat())[1] for _ in range(3)]
    assert bodies == [b'{"n":1}'] * 3


async def test_a_slow_reader_stops_the_engine_instead_of_filling_memory():
    sent_bytes = 0
    total_bytes = 64 * 2**20

    async def flood(request: Received) -> None:
        nonlocal sent_bytes
        request.writer.write(STREAM_HEAD)
        piece = b"x" * 65_536
        for _ in range(total_bytes // len(piece)):
            request.writer.write(chunk(piece))
            await request.writer.drain()
            sent_bytes += len(piece)
        request.writer.write(b"0\r\n\r\n")

    async with running_worker(script=flood) as worker, running_router(worker) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1024)
        writer.write(post("/v1/chat/completions", chat_body()))
        await until(lambda: sent_bytes > 0)
        stalled_at, unchanged = -1, 0
        while unchanged < 20:
            unchanged = unchanged + 1 if sent_bytes == stalled_at else 0
            stalled_at = sent_bytes
            await asyncio.sleep(0.02)
        assert stalled_at < total_bytes // 2
        received = 0
        while piece := await reader.read(2**20):
            received += len(piece)
        writer.close()
    assert received > total_bytes


async def test_an_interim_reply_is_not_taken_for_the_reply():
    async def early_hints(request: Received) -> None:
        request.writer.write(b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + reply_bytes(b'{"n":1}'))

    async with running_worker(script=early_hints) as worker, running_router(worker) as router:
        assert await router.chat() == (200, b'{"n":1}')


async def test_a_reply_without_any_framing_ends_with_its_connection():
    async def unframed(request: Received) -> None:
        request.writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{}")
        await request.writer.drain()
        request.writer.close()

    async with running_worker(script=unframed) as worker, running_router(worker) as router:
        assert await router.chat() == (200, b"{}")
