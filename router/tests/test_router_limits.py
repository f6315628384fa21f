"""Limits of a key: what is refused, how a client is told, and that what is under way is always counted down again."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from router_harness import RunningRouter, chat_body, post, raw_exchange, running_router, until
from scripted_worker import (
    STREAM_HEAD,
    Received,
    ScriptedWorker,
    answer_stream,
    answer_whole,
    chunk,
    close_at_once,
    event,
    never_answer,
    reset,
    running_worker,
)

from coda_router.auth.documents import hashed
from coda_router.auth.limits import CONCURRENCY_RETRY_AFTER_S, KeyLimits, Limit

KEY = "key-of-alice"
HEADERS = {"authorization": f"Bearer {KEY}"}
HEADER_LINE = f"authorization: Bearer {KEY}"


def write_key(folder: Path, **limits: Any) -> None:
    (folder / "alice").write_text(json.dumps({"keyHash": hashed(KEY), **limits}))


@contextlib.asynccontextmanager
async def limited_router(
    folder: Path, script: Callable[[Received], Awaitable[None]] = answer_whole, **limits: Any
) -> AsyncIterator[tuple[RunningRouter, ScriptedWorker]]:
    """A router whose only key has limits, and its worker."""
    write_key(folder, **limits)
    async with running_worker(script=script) as worker, running_router(worker, api_keys_dir=folder) as router:
        yield router, worker


async def in_flight(router: RunningRouter) -> int:
    _, status = await router.get("/coda/status")
    (key,) = status["api_keys"]
    count: int = key["in_flight_requests"]
    return count


async def until_in_flight(router: RunningRouter, count: int) -> None:
    async with asyncio.timeout(10):
        while await in_flight(router) != count:
            await asyncio.sleep(0.01)


def begun(limits: KeyLimits, full_at_s: float, at_s: list[float]) -> tuple[list[float], float]:
    """Return which of the requests at these times may begin, and when the bucket is full again."""
    taken = []
    for now_s in at_s:
        decision = limits.decide(0, full_at_s, now_s)
        full_at_s = decision.full_at_s
        if decision.limit is Limit.NONE:
            taken.append(now_s)
    return taken, full_at_s


@pytest.mark.parametrize("rate", [1, 7, 60, 1_000, 997])
@pytest.mark.parametrize("start_s", [0.0, 0.1, 1_234_567.89])
def test_after_a_minute_s_rest_exactly_one_minute_s_requests_may_begin_at_once(rate: int, start_s: float):
    taken, _ = begun(KeyLimits(rate), start_s - 60, [start_s] * (rate + 5))
    assert len(taken) == rate


@pytest.mark.parametrize("seed", range(20))
def test_over_any_time_a_key_is_held_to_its_rate_beyond_one_burst(seed: int):
    dice = random.Random(seed)
    rate = dice.choice([1, 3, 10, 60, 600])
    at_s = sorted(dice.uniform(0, 600) for _ in range(dice.choice([50, 500, 5_000])))
    taken, _ = begun(KeyLimits(rate), -1e9, at_s)
    for first in range(0, len(taken), 7):
        for last in range(first, len(taken), 11):
            assert last - first + 1 <= rate + rate * (taken[last] - taken[first]) / 60 + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_who_waits_as_long_as_he_is_told_is_let_in_and_not_a_second_before(seed: int):
    dice = random.Random(seed)
    limits, now_s = KeyLimits(dice.choice([1, 2, 7, 59, 61, 10_000])), dice.uniform(0, 1e6)
    taken, full_at_s = begun(limits, -1e9, [now_s] * 10_001)
    assert taken
    told = limits.decide(0, full_at_s, now_s)
    assert told.limit is Limit.REQUESTS_PER_MINUTE
    assert told.retry_after_s >= 1
    assert told.full_at_s == full_at_s
    assert limits.decide(0, full_at_s, now_s + told.retry_after_s).limit is Limit.NONE
    assert limits.decide(0, full_at_s, now_s + told.retry_after_s - 1).limit is Limit.REQUESTS_PER_MINUTE


def test_a_request_that_the_concurrency_refuses_uses_up_no_rate():
    decision = KeyLimits(1, 2).decide(2, -1.0, 0.0)
    assert decision.limit is Limit.CONCURRENT_REQUESTS
    assert decision.retry_after_s == CONCURRENCY_RETRY_AFTER_S
    assert decision.full_at_s == -1.0
    assert KeyLimits(1, 2).decide(1, decision.full_at_s, 0.0).limit is Limit.NONE


def test_without_limits_everything_may_begin():
    assert KeyLimits().decide(10**9, 1e12, 0.0).limit is Limit.NONE


async def test_beyond_its_rate_a_key_gets_429_in_each_protocol_s_shape(tmp_path: Path):
    async with limited_router(tmp_path, requestsPerMinute=2) as (router, worker):
        assert [(await router.chat(headers=HEADERS))[0] for _ in range(2)] == [200, 200]
        openai = {"url": f"{router.url}/v1/chat/completions", "data": chat_body()}
        anthropic = {"url": f"{router.url}/v1/messages", "json": {"model": "small", "messages": []}}
        async with router.session.post(**openai, headers=HEADERS) as reply:
            assert reply.status == 429
            assert 1 <= int(reply.headers["retry-after"]) <= 30
            error = (await reply.json())["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
        assert "2 requests a minute (requestsPerMinute)" in error["message"]
        async with router.session.post(**anthropic, headers=HEADERS) as reply:
            assert reply.status == 429
            assert reply.headers["retry-after"].isdigit()
            document = await reply.json()
        assert (document["type"], document["error"]["type"]) == ("error", "rate_limit_error")
        assert (await router.get("/v1/models", headers=HEADERS))[0] == 200
        _, metrics = await router.get("/metrics")
        _, status = await router.get("/coda/status")
    assert len(worker.requests) == 2
    assert 'coda_router_limited_requests_total{limit="requestsPerMinute"} 2.0' in metrics
    assert 'coda_router_refusals_total{code="rate_limit_exceeded"} 2.0' in metrics
    assert KEY not in metrics
    assert status["api_keys"] == [{"tenant": "alice", "in_flight_requests": 0, "limited_requests": 2}]


async def test_a_request_over_a_limit_is_refused_before_its_body_is_there(tmp_path: Path):
    async with limited_router(tmp_path, requestsPerMinute=1) as (router, worker):
        assert (await router.chat(headers=HEADERS))[0] == 200
        lines = ("POST /v1/chat/completions HTTP/1.1", "host: r", HEADER_LINE, "content-length: 1000000")
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n{")
        async with asyncio.timeout(10):
            assert (await reader.readline()).startswith(b"HTTP/1.1 429 ")
        writer.close()
    assert len(worker.requests) == 1


async def test_what_is_no_request_yet_uses_up_nothing(tmp_path: Path):
    async with limited_router(tmp_path, requestsPerMinute=1) as (router, _):
        assert (await router.get("/v1/chat/completions", headers=HEADERS))[0] == 405
        assert (await router.chat())[0] == 401
        assert (await router.chat(headers=HEADERS))[0] == 200


async def test_only_so_many_requests_of_a_key_are_under_way_at_once(tmp_path: Path):
    finish = asyncio.Event()

    async def wait(request: Received) -> None:
        await finish.wait()
        await answer_whole(request)

    async with limited_router(tmp_path, wait, maxConcurrentRequests=2) as (router, _):
        under_way = [asyncio.create_task(router.chat(headers=HEADERS)) for _ in range(2)]
        await until_in_flight(router, 2)
        async with router.session.post(f"{router.url}/v1/completions", data=b"{}", headers=HEADERS) as reply:
            assert reply.status == 429
            assert reply.headers["retry-after"] == str(CONCURRENCY_RETRY_AFTER_S)
            assert "2 requests under way at once (maxConcurrentRequests)" in (await reply.json())["error"]["message"]
        finish.set()
        assert [status for status, _ in await asyncio.gather(*under_way)] == [200, 200]
        assert (await router.chat(headers=HEADERS))[0] == 200
        assert 'limit="maxConcurrentRequests"} 1.0' in (await router.get("/metrics"))[1]


async def break_off(request: Received) -> None:
    request.writer.write(STREAM_HEAD + chunk(event(0)))
    await request.writer.drain()
    await asyncio.sleep(0.05)
    reset(request.writer)


async def begin_and_hang(request: Received) -> None:
    request.writer.write(STREAM_HEAD + chunk(event(0)))
    await request.writer.drain()
    await asyncio.Event().wait()


@pytest.mark.parametrize("script", [answer_whole, answer_stream, close_at_once, break_off])
@pytest.mark.parametrize("body", [chat_body(), chat_body(model="unknown"), b"{", b'{"model":7}', b"x" * 4096])
async def test_however_a_request_ends_it_is_under_way_no_more(tmp_path: Path, script: Any, body: bytes):
    async with limited_router(tmp_path, script, maxConcurrentRequests=1) as (router, worker):
        for _ in range(3):
            with contextlib.suppress(ConnectionError):
                raw = await raw_exchange(router.port, post("/v1/chat/completions", body, HEADER_LINE))
                assert not raw.startswith(b"HTTP/1.1 429 ")
        assert await in_flight(router) == 0
        worker.script = answer_whole
        await until(lambda: router.router.dispatcher.fleet.workers[worker.name].is_healthy)
        assert (await router.chat(headers=HEADERS))[0] == 200


@pytest.mark.parametrize("script", [never_answer, begin_and_hang])
async def test_a_client_that_leaves_is_counted_down_while_it_waits_or_reads(tmp_path: Path, script: Any):
    async with limited_router(tmp_path, script, maxConcurrentRequests=1) as (router, worker):
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post("/v1/chat/completions", chat_body(), HEADER_LINE))
        await until(lambda: worker.requests)
        if script is begin_and_hang:
            await reader.readuntil(event(0))
        assert await in_flight(router) == 1
        writer.close()
        await until_in_flight(router, 0)


async def test_a_client_that_leaves_is_counted_down_while_it_sends(tmp_path: Path):
    async with limited_router(tmp_path, maxConcurrentRequests=1) as (router, _):
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post("/v1/chat/completions", chat_body("x" * 1000), HEADER_LINE)[:-500])
        await until_in_flight(router, 1)
        writer.close()
        await until_in_flight(router, 0)


async def test_a_client_that_leaves_is_counted_down_while_it_is_held_back(tmp_path: Path):
    async with limited_router(tmp_path, maxConcurrentRequests=1) as (router, worker):
        worker.waiting = 64
        dispatcher = router.router.dispatcher
        await until(lambda: all(w.snapshot and w.snapshot.waiting_by_tier == {0: 64}
                                for w in dispatcher.fleet.workers.values()))  # fmt: skip
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post("/v1/chat/completions", chat_body(), HEADER_LINE))
        await until(lambda: len(dispatcher.holding) == 1)
        assert await in_flight(router) == 1
        writer.close()
        await until_in_flight(router, 0)


async def test_changed_keys_leave_a_key_s_bucket_and_what_is_under_way_as_they_are(tmp_path: Path):
    async with limited_router(tmp_path, begin_and_hang, requestsPerMinute=2, maxConcurrentRequests=9) as (router, _):
        async with router.session.post(f"{router.url}/v1/chat/completions", data=chat_body(), headers=HEADERS) as one:
            assert one.status == 200
            async with router.session.post(
                f"{router.url}/v1/chat/completions", data=chat_body(), headers=HEADERS
            ) as two:
                assert two.status == 200
                write_key(tmp_path, tenant="renamed", requestsPerMinute=2, maxConcurrentRequests=2)
                async with asyncio.timeout(10):
                    while (await router.get("/coda/status"))[1]["api_keys"][0]["tenant"] != "renamed":
                        await asyncio.sleep(0.05)
                assert await in_flight(router) == 2
                assert b"maxConcurrentRequests" in (await router.chat(headers=HEADERS))[1]
        await until_in_flight(router, 0)
        status, body = await router.chat(headers=HEADERS)
        assert (status, b"requestsPerMinute" in body) == (429, True)
