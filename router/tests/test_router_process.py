"""The router as a process of its own: starting, refusing to start, and ending."""

import asyncio
import os
import signal
import socket
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import aiohttp
import pytest
from click.testing import CliRunner
from router_harness import chat_body, post, until
from scripted_worker import STREAM_HEAD, Received, chunk, event, running_worker

from coda_router.command import router


async def start(*options: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "coda_router", *options, stdout=PIPE, stderr=PIPE, env={"PATH": os.environ["PATH"]}
    )


async def listening_port(process: Process) -> int:
    assert process.stderr is not None
    async with asyncio.timeout(60):
        while line := (await process.stderr.readline()).decode():
            if "listening on" in line:
                return int(line.rpartition(":")[2])
    raise AssertionError("the router ended before it listened")


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", ["--grace-seconds", "--max-held-seconds"])
def test_a_time_that_is_no_time_is_refused_by_option(option, value):
    result = CliRunner().invoke(router, ["--workers", "http://127.0.0.1:9", f"{option}={value}"])
    assert result.exit_code == 2
    assert option in result.output


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], "give either --workers URL... or --discover"),
        (["--workers", "localhost:8000"], "give workers as http://HOST:PORT"),
        (["--workers", "http://h"], "give workers as http://HOST:PORT"),
        (["--workers", "http://h:99999"], "Port out of range"),
        (["--workers", "http://h:1/v1"], "more than host and port"),
        (["--workers", "http://h:1", "http://h:1"], "more than once"),
        (["--workers", "http://h:1", "--discover", "ns/s"], "--discover works in a Kubernetes pod only"),
        (["--workers", "http://h:1", "--host", "::"], "--api-keys-dir"),
        (["--workers", "http://h:1", "--host", "203.0.113.1", "--api-keys-dir", "/"], "cannot listen on"),
        (["--workers", "http://h:1", "--settings-file", "/nonexistent"], "--settings-file /nonexistent"),
        (["--workers", "http://h:1", "--api-keys-dir", "/nonexistent"], "--api-keys-dir /nonexistent"),
        (["--workers", "http://h:1", "--cluster-secret-file", "/dev/null"], "the file is empty"),
        (["--workers", "http://h:1", "--internal-token-file", "/nonexistent"], "--internal-token-file"),
        (["--workers", "http://h:1", "--port", "70000"], "--port"),
    ],
)
def test_what_cannot_work_is_refused_with_one_message_and_status_2(options: list[str], expected: str):
    result = CliRunner().invoke(router, ["--port", "0", *options])
    assert result.exit_code == 2
    assert expected in result.stderr


def test_a_wrong_settings_file_is_refused_naming_the_field(tmp_path: Path):
    settings = tmp_path / "settings.json"
    settings.write_text('{"placement":{"polcy":"coda"}}')
    result = CliRunner().invoke(router, ["--port", "0", "--workers", "http://h:1", "--settings-file", str(settings)])
    assert result.exit_code == 2
    assert "settings.placement.polcy: unknown field" in result.stderr
    assert len(result.stderr.splitlines()) == 1


async def test_a_port_in_use_is_named_without_a_trace():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = await start("--port", str(taken.getsockname()[1]), "--workers", "http://127.0.0.1:1")
        _, errors = await process.communicate()
    assert process.returncode == 2
    assert "cannot listen on 127.0.0.1" in errors.decode()
    assert "choose another --host or --port" in errors.decode()
    assert len(errors.decode().splitlines()) == 1


async def test_on_sigterm_requests_in_flight_finish_and_new_connections_are_refused():
    finish = asyncio.Event()

    async def wait_in_the_middle(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)))
        await finish.wait()
        request.writer.write(chunk(event(1)) + b"0\r\n\r\n")

    async with running_worker(script=wait_in_the_middle) as worker:
        process = await start("--port", "0", "--workers", worker.url, "--grace-seconds", "60")
        port = await listening_port(process)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/v1/chat/completions", chat_body(), close=False))
        await reader.readuntil(event(0))
        process.send_signal(signal.SIGTERM)
        await until(lambda: not accepts(port))
        assert process.returncode is None
        finish.set()
        rest = await reader.read()
        assert event(1) in rest
        assert rest.endswith(b"0\r\n\r\n")
        writer.close()
        assert await process.wait() == 0


async def test_after_the_grace_a_reply_is_cut_off_not_ended():
    async def never_end(request: Received) -> None:
        request.writer.write(STREAM_HEAD + chunk(event(0)))
        await asyncio.Event().wait()

    async with running_worker(script=never_end) as worker:
        process = await start("--port", "0", "--workers", worker.url, "--grace-seconds", "1")
        port = await listening_port(process)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(post("/v1/chat/completions", chat_body(), close=False))
        await reader.readuntil(event(0))
        process.send_signal(signal.SIGTERM)
        with pytest.raises(ConnectionResetError):
            await reader.read()
        writer.close()
        assert await process.wait() == 0
        await until(worker.aborted.is_set)


async def test_several_workers_may_follow_one_option():
    async with running_worker() as a, running_worker() as b:
        process = await start("--port", "0", "--workers", a.url, b.url)
        port = await listening_port(process)
        async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/readyz") as reply:
            assert await reply.text() == "2 of 2 engines answer"
        process.terminate()
        assert await process.wait() == 0


def accepts(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
