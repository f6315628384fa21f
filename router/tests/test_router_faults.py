"""Engines that send garbage, hang, or fail one request after another: contained, counted, and asked again later."""

import asyncio
import json
from collections.abc import Callable

import pytest
from router_harness import RunningRouter, chat_body, post, raw_exchange, running_router, until
from scripted_worker import (
    STREAM_HEAD,
    Received,
    Script,
    ScriptedWorker,
    answer_stream,
    answer_whole,
    chunk,
    close_at_once,
    event,
    never_answer,
    reply_bytes,
    running_worker,
)

from coda_router.fleet.address import WorkerAddress
from coda_router.fleet.ejection import Ejection, EjectionPolicy
from coda_router.fleet.worker import TELEMETRY_TIMEOUT_S, Worker
from coda_router.holding import HoldingLimits

pytestmark = pytest.mark.stress

CHAT = "/v1/chat/completions"
STREAM_BODY = json.dumps(json.loads(chat_body()) | {"stream": True}).encode()
OK = b"HTTP/1.1 200 OK\r\n"
JSON_TYPE = b"content-type: application/json\r\n"


def known(router: RunningRouter, worker: ScriptedWorker) -> Worker:
    return router.router.dispatcher.fleet.workers[worker.name]


def says(*pieces: bytes, then: Callable[[asyncio.StreamWriter], object] = lambda writer: None) -> Script:
    """Send pieces with a moment between them, do something, and say no more."""

    async def script(request: Received) -> None:
        for piece in pieces:
            request.writer.write(piece)
            await request.writer.drain()
            await asyncio.sleep(0.02)
        then(request.writer)
        await asyncio.Event().wait()

    return script


def never_stops(start: bytes, again: bytes) -> Script:
    """Send the same for ever."""

    async def script(request: Received) -> None:
        request.writer.write(start)
        while not request.writer.is_closing():
            request.writer.write(again)
            await request.writer.drain()
            await asyncio.sleep(0)
        raise ConnectionResetError

    return script


async def faults(router: RunningRouter) -> dict[str, int]:
    """Return the counted faults."""
    _, metrics = await router.get("/metrics")
    counted = [line for line in metrics.splitlines() if line.startswith("coda_router_engine_faults_total{")]
    pairs = ((line.split('"')[1], int(float(line.rpartition(" ")[2]))) for line in counted)
    return {fault: count for fault, count in pairs if count}


BOTH_LENGTHS = b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"

GARBAGE_AT_FIRST = {
    "no HTTP": (says(b"\x16\x03\x01\x00\x00\r\n\r\n"), "NotHttp"),
    "HTTP/2": (says(b"HTTP/2 200\r\n\r\n"), "NotHttp"),
    "both lengths": (says(OK + BOTH_LENGTHS), "NotHttp"),
    "two lengths": (says(OK + b"content-length: 1\r\ncontent-length: 2\r\n\r\nab"), "NotHttp"),
    "negative length": (says(OK + b"content-length: -1\r\n\r\n"), "NotHttp"),
    "NUL in a header": (says(OK + b"x-a: a\x00b\r\ncontent-length: 2\r\n\r\n{}"), "NotHttp"),
    "escape in a header": (says(OK + b"x-a: \x1b[31m\r\ncontent-length: 2\r\n\r\n{}"), "NotHttp"),
    "folded header": (says(OK + b"x-a: a\r\n b\r\ncontent-length: 2\r\n\r\n{}"), "NotHttp"),
    "header without a name": (says(OK + b": a\r\ncontent-length: 2\r\n\r\n{}"), "NotHttp"),
    "no chunk size": (says(STREAM_HEAD + b"zz\r\ndata: x\n\n"), "NotHttp"),
    "huge chunk size": (says(STREAM_HEAD + b"f" * 20 + b"\r\n"), "NotHttp"),
    "another protocol": (says(b"HTTP/1.1 101 Go\r\nconnection: upgrade\r\nupgrade: x\r\n\r\nhello"), "NotHttp"),
    "status 999": (says(b"HTTP/1.1 999 Odd\r\ncontent-length: 2\r\n\r\n{}"), "Status"),
    "status 42": (says(b"HTTP/1.1 042 Odd\r\ncontent-length: 2\r\n\r\n{}"), "Status"),
    "headers without end": (never_stops(OK, b"x-a: %b\r\n" % (b"y" * 1000)), "NoBody"),
    "a header line without end": (never_stops(OK + b"x-a: ", b"y" * 1000), "NoBody"),
    "a status line without end": (never_stops(b"HTTP/1.1 200 ", b"y" * 1000), "NoBody"),
    "interim replies without end": (never_stops(b"", b"HTTP/1.1 103 Early Hints\r\n\r\n" * 40), "NoBody"),
    "a chunk extension without end": (never_stops(STREAM_HEAD + b"5;", b"y" * 1000), "NoBody"),
    "trailers without end": (never_stops(STREAM_HEAD + b"0\r\n", b"x-a: y\r\n" * 100), "NoBody"),
    "a page": (says(OK + b"content-type: text/html\r\ncontent-length: 6\r\n\r\n<html>"), "ContentType"),
    "no type": (says(OK + b"content-length: 6\r\n\r\n<html>"), "ContentType"),
    "closed at once": (close_at_once, "Closed"),
    "closed in its head": (says(OK + b"x-a:", then=lambda writer: writer.close()), "Closed"),
    "closed after its head": (says(STREAM_HEAD, then=lambda writer: writer.close()), "Closed"),
    "a wrong chunk size after a chunk in one piece": (says(STREAM_HEAD + chunk(event(0)) + b"zz\r\n"), "NotHttp"),
}


@pytest.mark.parametrize(("script", "fault"), GARBAGE_AT_FIRST.values(), ids=GARBAGE_AT_FIRST)
async def test_garbage_before_the_first_byte_is_a_lost_engine(script: Script, fault: str):
    async with running_worker(script=script) as worker, running_router(worker) as router:
        async with asyncio.timeout(30):
            status, body = await router.chat(stream=True)
        assert (status, json.loads(body)["error"]["code"]) == (503, "engine_lost")
        assert (await faults(router)) == {fault: 1}
        assert known(router, worker).in_flight_requests == 0
        assert len(worker.requests) == 1


async def test_another_engine_answers_instead_of_one_that_sends_garbage():
    async with running_worker() as good, running_worker(script=says(b"garbage\r\n\r\n")) as bad:
        async with running_router(bad, good) as router:
            replies = [await router.chat(f"conversation {n}", stream=True) for n in range(4)]
    assert bad.requests
    assert all(status == 200 and body.endswith(b"[DONE]\n\n") for status, body in replies)


FIRST = STREAM_HEAD + chunk(event(0))
GARBAGE_LATER = {
    "wrong chunk size": (says(FIRST, b"zz\r\n"), "NotHttp"),
    "no end of a chunk": (says(FIRST, b"5\r\nhelloX\r\n"), "NotHttp"),
    "half a chunk": (says(FIRST, b"64\r\nhalf", then=lambda writer: writer.close()), "Closed"),
    "no last chunk": (says(FIRST, then=lambda writer: writer.close()), "Closed"),
    "a chunk extension without end": (never_stops(FIRST + b"5;", b"y" * 1000), "NoBody"),
    "trailers without end": (never_stops(FIRST + b"0\r\n", b"x-a: y\r\n" * 100), "NoBody"),
    "less than announced": (
        says(OK + JSON_TYPE + b"content-length: 100\r\n\r\n{", then=lambda writer: writer.close()),
        "Closed",
    ),
}


@pytest.mark.parametrize(("script", "fault"), GARBAGE_LATER.values(), ids=GARBAGE_LATER)
async def test_garbage_after_the_first_byte_resets_the_client(script: Script, fault: str):
    async with running_worker(script=script) as worker, running_router(worker) as router:
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(30):
                await raw_exchange(router.port, post(CHAT, STREAM_BODY))
        assert (await faults(router)) == {fault: 1}
        await until(lambda: known(router, worker).in_flight_requests == 0)


@pytest.mark.parametrize("more", [b"more", reply_bytes(b'{"n":2}'), b"HTTP/1.1 200 OK\r\n"])
async def test_what_an_engine_says_beyond_its_reply_is_dropped_with_the_connection(more: bytes):
    async def say_too_much(request: Received) -> None:
        request.writer.write(reply_bytes(b'{"n":1}') + more)

    async with running_worker(script=say_too_much) as worker, running_router(worker) as router:
        assert [(await router.chat())[1] for _ in range(2)] == [b'{"n":1}'] * 2
        assert (await faults(router)) == {"TooMuch": 2}
        assert len({request.writer for request in worker.requests}) == 2


async def test_trailers_of_a_reply_are_dropped():
    async def trail(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)) + b"0\r\nx-late: 1\r\n\r\n")

    async with running_worker(script=trail) as worker, running_router(worker) as router:
        raw = await raw_exchange(router.port, post(CHAT, STREAM_BODY))
        assert raw.endswith(b"\r\n0\r\n\r\n")
        assert b"x-late" not in raw
        assert (await faults(router)) == {}


async def test_bytes_in_a_stream_are_nobody_s_business_but_the_client_s():
    odd = b"data: \x00\xff\n\nno field at all\n\n"

    async def answer(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(odd) + b"0\r\n\r\n")

    async with running_worker(script=answer) as worker, running_router(worker) as router:
        assert await router.chat(stream=True) == (200, odd)


# Ejection


def test_an_ejected_worker_is_probed_after_times_that_double_up_to_a_limit():
    policy = EjectionPolicy(max_failures=2, first_back_off_s=1.0, longest_back_off_s=5.0)
    assert [policy.back_off_s(attempts) for attempts in (1, 2, 3, 4, 10_000)] == [1, 2, 4, 5, 5]
    ejection = Ejection(policy)
    assert not ejection.failed(0.0)
    assert ejection.failed(1.0)
    assert [ejection.is_probe_due(now_s) for now_s in (1.9, 2.0)] == [False, True]
    ejection.probe_failed(2.0)
    assert [ejection.is_probe_due(now_s) for now_s in (3.9, 4.0)] == [False, True]


def test_only_failures_in_a_row_eject():
    ejection = Ejection(EjectionPolicy(max_failures=2))
    for _ in range(10):
        assert not ejection.failed(0.0)
        ejection.answered()
    assert not ejection.is_ejected


def test_a_readmitted_worker_is_on_probation_until_it_has_answered():
    ejection = Ejection(EjectionPolicy(max_failures=3, first_back_off_s=1.0))
    for _ in range(3):
        ejection.failed(0.0)
    ejection.readmit()
    assert not ejection.is_ejected
    assert ejection.failed(10.0)
    assert not ejection.is_probe_due(11.5)
    ejection.readmit()
    ejection.answered()
    assert not ejection.failed(20.0)


async def test_a_probe_that_fails_after_its_worker_was_let_back_in_changes_nothing():
    async with running_worker() as good, running_worker(script=close_at_once) as bad:
        async with running_router(bad, good) as router:
            n = 0
            while not known(router, bad).ejection.is_ejected:
                await router.chat(f"conversation {n}")
                n += 1
            bad.requests.clear()
            goes_on = asyncio.Event()

            async def fail_late(request: Received) -> None:
                await goes_on.wait()
                await close_at_once(request)

            bad.script = fail_late
            await until(lambda: bad.requests)
            known(router, bad).readmit(asyncio.get_running_loop().time())
            goes_on.set()
            await until(lambda: bad.requests[0].writer.is_closing())
            await asyncio.sleep(0.1)
            assert not known(router, bad).ejection.is_ejected


async def test_an_engine_that_fails_one_request_after_another_gets_none_until_a_probe_succeeds():
    async with running_worker() as good, running_worker(script=close_at_once) as bad:
        async with running_router(bad, good) as router:
            n = 0
            while not known(router, bad).ejection.is_ejected:
                assert (await router.chat(f"conversation {n}"))[0] == 200
                n += 1
            asked = len(bad.requests)
            assert asked == 3
            assert {(await router.chat(f"other {n}"))[0] for n in range(6)} == {200}
            assert len([r for r in bad.requests if r.target == CHAT]) == asked
            bad.script = answer_whole
            await until(lambda: not known(router, bad).ejection.is_ejected)
            probe = bad.requests[-1]
            assert (probe.target, probe.json()["model"], probe.json()["max_tokens"]) == ("/v1/completions", "small", 1)
            n = 0
            while len(bad.requests) == asked + 1:
                await router.chat(f"new {n}")
                n += 1
            _, metrics = await router.get("/metrics")
    assert f'coda_router_worker_ejections_total{{worker="{bad.name}"}} 1.0' in metrics


async def test_ejected_engines_are_asked_when_there_are_no_others():
    async with running_worker(script=close_at_once) as worker, running_router(worker) as router:
        for n in range(6):
            assert (await router.chat(f"conversation {n}"))[0] == 503
        asked = [request for request in worker.requests if request.target == CHAT]
        decisions = await router.decisions()
    assert len(asked) == 6
    assert "AllEjected" in decisions[-2]["trail"] + decisions[-1]["trail"]


async def test_an_engine_that_refuses_connections_is_ejected_though_its_snapshots_come():
    async with running_worker() as good, running_worker() as bad, running_router(bad, good) as router:
        # Its listener goes; what is connected, the snapshot stream, stays.
        assert bad._server is not None
        bad._server.close()
        known(router, bad).pool.close()
        n = 0
        async with asyncio.timeout(20):
            while not known(router, bad).ejection.is_ejected:
                assert (await router.chat(f"conversation {n}"))[0] == 200
                n += 1
                await asyncio.sleep(0.02)
        assert (await faults(router))["Unreachable"] == 3


# Engines that hang

LIMIT_S = 1.0


def freeze(worker: ScriptedWorker) -> Callable[[], None]:
    """Have the worker send one snapshot again and again, as an engine does that takes no step; return the way back."""
    snapshot = worker.snapshot()
    worker.snapshot = lambda: snapshot  # type: ignore[method-assign]

    def move_on() -> None:
        del worker.snapshot

    return move_on


async def test_a_request_is_taken_from_an_engine_that_hangs_and_given_to_another():
    async with running_worker(script=never_answer) as hung, running_worker(others_running=5) as good:
        async with running_router(hung, good, silence_limit_s=LIMIT_S) as router:
            move_on = freeze(hung)
            async with asyncio.timeout(20):
                status, body = await router.chat(stream=True)
            assert (status, body[-8:]) == (200, b"[DONE]\n\n")
            assert len(hung.requests) == 1
            assert (await faults(router)) == {"Silent": 1}
            assert not known(router, hung).is_healthy
            for n in range(3):
                assert (await router.chat(f"conversation {n}"))[0] == 200
            assert len([r for r in hung.requests if r.target == CHAT]) == 1
            move_on()
            await until(lambda: known(router, hung).is_healthy)


async def test_a_hung_engine_that_generates_again_is_let_back_in_though_its_snapshot_is_the_same():
    async with running_worker(script=never_answer) as hung:
        async with running_router(hung, silence_limit_s=LIMIT_S) as router:
            freeze(hung)
            status, body = await router.chat()
            assert (status, json.loads(body)["error"]["code"]) == (503, "engine_lost")
            assert not known(router, hung).is_healthy
            status, body = await router.chat()
            assert (status, json.loads(body)["error"]["code"]) == (503, "no_engine")
            hung.script = answer_whole
            await until(lambda: known(router, hung).is_healthy)
            assert (await router.chat())[0] == 200


async def test_an_engine_that_moves_on_may_take_as_long_as_it_needs():
    async def prefill_long(request: Received) -> None:
        await asyncio.sleep(3 * LIMIT_S)
        await answer_stream(request)

    async with running_worker(script=prefill_long) as worker:
        async with running_router(worker, silence_limit_s=LIMIT_S) as router:
            assert (await router.chat())[0] == 200
            assert (await faults(router)) == {}


async def test_an_engine_that_hangs_in_mid_reply_resets_the_client():
    async with running_worker(script=says(STREAM_HEAD + chunk(event(0)))) as worker:
        async with running_router(worker, silence_limit_s=LIMIT_S) as router:
            freeze(worker)
            with pytest.raises(ConnectionResetError):
                async with asyncio.timeout(20):
                    await raw_exchange(router.port, post(CHAT, STREAM_BODY))
            assert (await faults(router)) == {"Silent": 1}


async def test_an_idle_engine_does_not_hang():
    async with running_worker() as worker, running_router(worker, silence_limit_s=LIMIT_S) as router:
        freeze(worker)
        await asyncio.sleep(3 * LIMIT_S)
        assert known(router, worker).is_healthy
        assert (await router.chat())[0] == 200


async def test_a_slow_reader_is_not_taken_for_a_silent_engine():
    piece = b"data: " + b"x" * 65_536 + b"\n\n"

    async def flood(request: Received) -> None:
        request.writer.write(STREAM_HEAD)
        for _ in range(256):
            request.writer.write(chunk(piece))
        request.writer.write(b"0\r\n\r\n")
        await request.writer.drain()

    async with running_worker(script=flood) as worker:
        async with running_router(worker, silence_limit_s=LIMIT_S) as router:
            freeze(worker)
            reader, writer = await asyncio.open_connection("127.0.0.1", router.port, limit=1024)
            writer.write(post(CHAT, STREAM_BODY))
            await asyncio.sleep(3 * LIMIT_S)
            received = 0
            while taken := await reader.read(2**20):
                received += len(taken)
            writer.close()
            assert received > 256 * len(piece)
            assert (await faults(router)) == {}


@pytest.mark.parametrize("is_healthy", [True, False])
async def test_plain_vllm_moves_on_while_its_health_probe_is_answered(is_healthy: bool):
    async def answer_late(request: Received) -> None:
        await asyncio.sleep(3 * LIMIT_S)
        await answer_whole(request)

    async with running_worker(is_coda=False, script=answer_late) as worker:
        async with running_router(worker, silence_limit_s=LIMIT_S) as router:
            await until(lambda: known(router, worker).models)
            asking = asyncio.create_task(router.chat())
            await until(lambda: worker.requests)
            worker.is_healthy = is_healthy
            assert (await asking)[0] == (200 if is_healthy else 503)


async def test_requests_for_one_model_do_not_wait_behind_those_for_another():
    async with running_worker(waiting=64, script=never_answer) as full, running_worker(models=["other"]) as free:
        async with running_router(full, free) as router:
            held = asyncio.create_task(router.chat())
            await until(lambda: len(router.router.dispatcher.holding) == 1)
            assert (await router.chat(model="other"))[0] == 200
            assert len(router.router.dispatcher.holding) == 1
            full.waiting, full.script = 0, answer_whole
            assert (await held)[0] == 200


async def test_the_queue_s_bounds_hold_for_all_models_together():
    limits = HoldingLimits(max_requests=1)
    async with running_worker(waiting=64) as a, running_worker(waiting=64, models=["other"]) as b:
        async with running_router(a, b, holding=limits) as router:
            held = asyncio.create_task(router.chat())
            await until(lambda: len(router.router.dispatcher.holding) == 1)
            status, body = await router.chat(model="other")
            assert (status, json.loads(body)["error"]["code"]) == (503, "queue_full")
            a.waiting = 0
            assert (await held)[0] == 200


def test_telemetry_counts_as_lost_two_seconds_after_the_last_snapshot():
    assert TELEMETRY_TIMEOUT_S <= 2.0
    worker = Worker(WorkerAddress("w", "127.0.0.1", 1), "router")
    worker.take_snapshot(ScriptedWorker(others_running=9).snapshot(), 100.0)
    assert worker.view(102.0).load_requests == 9
    view = worker.view(102.1)
    assert (view.has_telemetry, view.load_requests, view.is_healthy) == (False, 0, True)
