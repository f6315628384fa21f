"""Placement on live workers: affinity, load, lost telemetry, restarts, draining and held-back requests."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from router_harness import ROUTER_ID, RunningRouter, chat_body, post, running_router, until
from scripted_worker import (
    STREAM_HEAD,
    Received,
    ScriptedWorker,
    answer_whole,
    chunk,
    event,
    never_answer,
    running_worker,
)

import coda_router.sessions
from coda_engine.contract.snapshot import session_key
from coda_router.dispatch import RoutedRequest
from coda_router.fleet.worker import Worker
from coda_router.holding import HoldingLimits
from coda_router.identity import Session, SessionSource


def known(router: RunningRouter, worker: ScriptedWorker) -> Worker:
    return router.router.dispatcher.fleet.workers[worker.name]


async def said(router: RunningRouter, worker: ScriptedWorker) -> None:
    """Wait until the router has a snapshot that the worker made after this call."""
    snapshot = known(router, worker).snapshot
    seen = snapshot.version if snapshot and snapshot.instance_id == worker.instance_id else 0
    # The next one may have been under way already, the one after it was not.
    await until(
        lambda: (s := known(router, worker).snapshot) and s.instance_id == worker.instance_id and s.version > seen + 1
    )


async def rounds(router: RunningRouter, session: str, count: int) -> list[str]:
    """Return the workers that a session's rounds were placed on."""
    for _ in range(count):
        status, _ = await router.chat(headers={"x-coda-session": session})
        assert status == 200
    key = session_key("", session)
    return [d["worker"] for d in await router.decisions() if d["session"] == key]


async def last_decision(router: RunningRouter) -> dict[str, Any]:
    return (await router.decisions())[-1]


async def test_sessions_keep_their_home_over_rounds():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        homes = {session: set(await rounds(router, session, 4)) for session in ("s1", "s12", "s2", "s3")}
    assert all(len(workers) == 1 for workers in homes.values())


async def test_a_conversation_without_any_session_id_keeps_its_home_too():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        for text in ("first", "second", "third"):
            for turn in range(3):
                messages = [{"role": "user", "content": text}, *[{"role": "assistant", "content": "x"}] * turn]
                await router.chat(messages=messages)
        decisions = await router.decisions()
    homes: dict[str, set[str]] = {}
    for decision in decisions:
        homes.setdefault(decision["session"], set()).add(decision["worker"])
    assert len(homes) == 3
    assert all(len(workers) == 1 for workers in homes.values())


async def test_what_the_engines_say_is_resident_decides_for_a_router_that_never_saw_the_session():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        key = session_key("", "from elsewhere")
        b.resident[key] = 5000
        await until(lambda: known(router, b).resident_tokens(key))
        assert set(await rounds(router, "from elsewhere", 3)) == {b.name}
        decision = await last_decision(router)
    assert (decision["reason"], decision["resident_tokens"]) == ("KVResident", 5000)


async def test_an_evicted_session_is_placed_like_a_new_one():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        key = session_key("", "s")
        a.resident[key] = 5000
        await until(lambda: known(router, a).resident_tokens(key))
        del a.resident[key]
        a.removed = [key]
        await until(lambda: not known(router, a).resident_tokens(key))
        await rounds(router, "s", 1)
        decision = await last_decision(router)
    assert "KVResident" not in decision["trail"]


async def test_an_eviction_from_a_session_s_home_is_told_as_a_lost_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coda_router.sessions, "EVICTION_GRACE_S", -1.0)
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        (home_name,) = set(await rounds(router, "s", 1))
        home, key = (a if home_name == a.name else b), session_key("", "s")
        home.resident[key] = 5000
        await until(lambda: known(router, home).resident_tokens(key))
        del home.resident[key]
        home.removed = [key]
        await until(lambda: not known(router, home).resident_tokens(key))
        await rounds(router, "s", 1)
        decision = await last_decision(router)
    assert "HomeLost" in decision["trail"]
    assert not {"NewSession", "RecentPlacement"} & set(decision["trail"])


async def test_a_session_that_is_only_in_its_home_s_shadow_any_more_stays_at_home(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(coda_router.sessions, "EVICTION_GRACE_S", -1.0)
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        (home_name,) = set(await rounds(router, "s", 1))
        home, key = (a if home_name == a.name else b), session_key("", "s")
        home.resident[key], home.shadow[key] = 6000, 6000
        await until(lambda: known(router, home).resident_tokens(key) == 6000)
        home.resident[key], home.shadow[key] = 0, 5000
        await until(lambda: known(router, home).resident_tokens(key) != 6000)
        assert set(await rounds(router, "s", 3)) == {home_name}
        decision = await last_decision(router)
    assert (decision["reason"], decision["resident_tokens"]) == ("KVResident", 5000)


async def test_a_restarted_engine_has_forgotten_everything_at_once():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        (home_name,) = set(await rounds(router, "s", 2))
        home = a if home_name == a.name else b
        home.resident[session_key("", "s")] = 5000
        await until(lambda: known(router, home).resident_tokens(session_key("", "s")))
        old_instance = home.instance_id
        await home.restart()
        await until(lambda: known(router, home).is_healthy and known(router, home).incarnation != old_instance)
        assert known(router, home).resident_tokens(session_key("", "s")) == 0
        await rounds(router, "s", 1)
        decision = await last_decision(router)
    assert "HomeLost" in decision["trail"]


async def test_requests_go_on_while_an_engine_is_dead_and_after_it_came_back():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        await a.kill()
        assert set(await rounds(router, "s", 3)) == {b.name}
        await a.restart()
        await until(lambda: known(router, a).is_healthy)
        assert (await router.chat("another"))[0] == 200


async def test_a_first_request_goes_to_the_engine_with_less_to_do_whoever_sent_it():
    async with running_worker(others_running=7) as a, running_worker(others_running=2) as b:
        async with running_router(a, b) as router:
            assert set(await rounds(router, "s", 1)) == {b.name}


async def test_own_requests_are_not_counted_twice():
    async with running_worker(router_id=ROUTER_ID) as a, running_router(a) as router:
        a.running = 1
        a.script = never_answer
        asking = asyncio.create_task(router.chat())
        await until(lambda: a.requests)
        await said(router, a)
        view = known(router, a).view(asyncio.get_running_loop().time())
        assert (view.in_flight_requests, view.load_requests, view.waiting_requests) == (1, 1, 0)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_session_leaves_an_overloaded_home():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        (home_name,) = set(await rounds(router, "s", 2))
        home, other = (a, b) if home_name == a.name else (b, a)
        home.others_running = 30
        await said(router, home)
        assert (await rounds(router, "s", 1))[-1] == other.name
        decision = await last_decision(router)
    assert "HomeOverloaded" in decision["trail"]


async def test_silent_engines_that_answer_their_health_probe_are_used_on_own_counts():
    async with running_worker(others_running=9) as a, running_worker() as b, running_router(a, b) as router:
        a.is_silent = b.is_silent = True
        loop = asyncio.get_running_loop()
        await until(lambda: not any(known(router, w).has_telemetry(loop.time()) for w in (a, b)))
        assert known(router, a).is_healthy
        results = [await router.chat(f"conversation {n}") for n in range(4)]
        decisions = (await router.decisions())[-4:]
    assert all(status == 200 for status, _ in results)
    assert {d["reason"] for d in decisions} == {"NoTelemetry"}
    assert {d["worker"] for d in decisions} == {a.name, b.name}


async def test_plain_vllm_without_coda_s_endpoints_is_served_too():
    async with running_worker(is_coda=False) as worker, running_router(worker) as router:
        await until(lambda: known(router, worker).models)
        assert (await router.chat())[0] == 200
        assert (await router.chat(model="other"))[0] == 404
        assert (await router.get("/v1/models/small"))[0] == 200


async def test_an_engine_that_refuses_the_internal_token_still_serves():
    async with running_worker(internal_token="right-token") as worker:
        async with running_router(worker, internal_token="wrong-token") as router:
            assert (await router.chat())[0] == 200


async def test_an_engine_that_fails_its_health_probe_is_not_used():
    async with running_worker(is_coda=False) as a, running_worker() as b, running_router(a, b) as router:
        a.is_healthy = False
        await until(lambda: not known(router, a).is_healthy)
        assert {(await router.chat(f"c{n}"))[0] for n in range(3)} == {200}
        assert not a.requests


async def test_a_draining_engine_takes_no_new_requests():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        a.draining = True
        await said(router, a)
        assert {(await router.chat(f"c{n}"))[0] for n in range(3)} == {200}
        assert not a.requests
        b.draining = True
        await said(router, b)
        status, body = await router.chat()
    assert status == 503
    assert "AllDraining" in json.loads(body)["error"]["message"]


async def test_requests_are_held_while_every_engine_has_a_full_frontier_and_go_in_order():
    async with running_worker(script=answer_whole, waiting=64) as worker, running_router(worker) as router:
        asking = []
        holding = router.router.dispatcher.holding
        for n in range(3):
            asking.append(asyncio.create_task(router.chat(headers={"x-coda-session": f"number {n}"})))
            await until(lambda: len(holding) == len(asking))
        assert not worker.requests
        worker.waiting = 0
        assert {(await task)[0] for task in asking} == {200}
        decisions = await router.decisions()
    assert [d["session"] for d in decisions] == [session_key("", f"number {n}") for n in range(3)]
    assert all(d["ready_age_ms"] > 0 for d in decisions)


async def test_a_full_queue_refuses_with_503_and_retry_after():
    limits = HoldingLimits(max_requests=1)
    async with running_worker(waiting=64) as worker, running_router(worker, holding=limits) as router:
        held = asyncio.create_task(router.chat("held"))
        await until(lambda: len(router.router.dispatcher.holding) == 1)
        async with router.session.post(f"{router.url}/v1/chat/completions", data=chat_body()) as reply:
            assert (reply.status, (await reply.json())["error"]["code"]) == (503, "queue_full")
            assert int(reply.headers["retry-after"]) >= 1
        worker.waiting = 0
        assert (await held)[0] == 200


async def test_nobody_is_held_beyond_the_limit():
    limits = HoldingLimits(max_wait_s=0.05)
    async with running_worker(waiting=64) as worker, running_router(worker, holding=limits) as router:
        status, body = await router.chat()
        assert (status, json.loads(body)["error"]["code"]) == (503, "queue_timeout")
        assert len(router.router.dispatcher.holding) == 0


async def test_a_held_client_that_leaves_gives_its_place_up():
    async with running_worker(waiting=64) as worker, running_router(worker) as router:
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post("/v1/chat/completions", chat_body(), close=False))
        await until(lambda: len(router.router.dispatcher.holding) == 1)
        writer.close()
        await until(lambda: len(router.router.dispatcher.holding) == 0)
        worker.waiting = 0
        assert (await router.chat())[0] == 200
        assert len(worker.requests) == 1


async def test_one_engine_s_own_requests_fill_its_frontier_before_its_snapshot_says_so():
    async with running_worker(script=never_answer, router_id=ROUTER_ID) as worker, running_router(worker) as router:
        asking = [asyncio.create_task(router.chat(f"c{n}")) for n in range(70)]
        await until(lambda: len(worker.requests) == 64 and len(router.router.dispatcher.holding) == 6)
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: known(router, worker).in_flight_requests == 0)
        assert len(router.router.dispatcher.holding) == 0


async def test_requests_that_wait_for_no_scheduler_fill_nobody_s_frontier():
    async def only_generate(request: Received) -> None:
        await (never_answer if request.target == "/tokenize" else answer_whole)(request)

    async with running_worker(script=only_generate, router_id=ROUTER_ID) as worker, running_router(worker) as router:
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
            asking = [
                asyncio.create_task(session.post(f"{router.url}/tokenize", json={"model": "small", "prompt": f"p{n}"}))
                for n in range(70)
            ]
            await until(lambda: len(worker.requests) == 70)
            assert (await router.chat())[0] == 200
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)
        view = known(router, worker).view(asyncio.get_running_loop().time())
        assert (view.waiting_requests, view.pending_prefill_tokens) == (0, 0)


async def test_replies_that_clients_have_not_read_fill_nobody_s_frontier():
    async def begin(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)))
        await asyncio.Event().wait()

    body = {"model": "small", "stream": True}
    limits = HoldingLimits(max_wait_s=5.0)
    async with running_worker(script=begin, router_id=ROUTER_ID) as worker:
        async with running_router(worker, holding=limits) as router:
            url, connector = f"{router.url}/v1/chat/completions", aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector, raise_for_status=True) as session:
                replies = [
                    await session.post(url, json=body | {"messages": [{"role": "user", "content": f"c{n}"}]})
                    for n in range(70)
                ]
                worker.script = answer_whole
                assert (await router.chat())[0] == 200
                await until(lambda: known(router, worker).in_flight_requests == len(replies))
                for reply in replies:
                    reply.close()
            await until(lambda: known(router, worker).in_flight_requests == 0)
            assert known(router, worker).view(asyncio.get_running_loop().time()).waiting_requests == 0


async def test_a_request_whose_client_left_just_as_it_was_placed_is_on_its_way_nowhere():
    async with running_worker(waiting=64, script=never_answer) as worker, running_router(worker) as router:
        dispatcher, engine = router.router.dispatcher, known(router, worker)
        session = Session("s", "", SessionSource.CODA_HEADER)
        asking = asyncio.create_task(
            dispatcher.assign(RoutedRequest("small", "", session, "key", 8, ready_at_s=0.0, makes_kv=False))
        )
        await until(lambda: len(dispatcher.holding) == 1)
        worker.waiting = 0
        engine.take_snapshot(worker.snapshot(), asyncio.get_running_loop().time())
        dispatcher.holding.wake()
        assert engine.in_flight_requests == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        assert engine.in_flight_requests == 0
        asking = asyncio.create_task(router.chat())
        await until(lambda: worker.requests)
        assert engine.view(asyncio.get_running_loop().time()).waiting_requests == 1
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_a_connection_in_use_when_its_engine_leaves_the_fleet_is_closed_after_its_request():
    goes_on = asyncio.Event()

    async def answer_late(request: Received) -> None:
        await goes_on.wait()
        await answer_whole(request)

    async with running_worker(script=answer_late) as worker, running_router(worker) as router:
        pool = known(router, worker).pool
        asking = asyncio.create_task(router.chat())
        await until(lambda: worker.requests)
        (connection,) = pool.connections
        router.router.dispatcher.fleet.reconcile(())
        goes_on.set()
        assert (await asking)[0] == 200
        await until(lambda: not connection.is_open)


async def test_an_unreadable_snapshot_does_not_take_the_engine_out_of_service():
    async with running_worker() as worker, running_router(worker) as router:
        worker.snapshot = lambda: _Nonsense()
        await until(lambda: not known(router, worker).has_telemetry(asyncio.get_running_loop().time()))
        assert (await router.chat())[0] == 200


class _Nonsense:
    def to_json(self) -> bytes:
        return b'{"instance_id": 7}'
