"""What clients get from the router itself: errors in their shape, models, health; and what never passes it."""

import asyncio
import contextlib
import json
import re
import socket
from pathlib import Path

import pytest
from router_harness import ROUTER_ID, SECRET, chat_body, post, raw_exchange, running_router, until
from scripted_worker import (
    STREAM_HEAD,
    Received,
    ScriptedWorker,
    answer_whole,
    chunk,
    event,
    never_answer,
    reset,
    running_worker,
)

from coda_engine.contract.identity import LOWEST_TIER, unpack
from coda_router.config import RouterConfig
from coda_router.edge import body, client
from coda_router.errors import ConfigurationError
from coda_router.fleet.address import WorkerAddress
from coda_router.server import Router


async def test_an_unknown_model_is_404_in_openai_s_shape():
    async with running_worker() as worker, running_router(worker) as router:
        status, body = await router.chat(model="large")
    error = json.loads(body)["error"]
    assert status == 404
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "served: small" in error["message"]


async def test_an_unknown_model_is_404_in_anthropic_s_shape_on_messages():
    async with running_worker() as worker, running_router(worker) as router:
        async with router.session.post(f"{router.url}/v1/messages", json={"model": "large"}) as reply:
            assert reply.status == 404
            document = await reply.json()
    assert document["type"] == "error"
    assert document["error"]["type"] == "not_found_error"


DEEP = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    "body",
    [
        b"{", b"", b'"text"', b'{"model":7}', b'{"model":"small"}x', b"\xff",
        b'{"messages":%b}' % DEEP, b'{"x":%b}' % DEEP, b'{"model":"%b"}' % (b"m" * 4096),
    ],
    ids=["open", "empty", "string", "number", "more", "bytes", "deep messages", "deep field", "long model"],
)  # fmt: skip
async def test_a_body_that_is_no_request_is_400(body: bytes):
    async with running_worker() as worker, running_router(worker) as router:
        raw = await raw_exchange(router.port, post("/v1/chat/completions", body))
    assert raw.startswith(b"HTTP/1.1 400 ")
    assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert not worker.requests


async def test_a_known_model_whose_engines_are_gone_is_503_with_retry_after():
    async with running_worker() as worker, running_router(worker) as router:
        await router.chat()
        await worker.kill()
        await until(lambda: not router.router.dispatcher.fleet.workers[worker.name].is_healthy)
        async with router.session.post(f"{router.url}/v1/chat/completions", data=chat_body()) as reply:
            assert reply.status == 503
            assert int(reply.headers["retry-after"]) >= 1
            assert (await reply.json())["error"]["code"] == "no_engine"


@pytest.mark.parametrize("declared", [True, False])
async def test_a_body_beyond_the_limit_is_413(declared: bool):
    body = chat_body("x" * 4000)
    framing = post("/v1/chat/completions", body)
    if not declared:
        framing = (
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n"
            + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        )
    async with running_worker() as worker, running_router(worker, max_body_bytes=2048) as router:
        raw = await raw_exchange(router.port, framing)
    assert raw.startswith(b"HTTP/1.1 413 ")
    assert not worker.requests


async def test_a_client_that_sends_all_of_a_body_beyond_the_limit_first_learns_what_was_wrong():
    async with running_worker() as worker, running_router(worker, max_body_bytes=2048) as router:
        head, _, sent = post("/v1/chat/completions", chat_body("x" * 16_000_000)).partition(b"\r\n\r\n")
        raw = await raw_exchange(router.port, head + b"\r\n\r\n", sent[:1000], sent[1000:])
    assert raw.startswith(b"HTTP/1.1 413 ")
    assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_too_large"


@pytest.mark.parametrize("bound", ["DROP_TIMEOUT_S", "MAX_DROPPED_BYTES"])
async def test_a_client_that_goes_on_sending_a_refused_body_is_hung_up_on(bound: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body, bound, 0.2)
    async with running_worker() as worker, running_router(worker, max_body_bytes=2048) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(post("/v1/chat/completions", chat_body("x" * 4000))[:-1])
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        async with asyncio.timeout(1.5):
            await reader.read()
        writer.close()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/responses/resp_1", "GET"),
        ("POST", "/v1/models", "GET, HEAD"),
    ],
)
async def test_another_method_is_405_that_names_those_that_are_allowed(method: str, path: str, allowed: str):
    async with running_worker() as worker, running_router(worker) as router:
        async with router.session.request(method, f"{router.url}{path}") as reply:
            assert reply.status == 405
            assert reply.headers["allow"] == allowed


async def test_another_method_is_405_and_another_path_404():
    async with running_worker() as worker, running_router(worker) as router:
        assert (await router.get("/v1/chat/completions"))[0] == 405
        assert (await router.get("/v1/nonsense"))[0] == 404
        assert (await router.get("/nonsense"))[0] == 404


async def test_headers_without_end_are_refused():
    async with running_worker() as worker, running_router(worker) as router:
        request = b"GET /v1/models HTTP/1.1\r\nhost: r\r\n" + b"x-a: %b\r\n" % (b"y" * 10_000) * 10 + b"\r\n"
        raw = await raw_exchange(router.port, request)
    assert raw.startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "start",
    [
        b"GET /",
        b"GET /v1/models HTTP/1.1\r\nhost: r\r\nx-a: ",
        b"GET /v1/models HTTP/1.1\r\nhost: r\r\nx-",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n1;",
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nx-a: ",
    ],
    ids=["target", "header value", "header name", "chunk extension", "trailer"],
)
async def test_a_request_whose_head_never_ends_is_cut_off(start: bytes):
    async with running_worker() as worker, running_router(worker) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(start)
        with contextlib.suppress(ConnectionError):
            for _ in range(64):
                writer.write(b"a" * 32 * 1024)
                await writer.drain()
                await asyncio.sleep(0.001)
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(2):
                assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        writer.close()


@pytest.mark.parametrize("sent", [b"", b"GET /heal", b"GET /healthz HTTP/1.1\r\nhost: r\r\n\r\n\r\n"])
async def test_a_client_that_does_not_come_to_its_next_request_is_hung_up_on(
    sent: bytes, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(client, "HEAD_TIMEOUT_S", 0.2)
    async with running_worker() as worker, running_router(worker) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(sent)
        await asyncio.sleep(0.1)
        writer.write(b"\r\n" if sent.endswith(b"\n") else b"")
        async with asyncio.timeout(2):
            await reader.read()
        writer.close()


async def test_a_body_that_never_begins_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr(body, "DROP_TIMEOUT_S", 0.2)
    async with running_worker() as worker, running_router(worker) as router:
        async with asyncio.timeout(5):
            raw = await raw_exchange(router.port, post("/v1/chat/completions", chat_body()).partition(b"{")[0])
    assert raw.startswith(b"HTTP/1.1 408 ")
    assert json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"
    assert not worker.requests


HEALTH = b"GET /healthz HTTP/1.1\r\nhost: r\r\n\r\n"
CHAT = post("/v1/chat/completions", chat_body(), close=False)


async def test_a_few_pipelined_requests_are_all_answered():
    async with running_worker() as worker, running_router(worker) as router:
        requests = HEALTH * client.MAX_PIPELINED + HEALTH.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n")
        raw = await raw_exchange(router.port, requests)
    assert raw.count(b"HTTP/1.1 200 ") == 1 + client.MAX_PIPELINED


@pytest.mark.parametrize(
    "pieces", [[HEALTH * 1000], [HEALTH] * (client.MAX_PIPELINED + 1)], ids=["at once", "one by one"]
)
async def test_a_client_that_pipelines_more_than_a_few_requests_is_cut_off(pieces: list[bytes]):
    async with running_worker(script=never_answer) as worker, running_router(worker) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(CHAT)
        await until(lambda: worker.requests)
        for piece in pieces:
            writer.write(piece)
            await asyncio.sleep(0.01)
        with pytest.raises(ConnectionResetError):
            async with asyncio.timeout(5):
                await reader.read()
        writer.close()
        await worker.aborted.wait()
        assert len(worker.requests) == 1


@pytest.mark.parametrize("waiting_bytes", [10, 100_000])
async def test_a_client_that_leaves_is_noticed_although_another_of_its_requests_waits(
    waiting_bytes: int, caplog: pytest.LogCaptureFixture
):
    async with running_worker(script=never_answer) as worker, running_router(worker) as router:
        _, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(CHAT)
        await until(lambda: worker.requests)
        writer.write(post("/v1/chat/completions", chat_body("x" * waiting_bytes)))
        await asyncio.sleep(0.1)
        writer.close()
        async with asyncio.timeout(5):
            await worker.aborted.wait()
    assert len(worker.requests) == 1
    assert not [record for record in caplog.records if record.name == "uvicorn.error" and record.levelno >= 40]


async def test_a_cut_reply_before_a_waiting_request_is_no_error_of_the_application(caplog: pytest.LogCaptureFixture):
    async def die_in_the_middle(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)))
        await asyncio.sleep(0.1)
        reset(request.writer)

    async with running_worker(script=die_in_the_middle) as worker, running_router(worker) as router:
        with pytest.raises(ConnectionResetError):
            await raw_exchange(router.port, CHAT + HEALTH)
    assert not [record for record in caplog.records if record.name == "uvicorn.error" and record.levelno >= 40]


async def test_a_client_that_vanished_without_a_word_is_noticed(monkeypatch: pytest.MonkeyPatch):
    made, connection_made = [], client.ClientProtocol.connection_made

    def remember(protocol: client.ClientProtocol, transport: asyncio.Transport) -> None:
        connection_made(protocol, transport)
        made.append(transport.get_extra_info("socket"))

    monkeypatch.setattr(client.ClientProtocol, "connection_made", remember)
    async with running_worker() as worker, running_router(worker) as router:
        await router.chat()
        assert made[0].getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert 0 < made[0].getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) <= 120_000


async def test_a_reply_may_take_longer_than_a_head(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(client, "HEAD_TIMEOUT_S", 0.1)

    async def answer_late(request: Received) -> None:
        await asyncio.sleep(0.4)
        await answer_whole(request)

    async with running_worker(script=answer_late) as worker, running_router(worker) as router:
        raw = await raw_exchange(router.port, post("/v1/chat/completions", chat_body()))
    assert raw.startswith(b"HTTP/1.1 200 ")


async def test_trailers_do_not_become_headers():
    chunked = (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    )
    body = chat_body()
    async with running_worker() as worker, running_router(worker) as router:
        sent = chunked + b"%x\r\n%b\r\n0\r\nx-trailer: late\r\n\r\n" % (len(body), body)
        assert (await raw_exchange(router.port, sent)).startswith(b"HTTP/1.1 200 ")
    assert "x-trailer" not in worker.requests[-1].headers


async def test_models_are_listed_under_every_name():
    async with running_worker(models=["small", "alias"]) as worker, running_router(worker) as router:
        _, listed = await router.get("/v1/models")
        status, alias = await router.get("/v1/models/alias")
        assert (await router.get("/v1/models/other"))[0] == 404
        assert (await router.chat(model="alias"))[0] == 200
    assert [model["id"] for model in listed["data"]] == ["small", "alias"]
    assert (status, alias["root"], alias["max_model_len"]) == (200, "small", 8192)


async def test_a_model_whose_name_has_a_slash_can_be_asked_for():
    async with running_worker(models=["org/model"]) as worker, running_router(worker) as router:
        assert (await router.get("/v1/models/org/model"))[0] == 200
        assert (await router.chat(model="org/model"))[0] == 200


async def test_probes_are_answered_cheaply():
    async with running_worker() as worker, running_router(worker) as router:
        async with router.session.head(f"{router.url}/") as reply:
            assert reply.status == 200
        assert (await router.get("/healthz"))[0] == 200
        assert (await router.get("/readyz")) == (200, "1 of 1 engines answer")
        assert (await router.get("/health"))[0] == 200
        await worker.kill()
        await until(lambda: not router.router.dispatcher.fleet.workers[worker.name].is_healthy)
        assert (await router.get("/readyz"))[0] == 503
        assert (await router.get("/healthz"))[0] == 200


async def test_metrics_are_in_prometheus_text_format():
    async with running_worker() as worker, running_router(worker) as router:
        await router.chat()
        _, text = await router.get("/metrics")
    assert 'coda_router_requests_total{endpoint="/v1/chat/completions",status="200"} 1.0' in text
    assert 'coda_router_placements_total{reason="OnlyCandidate"} 1.0' in text
    assert f'coda_router_worker_healthy{{worker="{worker.name}"}} 1.0' in text
    assert "coda_router_first_byte_seconds_count 1.0" in text


async def test_the_guide_lists_every_metric_with_its_kind_and_no_other(tmp_path: Path):
    async with running_worker() as worker, running_router(worker, decision_log=tmp_path / "decisions.jsonl") as router:
        await router.chat()
        _, text = await router.get("/metrics")
    kinds = re.findall(r"^# TYPE (coda_router_\w+) (\w+)$", text, re.MULTILINE)
    guide = Path(__file__).parents[2] / "docs/guides/router-metrics.md"
    listed = re.findall(r"^\| `(coda_router_\w+)` \| (\w+) \|", guide.read_text(), re.MULTILINE)
    assert sorted(listed) == sorted((name, kind) for name, kind in kinds if not name.endswith("_created"))


async def test_what_a_client_must_not_say_to_an_engine_is_stripped():
    hostile = (
        "X-Session-ID: coda1.forged.value",
        "X-Vllm-Priority: -100",
        "X-Data-Parallel-Rank: 3",
        "X-Coda-Session: mine",
        "Proxy-Authorization: Basic x",
        "Connection: close, X-Hop",
        "X-Hop: private to this hop",
        "TE: trailers",
    )
    body = json.dumps(
        {
            "model": "small",
            "session_id": "coda1.forged.value",
            "priority": -100,
            "cache_salt": "victim's",
            "kv_transfer_params": {"remote": "x"},
            "vllm_xargs": {"kv_transfer_params": "{}"},
            "messages": [],
            "temperature": 0.5,
        }
    ).encode()
    async with running_worker(script=answer_whole) as worker, running_router(worker) as router:
        await raw_exchange(router.port, post("/v1/chat/completions", body, *hostile, close=False))
    seen = worker.requests[0]
    identity = unpack(seen.headers["x-session-id"], SECRET)
    assert identity.session == "mine"
    assert identity.router_id == ROUTER_ID
    assert identity.tier < LOWEST_TIER
    assert seen.headers["x-vllm-priority"] == "0"
    assert not seen.headers.keys() & {"x-data-parallel-rank", "x-coda-session", "proxy-authorization", "x-hop", "te"}
    assert seen.json() == {"model": "small", "messages": [], "temperature": 0.5}


async def test_an_api_key_makes_the_tenant_and_never_reaches_an_engine(tmp_path):
    (tmp_path / "alice").write_text("key-of-alice\n")
    (tmp_path / "bob").write_text("key-of-bob-1")
    (tmp_path / ".hidden").write_text("no tenant")
    async with running_worker(script=answer_whole) as worker, running_router(worker, api_keys_dir=tmp_path) as router:
        assert (await router.chat(headers={"authorization": "Bearer key-of-alice"}))[0] == 200
        assert (await router.chat(headers={"x-api-key": "key-of-bob-1"}))[0] == 200
        status, body = await router.chat()
        assert (status, json.loads(body)["error"]["code"]) == (401, "missing_api_key")
        status, body = await router.chat(headers={"authorization": "Bearer key-of-carol"})
        assert (status, json.loads(body)["error"]["code"]) == (401, "invalid_api_key")
        assert (await router.get("/v1/models"))[0] == 401
        assert (await router.get("/healthz"))[0] == 200
    tenants = [unpack(request.headers["x-session-id"], SECRET).tenant for request in worker.requests]
    assert tenants == ["alice", "bob"]
    assert all(not request.headers.keys() & {"authorization", "x-api-key"} for request in worker.requests)


async def test_changed_api_keys_are_taken_and_unusable_ones_are_not(tmp_path, caplog):
    (tmp_path / "alice").write_text("the-first-key")

    async with running_worker() as worker, running_router(worker, api_keys_dir=tmp_path) as router:

        async def is_let_in(key: str) -> bool:
            return (await router.chat(headers={"authorization": f"Bearer {key}"}))[0] == 200

        assert await is_let_in("the-first-key")
        (tmp_path / "alice").write_text("the-second-key")
        async with asyncio.timeout(10):
            while not await is_let_in("the-second-key"):
                await asyncio.sleep(0.05)
        assert not await is_let_in("the-first-key")
        (tmp_path / "alice").write_text("")
        await until(lambda: "changed but is not taken" in caplog.text)
        assert await is_let_in("the-second-key")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, "holds no key"),
        ({"alice": ""}, "'alice': the key has fewer than 8"),
        ({"alice": "same-key-1", "bob": "same-key-1"}, "'bob': holds the same key as file 'alice'"),
    ],
)
def test_unusable_api_keys_are_refused_at_start(tmp_path, files: dict[str, str], expected: str):
    for name, key in files.items():
        (tmp_path / name).write_text(key)
    config = RouterConfig("127.0.0.1", 0, (WorkerAddress("w", "127.0.0.1", 1),), api_keys_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=expected):
        Router(config)


async def test_settings_change_live_and_are_reported_by_digest(tmp_path):
    settings_file = tmp_path / "settings.json"
    settings_file.write_text('{"placement":{"policy":"round-robin"}}')
    async with running_worker() as worker, running_router(worker, settings_file=settings_file) as router:
        _, at_start = await router.get("/coda/settings")
        assert at_start["settings"]["placement"]["policy"] == "round-robin"
        url = f"{router.url}/coda/settings"
        async with router.session.put(url, data=b'{"placement":{"policy":"least-loaded"}}') as reply:
            digest = (await reply.json())["digest"]
        assert (await router.get("/coda/status"))[1]["settings_digest"] == digest != at_start["digest"]
        async with router.session.put(url, data=b'{"placement":{"overloadBound":0}}') as reply:
            assert reply.status == 400
            assert "settings.placement.overloadBound" in (await reply.json())["detail"]
        assert (await router.get("/coda/status"))[1]["settings_digest"] == digest
        settings_file.write_text('{"placement":{"policy":"coda"}}')
        async with asyncio.timeout(10):
            while (await router.get("/coda/settings"))[1]["settings"]["placement"]["policy"] != "coda":
                await asyncio.sleep(0.05)


async def test_without_a_token_internal_endpoints_are_closed_to_other_machines(tmp_path):
    (tmp_path / "alice").write_text("alice-key-1")
    async with running_worker() as worker:
        async with running_router(worker, host="127.0.0.1") as router:
            assert (await router.get("/coda/status"))[0] == 200
        async with running_router(worker, host="0.0.0.0", api_keys_dir=tmp_path) as router:  # noqa: S104 - the case
            for path in ("/coda/status", "/coda/decisions", "/coda/settings"):
                assert (await router.get(path))[0] == 403
            async with router.session.put(f"{router.url}/coda/settings", json={"version": 1}) as reply:
                assert reply.status == 403


async def test_internal_endpoints_want_the_internal_token():
    async with running_worker(internal_token="internal-1") as worker:
        async with running_router(worker, internal_token="internal-1") as router:
            for path in ("/coda/status", "/coda/decisions", "/coda/settings"):
                assert (await router.get(path))[0] == 401
                assert (await router.get(path, headers={"authorization": "Bearer internal-1"}))[0] == 200
            assert (await router.chat())[0] == 200


async def test_an_unexpected_failure_is_a_500_without_a_trace(caplog):
    async with running_worker() as worker, running_router(worker) as router:
        router.router.dispatcher.decisions.count = None
        status, body = await router.chat()
    assert status == 500
    assert json.loads(body)["error"]["type"] == "api_error"
    assert b"Traceback" not in body
    assert "a request failed inside the router" in caplog.text


async def test_without_a_cluster_secret_the_engine_gets_a_hashed_session():
    worker: ScriptedWorker
    async with running_worker(script=answer_whole) as worker, running_router(worker, cluster_secret=None) as router:
        await router.chat(headers={"x-coda-session": "visible"})
        await router.chat(headers={"x-coda-session": "visible"})
    values = {request.headers["x-session-id"] for request in worker.requests}
    assert len(values) == 1
    assert "visible" not in values.pop()
