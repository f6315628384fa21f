"""Clients that try to break the router, its log, or the framing between it and the engines."""

import asyncio
import contextlib
import io
import json
import logging
import re
from pathlib import Path

import pytest
from router_harness import chat_body, post, raw_exchange, running_router, until
from scripted_worker import answer_whole, running_worker
from test_router_process import listening_port, start

from coda_router.edge import body
from coda_router.logs import OneLineFormatter

pytestmark = pytest.mark.stress

CHAT = "/v1/chat/completions"
BODY = chat_body()
SMUGGLED = b"GET /smuggled HTTP/1.1\r\nhost: r\r\n\r\n"


def framed(*headers: bytes, rest: bytes = b"0\r\n\r\n" + SMUGGLED, version: bytes = b"1.1") -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/%b\r\nhost: r\r\n" % version + b"".join(h + b"\r\n" for h in headers) + b"\r\n"
    ) + rest


LENGTH = b"content-length: %d" % len(BODY)
CHUNKED = b"transfer-encoding: chunked"

SMUGGLING = {
    "length then chunks": framed(LENGTH, CHUNKED),
    "chunks then length": framed(CHUNKED, LENGTH),
    "two lengths": framed(LENGTH, b"content-length: 0", rest=BODY),
    "the same length twice": framed(LENGTH, LENGTH, rest=BODY),
    "a list of lengths": framed(b"content-length: 3, 3", rest=BODY),
    "a signed length": framed(b"content-length: +3", rest=BODY),
    "a negative length": framed(b"content-length: -1", rest=BODY),
    "a hexadecimal length": framed(b"content-length: 0x3", rest=BODY),
    "a length beyond all numbers": framed(b"content-length: 99999999999999999999999", rest=BODY),
    "an empty length": framed(b"content-length:", rest=BODY),
    "a folded header": framed(b"x-a: 1\r\n 2", LENGTH, rest=BODY),
    "a header folded by a tab": framed(b"x-a: 1\r\n\t2", LENGTH, rest=BODY),
    "a folded coding": framed(b"transfer-encoding:\r\n chunked"),
    "chunked before the last coding": framed(b"transfer-encoding: chunked, identity"),
    "no chunks at all": framed(b"transfer-encoding: identity"),
    "chunked twice": framed(b"transfer-encoding: chunked, chunked"),
    "two codings": framed(CHUNKED, b"transfer-encoding: identity"),
    "a coding like chunked": framed(b"transfer-encoding: xchunked"),
    "a coding after a vertical tab": framed(b"transfer-encoding: \x0bchunked"),
    "a space before the colon": framed(b"transfer-encoding : chunked"),
    "bare line feeds": framed(b"x-a: 1\nx-b: 2", LENGTH, rest=BODY),
    "a bare carriage return": framed(b"x-a: 1\rx-b: 2", LENGTH, rest=BODY),
    "NUL in a header": framed(b"x-a: 1\x00", LENGTH, rest=BODY),
    "NUL in a name": framed(b"x\x00a: 1", LENGTH, rest=BODY),
    "escape in a header": framed(b"x-a: \x1b[31m", LENGTH, rest=BODY),
    "a negative chunk": framed(CHUNKED, rest=b"-1\r\n" + SMUGGLED),
    "a chunk size with a prefix": framed(CHUNKED, rest=b"0x5\r\nhello\r\n0\r\n\r\n"),
    "a chunk size beyond all numbers": framed(CHUNKED, rest=b"f" * 17 + b"\r\n"),
    "chunks with bare line feeds": framed(CHUNKED, rest=b"5\nhello\n0\n\n"),
    "chunks that do not end": framed(CHUNKED, rest=b"5\r\nhelloX0\r\n\r\n"),
    "HTTP/1.9": framed(LENGTH, rest=BODY, version=b"1.9"),
    "another protocol before the body": framed(b"connection: upgrade", b"upgrade: h2c", LENGTH, rest=SMUGGLED),
    "a control in the path": b"POST /v1/chat/completions\x01 HTTP/1.1\r\nhost: r\r\ncontent-length: 0\r\n\r\n",
    "high bytes in the query": b"POST /v1/chat/completions?\xff HTTP/1.1\r\nhost: r\r\ncontent-length: 0\r\n\r\n",
}


@pytest.mark.parametrize("request_bytes", SMUGGLING.values(), ids=SMUGGLING)
async def test_a_request_whose_end_could_be_disputed_is_refused(request_bytes: bytes):
    async with running_worker(script=answer_whole) as worker, running_router(worker) as router:
        async with asyncio.timeout(20):
            raw = await raw_exchange(router.port, request_bytes)
        # One answer, and nothing of what follows is taken for a request.
        assert raw.startswith(b"HTTP/1.1 400 ")
        assert raw.count(b"HTTP/1.1 ") == 1
        assert not worker.requests
        assert (await router.chat())[0] == 200


async def test_a_request_for_another_protocol_without_a_body_is_answered_in_this_one():
    request = b"GET /healthz HTTP/1.1\r\nhost: r\r\nconnection: upgrade, close\r\nupgrade: h2c\r\n\r\n"
    async with running_worker() as worker, running_router(worker) as router:
        assert (await raw_exchange(router.port, request)).startswith(b"HTTP/1.1 200 ")


async def test_a_header_bomb_is_refused():
    bomb = b"GET /v1/models HTTP/1.1\r\nhost: r\r\n" + b"".join(b"x-%d: y\r\n" % n for n in range(20_000)) + b"\r\n"
    async with running_worker() as worker, running_router(worker) as router:
        with contextlib.suppress(ConnectionError):
            assert (await raw_exchange(router.port, bomb)).startswith(b"HTTP/1.1 400 ")
        assert (await router.chat())[0] == 200


async def test_a_body_that_trickles_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(body, "BODY_TIMEOUT_S", 0.3)
    async with running_worker() as worker, running_router(worker) as router:
        reader, writer = await asyncio.open_connection("127.0.0.1", router.port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 1000\r\n\r\n")
        answered = asyncio.create_task(reader.readuntil(b'"request_timeout"'))
        async with asyncio.timeout(20):
            while not answered.done():
                writer.write(b" ")
                await asyncio.sleep(0.05)
        assert answered.result().startswith(b"HTTP/1.1 408 ")
        writer.close()
        assert not worker.requests


def with_field(name: str, value: bytes) -> bytes:
    return b'{"model":"small","messages":[],"%b":%b}' % (name.encode(), value)


ODD_BUT_JSON = {
    "a huge number": with_field("max_tokens", b"9" * 100_000),
    "a huge exponent": with_field("temperature", b"1e999999"),
    "a deep number": with_field("seed", b"-0.0e-0"),
    "10,000 tools": with_field(
        "tools", b"[%b]" % b",".join(b'{"type":"function","function":{"name":"t%d"}}' % n for n in range(10_000))
    ),
    "10,000 messages": with_field(
        "messages", b"[%b]" % b",".join(b'{"role":"assistant","content":"%d"}' % n for n in range(10_000))
    ),
    "tools that are none": with_field("tools", b'{"a":[1,null,{"function":7}]}'),
    "messages that are none": with_field("messages", b'[7,null,"x",[[]],{"role":7,"content":{"a":1}}]'),
    "a name twice": b'{"model":"other","model":"small","messages":[],"messages":[]}',
    "controls in strings": with_field("user", rb'"\u0000\n\u001b[31m\u2028"'),
}


@pytest.mark.parametrize("sent", ODD_BUT_JSON.values(), ids=ODD_BUT_JSON)
async def test_what_is_odd_but_json_is_the_engine_s_to_judge(sent: bytes):
    async with running_worker(script=answer_whole) as worker, running_router(worker) as router:
        async with asyncio.timeout(20):
            raw = await raw_exchange(router.port, post(CHAT, sent))
        assert raw.startswith(b"HTTP/1.1 200 ")
        assert worker.requests[0].body == sent


NOT_JSON = {
    "bytes of no encoding": with_field("user", b'"\xff\xfe"'),
    "half a surrogate": b'{"model":"\\ud800","messages":[]}',
    "an overlong encoding": b'{"model":"\xc0\xaf"}',
    "UTF-16": '{"model":"small"}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + BODY,
    "NUL after the end": BODY + b"\x00",
    "not a number": b'{"model":NaN}',
    "a comment": b'{"model":"small"/**/}',
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
}


@pytest.mark.parametrize("sent", NOT_JSON.values(), ids=NOT_JSON)
async def test_what_is_no_json_is_refused_in_one_line(sent: bytes):
    async with running_worker(script=answer_whole) as worker, running_router(worker) as router:
        async with asyncio.timeout(20):
            raw = await raw_exchange(router.port, post(CHAT, sent))
        if raw.startswith(b"HTTP/1.1 400 "):
            assert "\n" not in json.loads(raw.partition(b"\r\n\r\n")[2])["error"]["message"]
            assert not worker.requests
        else:
            # Within a field that the router does not read, the engine's judgement is asked.
            assert worker.requests[0].body == sent


# Logs


def test_a_log_record_is_one_line_whatever_is_in_it():
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    log.warning("model %s", "a\nERROR coda.router: forged\r\x1b[2J\x00\x85\u2028b")
    assert written.getvalue() == (
        "WARNING test: model a\\x0aERROR coda.router: forged\\x0d\\x1b[2J\\x00\\x85\\x2028b\n"
    )


def test_no_line_of_a_traceback_looks_like_a_record():
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(OneLineFormatter("%(levelname)s %(name)s: %(message)s"))
    log = logging.Logger("test")
    log.addHandler(handler)
    try:
        raise ValueError("bad\nERROR coda.router: forged\x1b[2J")
    except ValueError:
        log.exception("failed")
    record, *trace = written.getvalue().splitlines()
    assert record == "ERROR test: failed"
    assert all(line.startswith("  ") for line in trace)
    assert "\x1b" not in written.getvalue()


FORGED = "x\n2030-01-01 00:00:00,000 ERROR coda.router: forged\r\x1b[31m"


class _Unreadable:
    def to_json(self) -> bytes:
        return json.dumps({"instance_id": "i", "version": FORGED, FORGED: 1}).encode()


async def test_the_log_and_the_decision_log_of_a_router_cannot_be_forged(tmp_path: Path):
    decisions = tmp_path / "decisions.jsonl"
    async with running_worker(script=answer_whole) as worker:
        process = await start(
            "--port", "0", "--workers", worker.url, "--log-level", "debug", "--decision-log", str(decisions)
        )
        port = await listening_port(process)
        await raw_exchange(port, post(CHAT, chat_body(model=FORGED)))
        await raw_exchange(port, post(CHAT, json.dumps({"model": "small", "prompt_cache_key": FORGED}).encode()))
        await raw_exchange(port, post("/v1/x%0aERROR%20coda.router:%20forged%1b[31m", BODY))
        await raw_exchange(port, b"GET /v1/models/x%0aERROR HTTP/1.1\r\nhost: r\r\nconnection: close\r\n\r\n")
        await raw_exchange(port, b"garbage\x1b[31m\nERROR coda.router: forged\r\n\r\n")
        worker.snapshot = lambda: _Unreadable()  # type: ignore[method-assign, assignment, return-value]
        await asyncio.sleep(0.5)
        process.terminate()
        assert process.stderr is not None
        logged = (await process.stderr.read()).decode()
        assert await process.wait() == 0
    record = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} (DEBUG|INFO|WARNING|ERROR) [\w.]+: .")
    lines = logged.split("\n")
    assert "unreadable snapshot" in logged
    assert all(record.match(line) or line.startswith("  ") for line in lines if line)
    assert not any(re.match(r"2030|ERROR", line) for line in lines)
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", logged)
    written = decisions.read_text().split("\n")
    documents = [json.loads(line) for line in written if line]
    assert [document["model"] for document in documents] == [FORGED, "small"]
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f]", "\n".join(written))


async def test_a_client_s_request_line_cannot_be_forged_towards_an_engine():
    async with running_worker(script=answer_whole) as worker, running_router(worker) as router:
        await raw_exchange(router.port, post(f"{CHAT}?a=%0d%0ax-vllm-priority:%20-1&b=%20HTTP/1.1", BODY))
        await until(lambda: worker.requests)
    assert worker.requests[0].target == f"{CHAT}?a=%0d%0ax-vllm-priority:%20-1&b=%20HTTP/1.1"
    assert worker.requests[0].headers["x-vllm-priority"] == "0"
