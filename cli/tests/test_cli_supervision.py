"""Supervision of real child processes."""

import asyncio
import http.client
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from coda_cli.errors import StackError
from coda_cli.up.backoff import Backoff
from coda_cli.up.machine import free_ports
from coda_cli.up.process_table import group_members
from coda_cli.up.run_record import RunLog, RunRecord, StateDir, boot_id
from coda_cli.up.supervised import SupervisedProcess, Supervision
from coda_operator.desired.processes import ProcessSpec

SERVER = Path(__file__).parent / "tiny_server.py"
QUICK = Backoff(first_s=0.1, longest_s=0.4)
LIMIT_S = 30.0


def record(tmp_path: Path) -> RunRecord:
    return RunRecord(
        name="t", url="", engine_urls=(), pid=os.getpid(), boot_id=boot_id(), python=os.path.realpath(sys.executable),
        scratch_dir=str(tmp_path / "coda-aaaaaaaa"), page_dir=str(tmp_path / "coda-bbbbbbbb"),
    )  # fmt: skip


def supervised(
    tmp_path: Path, behaviour: str, lines: list[str], *, unhealthy_is_broken: bool = True
) -> SupervisedProcess:
    (port,) = free_ports(23_100, 1)
    process = ProcessSpec("server", (sys.executable, str(SERVER), behaviour, str(port)), {}, port, "/health")
    run = RunLog(StateDir(tmp_path), record(tmp_path))
    rules = Supervision(LIMIT_S, unhealthy_is_broken, QUICK, watch_interval_s=0.2)
    return SupervisedProcess(process, os.environ, tmp_path / "server.log", rules, run, lines.append)


@asynccontextmanager
async def running(process: SupervisedProcess) -> AsyncIterator["asyncio.Task[None]"]:
    task = asyncio.create_task(process.run_forever())
    try:
        async with asyncio.timeout(LIMIT_S):
            await process.ready.wait()
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await process.end(grace_s=2.0)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():
            await asyncio.sleep(0.05)


def served_by(process: SupervisedProcess) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", process.process.port, timeout=10)
    connection.request("GET", "/health")
    pid = int(connection.getresponse().read())
    connection.close()
    return pid


async def test_a_killed_process_is_started_again_and_serves_again(tmp_path: Path) -> None:
    lines: list[str] = []
    process = supervised(tmp_path, "healthy", lines)
    async with running(process):
        first = await asyncio.to_thread(served_by, process)
        os.kill(first, signal.SIGKILL)
        await until(lambda: process.restarts == 1 and process.ready.is_set())
        second = await asyncio.to_thread(served_by, process)
    assert first != second
    assert any("server was killed by SIGKILL; starting it again in 0 s" in line for line in lines)
    assert any("server is ready again" in line for line in lines)


async def test_what_a_killed_process_leaves_in_its_group_is_ended_before_the_restart(tmp_path: Path) -> None:
    process = supervised(tmp_path, "with-child", [])
    async with running(process):
        group = process.group
        assert group is not None
        assert len(group_members(group)) == 2
        os.kill(group, signal.SIGKILL)
        await until(lambda: process.restarts == 1 and process.ready.is_set())
        assert group_members(group) == []


async def test_a_process_that_says_it_is_broken_is_started_again(tmp_path: Path) -> None:
    lines: list[str] = []
    process = supervised(tmp_path, "sick-later", lines)
    async with running(process):
        await until(lambda: process.restarts >= 1)
    assert any("server answers 503 to /health; starting it again" in line for line in lines)


async def test_a_router_without_ready_engines_is_not_broken(tmp_path: Path) -> None:
    process = supervised(tmp_path, "sick-later", [], unhealthy_is_broken=False)
    async with running(process) as task:
        for _ in range(10):
            await process._probe()
        assert await process._probe() == 503
        assert not task.done()
        assert process.restarts == 0


async def test_a_process_that_dies_before_it_ever_served_ends_with_its_last_words(tmp_path: Path) -> None:
    process = supervised(tmp_path, "dies", [])
    with pytest.raises(StackError, match="server ended with exit code 3") as failure:
        await asyncio.wait_for(process.run_forever(), LIMIT_S)
    await process.end(grace_s=0.0)
    assert "ValueError: there is no such model" in str(failure.value)
    assert str(tmp_path / "server.log") in str(failure.value)


async def test_ending_leaves_no_process_and_no_group_in_the_record(tmp_path: Path) -> None:
    process = supervised(tmp_path, "with-child", [])
    async with running(process):
        group = process.group
        assert group is not None
        kept = StateDir(tmp_path).read()
        assert kept is not None
        assert kept.groups == (group,)
    assert group_members(group) == []
    kept = StateDir(tmp_path).read()
    assert kept is not None
    assert kept.groups == ()


def test_back_off_grows_to_its_limit_and_forgives_a_stable_process() -> None:
    backoff = Backoff(first_s=1, factor=2, longest_s=30, stable_s=60)
    assert [backoff.wait_s(failures) for failures in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    assert backoff.failures_in_a_row(5, served_s=3) == 6
    assert backoff.failures_in_a_row(5, served_s=60) == 1
