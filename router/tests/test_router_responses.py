"""Stored responses: they go on at the engine that has them, and only for the tenant who made them."""

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from router_harness import SECRET, RunningRouter, running_router, until
from scripted_worker import (
    STREAM_HEAD,
    Received,
    ScriptedWorker,
    chunk,
    close_at_once,
    never_answer,
    reply_bytes,
    running_worker,
)

from coda_engine.contract.identity import unpack
from coda_router.responses import ResponseMap, StoredResponse, response_id_of

KEYS = {"alice": "alice-key-1", "bob": "bob-key-22"}


@dataclass
class StoringEngine:
    """Answers ``/v1/responses`` as vLLM does with its store on: in one engine's memory, and never a tenant's name."""

    name: str
    stored: dict[str, dict[str, Any]] = field(default_factory=dict)
    made: int = 0

    async def __call__(self, request: Received) -> None:
        path, _, query = request.target.partition("?")
        if request.method == "POST" and path == "/v1/responses":
            self._make(request)
            return
        response_id, _, action = path.removeprefix("/v1/responses/").partition("/")
        response = self.stored.get(response_id)
        if response is None:
            request.writer.write(_not_found(response_id))
        elif "stream=true" in query:
            request.writer.write(_stream(response))
        else:
            if action == "cancel":
                response["status"] = "cancelled"
            request.writer.write(reply_bytes(json.dumps(response).encode()))

    def _make(self, request: Received) -> None:
        asked = request.json()
        previous = asked.get("previous_response_id")
        if previous is not None and previous not in self.stored:
            request.writer.write(_not_found(previous))
            return
        self.made += 1
        response = {"id": f"resp_{self.name}{self.made}", "object": "response", "previous_response_id": previous}
        if asked.get("store", True):
            self.stored[response["id"]] = response
        request.writer.write(_stream(response) if asked.get("stream") else reply_bytes(json.dumps(response).encode()))


def _not_found(response_id: str) -> bytes:
    error = {"message": f"Response with id '{response_id}' not found.", "param": "response_id", "code": 404}
    return reply_bytes(json.dumps({"error": error}).encode(), 404)


def _stream(response: dict[str, Any]) -> bytes:
    created = {"response": response, "sequence_number": 0, "type": "response.created"}
    event = f"event: response.created\ndata: {json.dumps(created, separators=(',', ':'))}\n\n".encode()
    return STREAM_HEAD + chunk(event) + chunk(b"event: response.completed\ndata: {}\n\n") + b"0\r\n\r\n"


@contextlib.asynccontextmanager
async def two_storing_engines(**options: Any) -> AsyncIterator[tuple[RunningRouter, ScriptedWorker, ScriptedWorker]]:
    async with (
        running_worker(script=StoringEngine("a")) as a,
        running_worker(script=StoringEngine("b")) as b,
        running_router(a, b, **options) as router,
    ):
        yield router, a, b


async def ask(
    router: RunningRouter, path: str = "/v1/responses", method: str = "POST", key: str = "", **body: Any
) -> tuple[int, bytes]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    sent = {"model": "small", "input": "go"} | body if method == "POST" and path == "/v1/responses" else None
    async with router.session.request(method, f"{router.url}{path}", json=sent, headers=headers) as reply:
        return reply.status, await reply.read()


async def made(router: RunningRouter, **body: Any) -> str:
    """Have a response made; return its id."""
    status, reply = await ask(router, **body)
    assert status == 200
    found = response_id_of(reply)
    assert found is not None
    return found


def error_of(reply: bytes) -> tuple[str, str]:
    error = json.loads(reply)["error"]
    return error["code"], error["param"]


def session_at(request: Received) -> str:
    return unpack(request.headers["x-session-id"], SECRET).session


@pytest.mark.parametrize("stream", [False, True])
async def test_a_chain_stays_at_the_engine_that_holds_it_and_is_one_session(stream: bool):
    async with two_storing_engines() as (router, a, b):
        heads = [await made(router, input=f"task {n}", stream=stream) for n in range(4)]
        holder = {head: a if head.removeprefix("resp_").startswith("a") else b for head in heads}
        assert len(set(map(id, holder.values()))) == 2
        for head in heads:
            worker, chain = holder[head], head
            for turn in range(3):
                chain = await made(router, input=f"turn {turn}", previous_response_id=chain, stream=stream)
                assert chain in worker.script.stored
        decisions = await router.decisions()
    assert [d["reason"] for d in decisions[4:]] == ["HoldsResponse"] * 12
    assert {d["session_source"] for d in decisions[4:]} == {"ResponseChain"}
    assert len({d["session"] for d in decisions}) == 4


async def test_a_chain_goes_to_its_engine_even_when_that_one_is_full_and_others_wait():
    async with two_storing_engines() as (router, a, b):
        head = await made(router)
        worker = a if head in a.script.stored else b
        a.waiting = b.waiting = 64
        views = router.router.dispatcher.fleet.workers
        await until(lambda: all(w.snapshot and w.snapshot.waiting == 64 for w in views.values()))
        assert await made(router, previous_response_id=head) in worker.script.stored


async def test_a_session_that_the_client_names_stays_the_session_of_its_chain():
    async with two_storing_engines() as (router, a, b):
        async with router.session.post(
            f"{router.url}/v1/responses", json={"model": "small", "input": "go"}, headers={"x-session-id": "named"}
        ) as reply:
            head = (await reply.json())["id"]
        await made(router, previous_response_id=head)
        requests = [request for worker in (a, b) for request in worker.requests]
    assert [session_at(request) for request in requests] == ["named", "named"]


async def test_an_unknown_previous_response_is_refused_as_openai_does_and_no_engine_is_asked():
    async with two_storing_engines() as (router, a, b):
        a.script.stored["resp_old"] = {"id": "resp_old"}
        status, reply = await ask(router, previous_response_id="resp_old")
        assert (status, error_of(reply)) == (400, ("previous_response_not_found", "previous_response_id"))
        assert not a.requests
        assert not b.requests


@pytest.mark.parametrize("field", [{"store": False}, {"previous_response_id": None}, {"previous_response_id": 7}])
async def test_what_continues_nothing_goes_where_placement_says(field: dict[str, Any]):
    async with two_storing_engines() as (router, _, _):
        await ask(router, **field)
        assert (await router.decisions())[0]["reason"] != "HoldsResponse"


async def test_a_response_that_was_not_to_be_stored_is_not_found_later():
    async with two_storing_engines() as (router, a, b):
        unstored = await made(router, store=False)
        asked = len(a.requests) + len(b.requests)
        assert (await ask(router, f"/v1/responses/{unstored}", "GET"))[0] == 404
        assert (await ask(router, previous_response_id=unstored))[0] == 400
        assert len(a.requests) + len(b.requests) == asked


async def test_an_engine_that_stores_nothing_says_so_in_its_own_words():
    async with two_storing_engines() as (router, a, b):
        head = await made(router)
        a.script.stored.clear()
        b.script.stored.clear()
        for status, reply in (
            await ask(router, f"/v1/responses/{head}", "GET"),
            await ask(router, previous_response_id=head),
        ):
            assert (status, error_of(reply)) == (404, (404, "response_id"))


async def test_a_stored_response_is_fetched_streamed_and_cancelled_where_it_is():
    async with two_storing_engines() as (router, a, b):
        heads = [await made(router, input=f"task {n}") for n in range(4)]
        for head in heads:
            status, reply = await ask(router, f"/v1/responses/{head}", "GET")
            assert (status, json.loads(reply)["id"]) == (200, head)
            status, reply = await ask(router, f"/v1/responses/{head}?stream=true&starting_after=0", "GET")
            assert (status, response_id_of(reply)) == (200, head)
            status, reply = await ask(router, f"/v1/responses/{head}/cancel", "POST")
            assert (status, json.loads(reply)["status"]) == (200, "cancelled")
        targets = {request.target for worker in (a, b) for request in worker.requests}
        assert f"/v1/responses/{heads[0]}?stream=true&starting_after=0" in targets
        assert (await router.get("/coda/status"))[1]["sessions"] == 4


async def test_asking_for_a_response_moves_no_session_and_waits_for_no_queue():
    async with two_storing_engines() as (router, a, b):
        head = await made(router)
        a.waiting = b.waiting = 64
        views = router.router.dispatcher.fleet.workers
        await until(lambda: all(w.snapshot and w.snapshot.waiting == 64 for w in views.values()))
        homes = len(router.router.dispatcher.sessions)
        assert (await ask(router, f"/v1/responses/{head}", "GET"))[0] == 200
        assert len(router.router.dispatcher.sessions) == homes


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("DELETE", "/v1/responses/resp_1", 405),
        ("GET", "/v1/responses/resp_1/cancel", 405),
        ("GET", "/v1/responses/resp_1", 404),
        ("POST", "/v1/responses/resp_1/cancel", 404),
        ("GET", "/v1/responses/resp_1/input_items", 404),
        ("GET", "/v1/responses/", 404),
        ("GET", "/v1/responses/a%20b%0d%0ax", 404),
        ("GET", "/v1/responses", 405),
    ],
)
async def test_what_is_not_there_is_refused_in_openai_s_shape(method: str, path: str, status: int):
    async with two_storing_engines() as (router, a, b):
        found, reply = await ask(router, path, method)
        assert found == status
        assert json.loads(reply)["error"]["message"]
        assert not a.requests
        assert not b.requests


@contextlib.contextmanager
def keys_in(folder: Path) -> Any:
    for tenant, key in KEYS.items():
        (folder / tenant).write_text(key)
    yield folder


async def test_another_tenant_s_response_does_not_exist(tmp_path: Path):
    with keys_in(tmp_path) as folder:
        async with two_storing_engines(api_keys_dir=folder) as (router, a, b):
            head = await made(router, key=KEYS["alice"])
            asked = len(a.requests) + len(b.requests)
            for attempt in (
                ask(router, f"/v1/responses/{head}", "GET", KEYS["bob"]),
                ask(router, f"/v1/responses/{head}/cancel", "POST", KEYS["bob"]),
            ):
                status, reply = await attempt
                assert (status, error_of(reply)) == (404, ("response_not_found", "response_id"))
            assert (await ask(router, previous_response_id=head, key=KEYS["bob"]))[0] == 400
            assert (await ask(router, f"/v1/responses/{head}", "GET"))[0] == 401
            assert len(a.requests) + len(b.requests) == asked
            assert (await ask(router, f"/v1/responses/{head}", "GET", KEYS["alice"]))[0] == 200


async def test_a_client_cannot_name_its_response_after_another_one(tmp_path: Path):
    with keys_in(tmp_path) as folder:
        async with two_storing_engines(api_keys_dir=folder) as (router, a, b):
            head = await made(router, key=KEYS["alice"])
            await made(router, key=KEYS["bob"], request_id=head)
            assert all("request_id" not in request.json() for worker in (a, b) for request in worker.requests)
            assert (await ask(router, f"/v1/responses/{head}", "GET", KEYS["bob"]))[0] == 404


async def test_a_chain_whose_engine_left_or_drains_is_unknown_and_one_whose_engine_is_down_may_come_back():
    async with two_storing_engines() as (router, a, b):
        head = await made(router)
        holder = a if head in a.script.stored else b
        worker = router.router.dispatcher.fleet.workers[holder.name]
        holder.draining = True
        await until(lambda: worker.snapshot and worker.snapshot.draining)
        assert (await ask(router, previous_response_id=head))[0] == 400
        assert (await ask(router, f"/v1/responses/{head}", "GET"))[0] == 200
        holder.draining = False
        await until(lambda: not worker.snapshot.draining)
        await holder.kill()
        await until(lambda: not worker.is_healthy)
        assert (await ask(router, previous_response_id=head))[0] == 503
        router.router.dispatcher.fleet.reconcile(
            other.address for name, other in router.router.dispatcher.fleet.workers.items() if name != holder.name
        )
        assert (await ask(router, previous_response_id=head))[0] == 400
        assert (await ask(router, f"/v1/responses/{head}", "GET"))[0] == 404


async def test_a_chain_is_not_retried_at_an_engine_that_does_not_have_it():
    async with two_storing_engines() as (router, a, b):
        head = await made(router)
        holder, other = (a, b) if head in a.script.stored else (b, a)
        asked = len(other.requests)
        holder.script = close_at_once
        status, reply = await ask(router, previous_response_id=head)
        assert (status, json.loads(reply)["error"]["code"]) == (503, "engine_lost")
        assert len(other.requests) == asked


async def test_asking_in_vain_for_a_response_ejects_no_engine():
    async with two_storing_engines() as (router, a, b):
        head = await made(router)
        holder = a if head in a.script.stored else b
        script, holder.script = holder.script, close_at_once
        for _ in range(5):
            assert (await ask(router, f"/v1/responses/{head}?stream=true", "GET"))[0] == 503
        holder.script = script
        assert (await ask(router, f"/v1/responses/{head}", "GET"))[0] == 200


async def test_a_client_that_leaves_a_streamed_response_aborts_it_there():
    async with two_storing_engines() as (router, a, b):
        head = await made(router)
        holder = a if head in a.script.stored else b
        holder.script = never_answer
        with pytest.raises(TimeoutError):
            await router.get(f"/v1/responses/{head}?stream=true", timeout=aiohttp.ClientTimeout(total=0.3))
        await until(holder.aborted.is_set)


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (b'{"id":"resp_1","object":"response"}', "resp_1"),
        (b'{ "id" : "resp_1" }', "resp_1"),
        (b'event: response.created\ndata: {"response":{"id":"resp_1","x":1},"type":"response.created"}\n\n', "resp_1"),
        (b'data: {"type":"response.created","sequence_number":0,"response":{"id":"resp_1"', "resp_1"),
        (b': keep-alive\n\nevent: response.created\ndata: {"response":{"id":"resp_1"', "resp_1"),
        (b'{"metadata":{"id":"resp_victim"},"id":"resp_1"}', None),
        (b'data: {"response":{"metadata":{"id":"resp_victim"}}}', None),
        (b'{"error":{"message":"no"}}', None),
        (b'{"id":7}', None),
        (b'{"id":"a b"}', None),
        (b'{"id":"%b"}' % (b"x" * 5_000), None),
        (b"", None),
    ],
)
def test_a_response_s_id_is_its_own_first_field_and_nothing_else(reply: bytes, expected: str | None):
    assert response_id_of(reply) == expected


def test_responses_are_forgotten_by_number_and_age():
    responses = ResponseMap(max_responses=2, ttl_s=100)
    for n in range(3):
        responses.put("t", StoredResponse(f"resp_{n}", "w", "s"), now_s=n)
    assert responses.get("t", "resp_0", 3) is None
    assert responses.get("t", "resp_2", 3) == StoredResponse("resp_2", "w", "s")
    assert responses.get("u", "resp_2", 3) is None
    assert responses.get("t", "resp_2", 103) is None
    responses.put("t", StoredResponse("resp_4", "w", "s"), now_s=200)
    assert len(responses) == 1


def test_a_tenant_that_stores_without_end_pushes_out_a_quarter_of_the_others_at_most():
    responses = ResponseMap(max_responses=100)
    for n in range(90):
        responses.put(f"tenant-{n % 9}", StoredResponse(f"resp_{n}", "w", "s"), now_s=n)
    for n in range(1_000):
        responses.put("greedy", StoredResponse(f"resp_{n}", "w", "s"), now_s=100)
    kept = [n for n in range(90) if responses.get(f"tenant-{n % 9}", f"resp_{n}", 100)]
    assert kept == list(range(15, 90))
    assert [n for n in range(1_000) if responses.get("greedy", f"resp_{n}", 100)] == list(range(975, 1_000))
    assert len(responses) == 100


def test_a_tenant_alone_has_all_places_and_gives_them_up_to_others():
    responses = ResponseMap(max_responses=100)
    for n in range(200):
        responses.put("first", StoredResponse(f"resp_{n}", "w", "s"), now_s=n)
    assert [n for n in range(200) if responses.get("first", f"resp_{n}", 200)] == list(range(100, 200))
    for n in range(60):
        responses.put(f"tenant-{n % 3}", StoredResponse(f"resp_{n}", "w", "s"), now_s=200)
    assert [n for n in range(60) if responses.get(f"tenant-{n % 3}", f"resp_{n}", 200)] == list(range(60))
    assert [n for n in range(200) if responses.get("first", f"resp_{n}", 200)] == list(range(160, 200))
