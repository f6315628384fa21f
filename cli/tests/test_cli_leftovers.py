"""Whatever dies, nothing stays behind, and nothing else is touched."""

import mmap
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coda_cli.up.guardian import FAREWELL
from coda_cli.up.leftovers import clean_up_after_killed_runs, end_run, remove_shared_memory
from coda_cli.up.process_table import group_members, mapped_shared_memory
from coda_cli.up.run_record import RunRecord, StateDir, boot_id

SHARED_MEMORY = Path("/dev/shm")
LIMIT_S = 20.0


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def shared_file() -> Iterator[Path]:
    path = SHARED_MEMORY / f"psm_test_{os.getpid()}"
    path.write_bytes(bytes(4096))
    yield path
    path.unlink(missing_ok=True)


def record(tmp_path: Path, **changes: object) -> RunRecord:
    for name in ("coda-aaaaaaaa", "coda-bbbbbbbb"):
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "something").write_text("x")
    fields: dict[str, object] = {
        "name": "t", "url": "", "engine_urls": (), "pid": 1, "boot_id": boot_id(),
        "python": os.path.realpath(sys.executable), "scratch_dir": str(tmp_path / "coda-aaaaaaaa"),
        "page_dir": str(tmp_path / "coda-bbbbbbbb"),
    }  # fmt: skip
    return RunRecord(**fields | changes)  # type: ignore[arg-type]


def guardian(state: StateDir) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "coda_cli.up.guardian", str(state.path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)


def test_when_coda_up_is_killed_its_guardian_ends_the_processes_and_removes_the_files(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]", shared_file: Path
) -> None:
    state = StateDir(tmp_path / "state")
    state.path.mkdir()
    state.write(record(tmp_path, groups=(sleeper.pid,), shared_memory=(str(shared_file),)))
    watching = guardian(state)
    assert watching.stdin is not None
    watching.stdin.close()  # what the kernel does when the writer is killed
    assert watching.wait(LIMIT_S) == 0
    assert sleeper.wait(LIMIT_S) != 0
    assert not shared_file.exists()
    assert not (tmp_path / "coda-aaaaaaaa").exists()
    assert not (tmp_path / "coda-bbbbbbbb").exists()
    assert state.read() is None


def test_after_a_farewell_the_guardian_touches_nothing(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    state = StateDir(tmp_path / "state")
    state.path.mkdir()
    state.write(record(tmp_path, groups=(sleeper.pid,)))
    watching = guardian(state)
    watching.communicate(FAREWELL, timeout=LIMIT_S)
    assert sleeper.poll() is None
    assert state.read() is not None


def test_the_next_run_cleans_up_when_the_guardian_was_killed_too(
    tmp_path: Path, sleeper: "subprocess.Popen[bytes]"
) -> None:
    state = StateDir(tmp_path / "root" / "t")
    state.path.mkdir(parents=True)
    state.write(record(tmp_path, groups=(sleeper.pid,)))
    assert clean_up_after_killed_runs(tmp_path / "root") == ["t"]
    assert sleeper.wait(LIMIT_S) != 0
    assert clean_up_after_killed_runs(tmp_path / "root") == []


def test_a_run_whose_lock_is_held_is_left_alone(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    state = StateDir(tmp_path / "root" / "t")
    with state.lock(wait=True):
        state.write(record(tmp_path, groups=(sleeper.pid,)))
        assert clean_up_after_killed_runs(tmp_path / "root") == []
    assert sleeper.poll() is None


def test_a_group_id_that_came_round_again_is_not_ended(tmp_path: Path) -> None:
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        end_run(record(tmp_path, groups=(stranger.pid,)), grace_s=0.1)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_process_ids_of_another_boot_mean_nothing(tmp_path: Path, sleeper: "subprocess.Popen[bytes]") -> None:
    end_run(record(tmp_path, groups=(sleeper.pid,), boot_id="another"), grace_s=0.1)
    assert sleeper.poll() is None
    assert not (tmp_path / "coda-aaaaaaaa").exists()


def test_folders_that_are_not_a_runs_own_are_never_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    end_run(record(tmp_path, scratch_dir=str(precious), page_dir="/"), grace_s=0.0)
    assert precious.exists()


def test_shared_memory_that_somebody_still_maps_is_left(shared_file: Path) -> None:
    with shared_file.open("r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert str(shared_file) in mapped_shared_memory([os.getpid()])
        remove_shared_memory({str(shared_file)})
        assert shared_file.exists()
    remove_shared_memory({str(shared_file)})
    assert not shared_file.exists()


def test_shared_memory_of_other_kinds_is_left() -> None:
    path = SHARED_MEMORY / f"somebodys_shadow_{os.getpid()}"
    path.write_bytes(b"x")
    try:
        remove_shared_memory({str(path), str(SHARED_MEMORY / "psm_../x")})
        assert path.exists()
    finally:
        path.unlink()


def test_a_group_is_its_living_members(sleeper: "subprocess.Popen[bytes]") -> None:
    assert group_members(sleeper.pid) == [sleeper.pid]
    sleeper.kill()
    deadline_s = time.monotonic() + LIMIT_S
    while group_members(sleeper.pid) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    assert group_members(sleeper.pid) == []


def test_a_semaphore_is_found_under_its_lasting_name() -> None:
    code = (
        "import multiprocessing, time; lock = multiprocessing.get_context('spawn').Lock();"
        "print(lock._semlock.name, flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=-1, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        name = process.stdout.readline().strip().lstrip("/")
        found = mapped_shared_memory([process.pid])
        process.terminate()
    remove_shared_memory(found)
    assert found == {f"/dev/shm/sem.{name}"}


def test_a_record_of_another_boot_or_without_a_lock_is_no_run_to_end(
    coda: Callable[..., Any], tmp_path: Path, sleeper: "subprocess.Popen[bytes]"
) -> None:
    state = StateDir(tmp_path / "state" / "coda" / "t")
    state.path.mkdir(parents=True)
    for changes in ({"boot_id": "another boot"}, {}):
        state.write(record(tmp_path, pid=sleeper.pid, **changes))
        ended = coda("down", "t")
        assert ended.code != 0
        assert "t does not run here" in ended.err
        assert sleeper.poll() is None
