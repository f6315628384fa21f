"""What an interrupted benchmark keeps, and the order in which systems are run."""

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from coda_bench.engine.cases import FULL, SessionsCase, quick
from coda_bench.engine.finished import Finished, surroundings
from coda_bench.engine.lanes import jobs, side_by_side
from coda_bench.engine.progress import Progress
from coda_bench.engine.systems import NAMES, UnknownSystemError, system, systems
from coda_bench.engine.workbench import Workbench
from coda_engine.contract.reasons import Feature

HERE = {"engine_code": "1"}


def workbench(folder: Path, lines: list[str]) -> Workbench:
    return Workbench(folder, (0,), Finished(folder / "state", HERE), Progress(lines.append), None, quick=True)


async def test_a_finished_measurement_is_not_measured_again(tmp_path):
    lines = list[str]()
    bench = workbench(tmp_path, lines)
    measured = []

    async def measure() -> dict[str, int]:
        measured.append(1)
        return {"value": len(measured)}

    assert await bench.once({"seed": 1}, "one", 1, measure) == {"value": 1}
    assert await workbench(tmp_path, lines).once({"seed": 1}, "one", 1, measure) == {"value": 1}
    assert await bench.once({"seed": 2}, "two", 1, measure) == {"value": 2}
    assert "one: kept from before" in lines


async def test_an_interrupted_measurement_leaves_nothing(tmp_path):
    bench = workbench(tmp_path, [])

    async def interrupted() -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await bench.once({"seed": 1}, "one", 1, interrupted)
    assert bench.finished.get({"seed": 1}) is None


def test_other_code_or_another_machine_measures_anew(tmp_path):
    Finished(tmp_path, HERE).put({"seed": 1}, 5)
    assert Finished(tmp_path, HERE).get({"seed": 1}) == 5
    assert Finished(tmp_path, {"engine_code": "2"}).get({"seed": 1}) is None


def test_a_file_that_was_cut_off_counts_as_not_measured(tmp_path):
    finished = Finished(tmp_path, HERE)
    finished.put({"seed": 1}, [1, 2, 3])
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text()[:20])
    assert finished.get({"seed": 1}) is None


def test_forgetting_removes_only_measurements(tmp_path):
    finished = Finished(tmp_path, HERE)
    finished.put({"seed": 1}, 5)
    (tmp_path / "notes.txt").write_text("mine")
    finished.forget()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    Finished(tmp_path / "absent", HERE).forget()


def test_without_a_folder_nothing_is_kept():
    finished = Finished(None, HERE)
    finished.put({"seed": 1}, 5)
    assert finished.get({"seed": 1}) is None


def test_surroundings_change_with_the_model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"a": 1}))
    before = surroundings(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"a": 22}))
    after = surroundings(tmp_path)
    assert before["model"] != after["model"]
    assert before["engine_code"] == after["engine_code"]


def test_every_system_meets_every_seed_once_and_each_core_equally_often():
    planned = jobs(systems(",".join(NAMES)), seeds=(1, 2, 3, 4), cores=(0, 1))
    assert len({(job.system.name, job.seed) for job in planned}) == len(planned) == 20
    assert set(Counter((job.system.name, job.core) for job in planned).values()) == {2}


def test_systems_alternate_and_swap_cores_between_repetitions():
    planned = jobs(systems("stock,coda"), seeds=(1, 2), cores=(0, 1))
    groups = side_by_side(planned, (0, 1))
    assert [[(job.system.name, job.core) for job in group] for group in groups] == [
        [("stock", 0), ("coda", 1)],
        [("coda", 0), ("stock", 1)],
    ]
    assert [job.system.name for job in planned] == ["stock", "coda", "coda", "stock"]


def test_with_one_core_engines_run_one_after_the_other():
    groups = side_by_side(jobs(systems("stock,fifo,coda"), seeds=(1,), cores=(3,)), (3,))
    assert [[job.core for job in group] for group in groups] == [[3], [3], [3]]


def test_a_group_has_one_engine_on_each_core_also_when_systems_do_not_divide():
    groups = side_by_side(jobs(systems("stock,fifo,coda"), seeds=(1, 2, 3), cores=(0, 1)), (0, 1))
    assert all(len({job.core for job in group}) == len(group) for group in groups)
    assert sum(map(len, groups)) == 9


def test_a_system_is_one_settings_document_on_the_same_engine():
    assert system("stock").plugins is False
    assert system("fifo").admission() == {"state": {"policy": "fifo"}, "reclaim": {"policy": "lru"}}
    assert system("coda+reserveForOldest=false").state["reserveForOldest"] is False
    assert system("stock").needed() == set()
    assert system("fifo").needed() == {Feature.KV_SHADOW}
    assert system("coda").needed() == {Feature.KV_SHADOW, Feature.STATE_ADMISSION}
    changed = system("coda+tauMs=20000+maxWaitMs=60000")
    assert changed.name == "coda+tauMs=20000+maxWaitMs=60000"
    assert changed.state == {"policy": "coda", "tauMs": 20_000, "maxWaitMs": 60_000}


@pytest.mark.parametrize("text", ["vllm", "coda+tauMs", "coda+tauMs=x", "stock+tauMs=1", " , "])
def test_what_is_no_system_is_refused(text: str):
    with pytest.raises(UnknownSystemError):
        systems(text)


def test_the_default_case_is_long_enough_for_its_bars():
    (m3,) = (case for case in FULL if case.name == "m3")
    assert (m3.kv_blocks, m3.load, m3.warm_s, m3.window_s) == (270, 1.35, 60, 240)
    assert len(m3.seeds) >= 3
    assert m3.window.blocks * m3.window.block_s == 240


def test_a_quick_case_is_the_same_work_cut_short():
    for case in FULL:
        short = quick(case)
        assert (short.name, short.kv_blocks, short.load) == (case.name, case.kv_blocks, case.load)
        assert short.warm_s + short.window_s <= 20


def test_time_left_follows_the_pace_of_finished_steps():
    now, lines = [0.0], list[str]()
    progress = Progress(lines.append, clock=lambda: now[0])
    progress.plan(600)
    progress.begin("one", 100)
    now[0] = 200.0
    progress.begin("two", 100)
    progress.skip("three", 100)
    assert lines[0] == "one (about 10 min left)"
    assert lines[1] == "two (about 17 min left)"
    now[0] = 300.0
    progress.end()
    assert progress.left() == "about 8 min left"


def test_a_case_without_a_drained_trace_drains_nothing():
    assert not SessionsCase("x", drained_arrivals_s=0).drains(1)
    assert SessionsCase("x", drained_seeds=(1,)).drains(1)
    assert not SessionsCase("x", drained_seeds=(1,)).drains(2)
