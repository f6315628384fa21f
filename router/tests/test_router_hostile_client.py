"""A client that tries, on every protocol, to speak to the engine past the router: with body fields and with headers.

Every value that it tries carries a marker; no request that reaches the worker may have the marker where an engine
would take it for more than a conversation's content.
"""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from router_harness import ROUTER_ID, SECRET, RunningRouter, post, raw_exchange, running_router
from scripted_worker import Received, ScriptedWorker, answer_whole, reply_bytes, running_worker

from coda_engine.contract.identity import Identity, pack, unpack
from coda_router.edge.protocols import ENDPOINTS
from coda_router.envelope import ENGINE_CONTROL_FIELDS

pytestmark = pytest.mark.stress

KEY = "key-of-mallory"
MARKER = "hostile-value"

CONTROL_VALUES = {
    "session_id": f'"{MARKER}"',
    "priority": '-99887766554433',
    "cache_salt": f'"{MARKER}"',
    "kv_transfer_params": f'{{"do_remote_prefill":true,"remote_host":"{MARKER}"}}',
    "ec_transfer_params": f'{{"remote":"{MARKER}"}}',
    "vllm_xargs": f'{{"session_id":"{MARKER}","kv_transfer_params":"{MARKER}","coda_tier":0}}',
    "request_id": f'"{MARKER}"',
}  # fmt: skip

HOSTILE_HEADERS = (
    f"X-Session-ID: {pack(Identity('victim', MARKER, tier=0), b'not the secret, but the form')}",
    f"x-session-id: coda1.{MARKER}.{MARKER}",
    f"X-SESSION-ID: {MARKER}",
    "X-Vllm-Priority: -99887766554433",
    f"X-Vllm-Something-New: {MARKER}",
    "X-Data-Parallel-Rank: 99887766554433",
    f"X-Data-Parallel-Host: {MARKER}",
    f"X-Coda-Tenant: {MARKER}",
    f"X-Coda-Tier: {MARKER}",
    f"X-Coda-Anything: {MARKER}",
    f"X-Request-Id: {MARKER}",
    f"Endpoint-Load-Metrics-Format: {MARKER}",
    f"X-Api-Key: {MARKER}",
    f"Cookie: {MARKER}",
    f"Proxy-Authorization: {MARKER}",
    "Connection: keep-alive, X-Session-Id, X-Vllm-Priority, Content-Length",
)


def escaped(name: str, *positions: int) -> str:
    """Return a field's name with the characters at these positions written as escapes."""
    return "".join(f"\\u{ord(c):04x}" if i in positions else c for i, c in enumerate(name))


def spellings(name: str, value: str) -> list[str]:
    """Return JSON members that an engine would all read as ``name`` (the last of several counts)."""
    everywhere = escaped(name, *range(len(name)))
    return [
        f'"{name}":{value}',
        f'"{name}":{value},"{name}":{value}',
        f'"{name}":null,"{name}":{value}',
        f'"{name}":{value},"{name}":null',
        f'"{escaped(name, 0)}":{value}',
        f'"{escaped(name, len(name) - 1)}":{value}',
        f'"{everywhere}":{value}',
        f'"{everywhere.upper().replace("U", "u")}":{value}',
        f'"{name}":null,"{everywhere}":{value}',
        f' \t\r\n"{name}" \n:\t{value} ',
    ]


def members_around(member: str) -> list[str]:
    """Return bodies that have a member first, last, and between others."""
    return [
        f'{{{member},"model":"small","messages":[]}}',
        f'{{"model":"small","messages":[],{member}}}',
        f'{{"model":"small",{member},"messages":[], "temperature": 5e-1}}',
        f'\n {{"model":"small","model":"small",{member}}}\n',
    ]


async def send(router: RunningRouter, path: str, body: bytes, *headers: str) -> bytes:
    request = post(path, body, f"authorization: Bearer {KEY}", "content-type: application/json", *headers)
    async with asyncio.timeout(30):
        return await raw_exchange(router.port, request)


def as_an_engine_reads_it(body: bytes) -> dict[str, Any]:
    """Return the body's fields as Python's JSON reader, which is vLLM's, takes them."""
    document = json.loads(body)
    assert isinstance(document, dict)
    return document


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "mallory").write_text(KEY)
    return tmp_path


def test_every_control_has_a_hostile_value():
    assert CONTROL_VALUES.keys() == set(ENGINE_CONTROL_FIELDS)


@pytest.mark.parametrize("path", ENDPOINTS)
@pytest.mark.parametrize("name", ENGINE_CONTROL_FIELDS)
async def test_no_spelling_of_an_engine_control_passes(keys: Path, path: str, name: str):
    async with running_worker(script=answer_whole) as worker, running_router(worker, api_keys_dir=keys) as router:
        for member in spellings(name, CONTROL_VALUES[name]):
            for body in members_around(member):
                assert (await send(router, path, body.encode())).startswith(b"HTTP/1.1 200 "), body
                seen = worker.requests[-1]
                expected = {k: v for k, v in json.loads(body).items() if k != name}
                assert as_an_engine_reads_it(seen.body) == expected, body
                assert MARKER.encode() not in seen.body
                assert b"99887766554433" not in seen.body
    assert len(worker.requests) == 40


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_all_controls_at_once_leave_nothing_but_the_request(keys: Path, path: str):
    members = ",".join(f'"{name}":{value}' for name, value in CONTROL_VALUES.items())
    async with running_worker(script=answer_whole) as worker, running_router(worker, api_keys_dir=keys) as router:
        await send(router, path, f'{{"model":"small",{members}}}'.encode())
    assert worker.requests[0].body == b'{"model":"small"}'


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_what_looks_like_a_control_inside_the_content_stays_content(keys: Path, path: str):
    inner = "{" + ",".join(f'"{name}":{value}' for name, value in CONTROL_VALUES.items()) + "}"
    names = ",".join(f'"Not_{name}":1,"{name}\\u0000":1,"{name.upper()}":1' for name in ENGINE_CONTROL_FIELDS)
    body = f'{{"model":"small","messages":[{inner}],"metadata":{inner},"extra_body":{inner},{names}}}'.encode()
    async with running_worker(script=answer_whole) as worker, running_router(worker, api_keys_dir=keys) as router:
        await send(router, path, body)
    assert worker.requests[0].body == body
    assert not as_an_engine_reads_it(body).keys() & set(ENGINE_CONTROL_FIELDS)


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_no_header_speaks_to_the_engine_but_the_router_s_own(keys: Path, path: str):
    async with running_worker(script=answer_whole) as worker, running_router(worker, api_keys_dir=keys) as router:
        for header in HOSTILE_HEADERS:
            assert (await send(router, path, b'{"model":"small"}', header, header.swapcase())).startswith(
                b"HTTP/1.1 200 "
            )
            check_headers(worker.requests[-1])
        await send(router, path, b'{"model":"small"}', *HOSTILE_HEADERS)
        check_headers(worker.requests[-1])
    assert len(worker.requests) == len(HOSTILE_HEADERS) + 1


def check_headers(seen: Received) -> None:
    identity = unpack(seen.headers["x-session-id"], SECRET)
    assert (identity.tenant, identity.router_id, identity.tier) == ("mallory", ROUTER_ID, 0)
    assert seen.headers["x-vllm-priority"] == "0"
    assert seen.headers["content-length"] == str(len(seen.body))
    own = {"x-session-id", "x-vllm-priority", "content-length", "host", "content-type"}
    assert seen.headers.keys() <= own
    told = " ".join(f"{name}: {value}" for name, value in seen.headers.items()).lower()
    assert MARKER not in told
    assert "99887766554433" not in told


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_body_that_is_no_json_for_the_router_never_reaches_an_engine(keys: Path, path: str):
    control = f'{{"session_id":"{MARKER}","model":"small"}}'
    multipart = f'--b\r\ncontent-disposition: form-data; name="session_id"\r\n\r\n{MARKER}\r\n--b--\r\n'.encode()
    bodies = {
        "multipart/form-data; boundary=b": [multipart],
        "application/x-www-form-urlencoded": [f"session_id={MARKER}&model=small".encode()],
        "application/json; charset=utf-16": [control.encode("utf-16"), control.encode("utf-16-le")],
        "application/json; charset=utf-32": [control.encode("utf-32")],
        "application/json": [
            control.encode("utf-8-sig"), gzip.compress(control.encode()), control.encode().replace(b'"small"', b"NaN"),
            b"[%b]" % control.encode(), control.encode() + control.encode(), b"", b"null", b'"session_id"',
            control.encode().replace(b"model", b"mo\xffdel"), control.encode().replace(b"small", b"\\ud800"),
            control.encode().replace(b"}", b",}"), b"// x\n" + control.encode(), control.encode().replace(b'"', b"'"),
        ],
    }  # fmt: skip
    async with running_worker(script=answer_whole) as worker, running_router(worker, api_keys_dir=keys) as router:
        for content_type, contents in bodies.items():
            for body in contents:
                raw = await raw_exchange(
                    router.port,
                    post(path, body, f"authorization: Bearer {KEY}", f"content-type: {content_type}"),
                )
                assert raw.startswith(b"HTTP/1.1 400 "), body
                assert MARKER.encode() not in raw
    assert not worker.requests


@pytest.mark.parametrize(("method", "suffix"), [(b"GET", ""), (b"POST", "/cancel")])
async def test_whoever_asks_about_a_response_tells_its_engine_nothing_else(keys: Path, method: bytes, suffix: str):
    async def make_response(request: Received) -> None:
        request.writer.write(reply_bytes(b'{"id":"resp_1","object":"response"}'))

    controls = "{" + ",".join(f'"{name}":{value}' for name, value in CONTROL_VALUES.items()) + "}"
    async with running_worker(script=make_response) as worker, running_router(worker, api_keys_dir=keys) as router:
        await send(router, "/v1/responses", b'{"model":"small","store":true}')
        asked = post(
            f"/v1/responses/resp_1{suffix}", controls.encode(), f"authorization: Bearer {KEY}", *HOSTILE_HEADERS
        )
        raw = await raw_exchange(router.port, method + asked.removeprefix(b"POST"))
    assert raw.startswith(b"HTTP/1.1 200 ")
    seen = worker.requests[-1]
    assert seen.target == f"/v1/responses/resp_1{suffix}"
    assert seen.body == b""
    check_headers(seen)


async def test_without_keys_everybody_is_one_tenant_and_may_name_his_requests():
    worker: ScriptedWorker
    async with running_worker(script=answer_whole) as worker, running_router(worker) as router:
        await send(router, "/v1/chat/completions", b'{"model":"small"}', "X-Request-Id: mine", "X-Vllm-Priority: -1")
    headers = worker.requests[0].headers
    assert headers["x-request-id"] == "mine"
    assert headers["x-vllm-priority"] == "0"
