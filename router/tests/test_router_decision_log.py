"""The decision log: every decision in the file with its signals, bounded, and never in a request's way."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from router_harness import running_router, until
from scripted_worker import running_worker

from coda_engine.contract.snapshot import session_key
from coda_router.command import router as router_command
from coda_router.decision_file import MAX_BUFFERED_BYTES, DecisionFile
from coda_router.errors import ConfigurationError
from coda_router.holding import HoldingLimits


def lines(*paths: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def sizes_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir()}


async def test_every_request_has_a_line_with_candidates_signals_winner_reason_and_trail(tmp_path: Path):
    path = tmp_path / "decisions.jsonl"
    async with running_worker(others_running=3) as a, running_worker() as b:
        async with running_router(a, b, decision_log=path) as router:
            for _ in range(3):
                await router.chat(headers={"x-coda-session": "s"})
            await router.chat(model="nobody has it")
            served = await router.decisions()
    written = lines(path)
    assert [line["sequence"] for line in written] == [1, 2, 3, 4]
    assert written[0]["worker"] == b.name
    assert written[0]["policy"] == "coda"
    signals = {worker["name"]: worker for worker in written[0]["workers"]}
    assert signals.keys() == {a.name, b.name}
    assert (signals[a.name]["load_requests"], signals[b.name]["load_requests"]) == (3, 0)
    assert signals[a.name]["waiting_requests"] == 0
    assert (written[3]["worker"], written[3]["reason"]) == (None, "ModelNotServed")
    # What the ring serves is in the lines, word for word.
    assert [{name: line[name] for name in decision} for line, decision in zip(written, served, strict=True)] == served


async def test_a_line_tells_where_the_session_was_resident(tmp_path: Path):
    path = tmp_path / "decisions.jsonl"
    async with running_worker() as a, running_worker() as b, running_router(a, b, decision_log=path) as router:
        key = session_key("", "s")
        a.resident[key], b.resident[key] = 500, 9_000
        fleet = router.router.dispatcher.fleet
        await until(lambda: len(fleet.residency.tokens_by_worker(key)) == 2)
        await router.chat(headers={"x-coda-session": "s"})
    assert lines(path)[0]["resident_tokens_by_worker"] == {a.name: 500, b.name: 9_000}
    assert lines(path)[0]["reason"] == "KVResident"


async def test_a_request_that_the_queue_refuses_has_a_line_too(tmp_path: Path):
    path = tmp_path / "decisions.jsonl"
    limits = HoldingLimits(max_requests=0)
    async with running_worker(waiting=64) as worker:
        async with running_router(worker, decision_log=path, holding=limits) as router:
            assert (await router.chat())[0] == 503
    assert [(line["worker"], line["reason"]) for line in lines(path)] == [(None, "QueueFull")]


async def test_a_hostile_model_name_stays_in_its_line(tmp_path: Path):
    path, name = tmp_path / "decisions.jsonl", 'x\n{"sequence": 99}\r\x1b[2J\u2028'
    async with running_worker() as worker, running_router(worker, decision_log=path) as router:
        await router.chat(model=name)
        await router.chat(headers={"x-coda-session": 'a"\\b'})
    assert path.read_bytes().count(b"\n") == 2
    assert b"\x1b" not in path.read_bytes()
    assert lines(path)[0]["model"] == name


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
async def test_a_full_disk_costs_lines_and_no_request(caplog: pytest.LogCaptureFixture):
    async with running_worker() as worker, running_router(worker, decision_log=Path("/dev/full")) as router:
        file = router.router.dispatcher.decisions.file
        for n in range(3):
            assert (await router.chat(f"c{n}"))[0] == 200
            await until(lambda n=n: file.dropped == n + 1)
        _, metrics = await router.get("/metrics")
    assert 'coda_router_decision_log_lines_total{outcome="dropped"} 3.0' in metrics
    assert sum("cannot be written" in record.message for record in caplog.records) == 1


async def test_writing_goes_on_once_it_is_possible_again(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "logs"
    folder.mkdir()
    caplog.set_level("INFO", "coda.router.decisions")
    async with DecisionFile(folder / "d.jsonl") as file:
        (folder / "d.jsonl").unlink()
        folder.rmdir()
        file.add(b"1")
        await until(lambda: file.dropped == 1)
        folder.mkdir()
        file.add(b"2")
        await until(lambda: file.written == 1)
    assert (folder / "d.jsonl").read_bytes() == b"2\n"
    assert "again" in caplog.text


async def test_a_large_file_gives_way_to_a_new_one_and_one_before_it_is_kept(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    async with DecisionFile(path, max_bytes=100) as file:
        for number in range(30):
            file.add(b"%09d" % number)
    assert sizes_in(tmp_path).keys() == {"d.jsonl", "d.jsonl.1"}
    kept = (path.with_name("d.jsonl.1").read_bytes() + path.read_bytes()).splitlines()
    assert kept == [b"%09d" % number for number in range(30 - len(kept), 30)]
    assert max(sizes_in(tmp_path).values()) <= 100
    assert (file.written, file.dropped) == (30, 0)


async def test_a_file_that_exists_is_appended_to_and_one_that_is_moved_away_is_begun_anew(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    path.write_text("0\n")
    async with DecisionFile(path) as file:
        file.add(b"1")
        await until(lambda: file.written == 1)
        path.rename(tmp_path / "moved")
        file.add(b"2")
    assert (tmp_path / "moved").read_text() == "0\n1\n"
    assert path.read_text() == "2\n"


async def test_lines_that_a_hanging_disk_would_pile_up_are_dropped(tmp_path: Path):
    file = DecisionFile(tmp_path / "d.jsonl")
    line = b"x" * 65_536
    for _ in range(2 * MAX_BUFFERED_BYTES // len(line)):
        file.add(line)
    assert file.dropped > 0
    async with file:
        pass
    assert sizes_in(tmp_path)["d.jsonl"] <= MAX_BUFFERED_BYTES


def test_a_file_that_cannot_be_written_is_told_at_start(tmp_path: Path):
    with pytest.raises(ConfigurationError, match=r"--decision-log .*nowhere.*: cannot be written: No such file"):
        DecisionFile(tmp_path / "nowhere" / "d.jsonl")
    options = ["--workers", "http://127.0.0.1:9", "--port", "0", "--decision-log", str(tmp_path / "nowhere" / "d")]
    result = CliRunner().invoke(router_command, options)
    assert result.exit_code == 2
    assert "--decision-log" in result.stderr


async def test_the_event_loop_goes_on_while_lines_are_written(tmp_path: Path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    async with DecisionFile(fifo) as file:
        for _ in range(100):
            file.add(b"y" * 4_096)  # more than a pipe takes: the writing thread stands still
        await asyncio.sleep(0.6)
        assert file.written == 0
        os.set_blocking(reader, True)
        received = 0
        while received < 100 * 4_097:
            received += len(await asyncio.to_thread(os.read, reader, 65_536))
        await until(lambda: file.written == 100)
    os.close(reader)
