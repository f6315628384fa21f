"""``coda up`` on real vLLM: served, killed in every way, and ended without a trace."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from coda_cli.demo.chat import ChatClient
from coda_cli.errors import StackError
from coda_cli.model.catalog import default_model_dir
from coda_cli.profile_file import write_profile
from coda_cli.up.cluster_file import read_cluster_file
from coda_cli.up.layout import remove_shadow, shadow_folder
from coda_cli.up.machine import free_ports, installed_vllm_version
from coda_cli.up.process_table import group_members, mapped_shared_memory
from coda_cli.up.profiles import stored_profile_file
from coda_cli.up.run_record import RunRecord, StateDir, state_root
from coda_engine.contract.reasons import Feature
from coda_engine.profiling import EngineClient
from coda_engine.profiling.assumed import assumed_key, assumed_profile

pytestmark = pytest.mark.vllm

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2-cpu.yaml"
START_LIMIT_S = 600.0
END_LIMIT_S = 10.0
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True)
class Running:
    """A ``coda up`` under test."""

    process: "subprocess.Popen[bytes]"
    output: Path
    state: StateDir

    def lines(self) -> str:
        return self.output.read_text()

    def wait_for(self, text: str, times: int = 1, limit_s: float = START_LIMIT_S) -> None:
        wait_until(lambda: self.lines().count(text) >= times or self.process.poll() is not None, limit_s, self.lines)
        assert self.process.poll() is None, self.lines()

    @property
    def record(self) -> RunRecord:
        record = self.state.read()
        assert record is not None, self.lines()
        return record


def wait_until(condition: Callable[[], bool], limit_s: float, explain: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, explain()
        time.sleep(0.1)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Running]]:
    # An engine inside this test process would leave variables that change the engines of the run.
    own = {name: value for name, value in os.environ.items() if not name.startswith(("CODA_", "VLLM_", "OMP_"))}
    environment = own | {
        "CODA_MODEL_DIR": str(default_model_dir(os.environ)),
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "PYTHONDONTWRITEBYTECODE": "1",  # the trap that coda up has to spring
    }
    started = []

    def run(**spec_changes: dict[str, object]) -> Running:
        document = yaml.safe_load(EXAMPLE.read_text())
        (document["spec"]["router"]["port"],) = free_ports(23_200, 1)
        for group, fields in spec_changes.items():
            document["spec"][group].update(fields)
        file = tmp_path / "cluster.yaml"
        file.write_text(yaml.safe_dump(document))
        output = tmp_path / "up.log"
        with output.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "coda_cli", "up", "-f", str(file)],
                env=environment, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        running = Running(process, output, StateDir(state_root(environment) / "smollm2"))
        started.append(running)
        return running

    yield run
    for running in started:
        if running.process.poll() is None:
            running.process.terminate()
            running.process.wait(30)


def answer(record: RunRecord) -> str:
    """Return what the model says about France, asking again while no engine is there."""
    client = ChatClient(record.url, "smollm2-135m-instruct", "test")
    deadline_s = time.monotonic() + START_LIMIT_S
    while True:
        try:
            messages = [{"role": "user", "content": "What is the capital of France?"}]
            return client.chat("france", messages, max_tokens=16).text
        except StackError:
            assert time.monotonic() < deadline_s
            time.sleep(0.5)


def store_profile_of_another_machine(cache: Path) -> None:
    key = read_cluster_file(EXAMPLE).spec.spec_key(installed_vllm_version() or "")
    profile = assumed_profile(assumed_key(key, hardware="another CPU"))
    write_profile(profile, stored_profile_file(cache, key))


def published_pages() -> list[Path]:
    return list(shadow_folder("smollm2").rglob("*.index"))


def stack_folders() -> set[Path]:
    """Return the folders of stacks in shared memory; other tests that run meanwhile have theirs there too."""
    private = re.compile(r"coda-([a-z0-9_]{8}|shadow-smollm2)")
    return {path for path in SHARED_MEMORY.iterdir() if private.fullmatch(path.name) and path.is_dir()}


def assert_nothing_is_left(record: RunRecord, made: set[str]) -> None:
    assert any(file.startswith("/dev/shm/psm_") for file in made)
    assert [file for file in sorted(made | set(record.shared_memory)) if Path(file).exists()] == []
    for group in record.groups:
        assert group_members(group) == []
    assert not Path(record.scratch_dir).exists()
    assert not Path(record.page_dir).exists()


def test_the_stack_serves_survives_kills_and_ends_within_ten_seconds_without_a_trace(
    start: Callable[..., Running], tmp_path: Path
) -> None:
    store_profile_of_another_machine(tmp_path / "cache" / "coda")
    running = start()
    running.wait_for("serves at")
    assert "no usable profile is stored: ProfileMismatch" in running.lines()
    assert "another CPU" in running.lines()
    record = running.record
    assert "Paris" in answer(record)
    token = record.internal_token_file.read_text()
    state_admission = EngineClient(record.engine_urls[0], token).snapshot().capabilities[Feature.STATE_ADMISSION]
    assert state_admission.enabled, state_admission

    router_group = record.groups[-1]
    os.kill(router_group, signal.SIGKILL)
    running.wait_for("router was killed by SIGKILL; starting it again")
    running.wait_for("router is ready again")
    assert "Paris" in answer(record)

    engine_group = record.groups[0]
    made = mapped_shared_memory(group_members(engine_group))
    os.kill(engine_group, signal.SIGKILL)
    running.wait_for("engine-0 was killed by SIGKILL; starting it again")
    wait_until(lambda: group_members(engine_group) == [], 10.0, running.lines)
    assert "Paris" in answer(record)
    running.wait_for("engine-0 is ready again")
    # The restarted engine loaded the stored profile: measured once, in force again.
    assert running.lines().count("; kept in ") == 1
    assert EngineClient(record.engine_urls[0], token).profile() is not None

    assert [file for file in made if Path(file).exists()] == []
    assert published_pages(), "what was published outlives its engine"

    record = running.record
    made |= {file for group in record.groups for file in mapped_shared_memory(group_members(group))}
    os.kill(running.process.pid, signal.SIGINT)
    running.process.wait(END_LIMIT_S)
    assert running.process.returncode == 0, running.lines()
    assert "stopped; nothing is left running" in running.lines()
    assert_nothing_is_left(record, made)
    assert not published_pages()


def test_when_coda_up_is_killed_its_engine_ends_and_nothing_is_left(start: Callable[..., Running]) -> None:
    running = start(profiling={"mode": "Disabled"})
    wait_until(lambda: "psm_" in str(running.state.read()), START_LIMIT_S, running.lines)
    record = running.record
    made = mapped_shared_memory(group_members(record.groups[0]))
    running.process.kill()
    running.process.wait(5)
    wait_until(lambda: running.state.read() is None, 20.0, lambda: json.dumps(record.groups))
    # The next run's engine is to find its sessions again.
    assert shadow_folder(record.name).is_dir()
    remove_shadow(shadow_folder(record.name))
    assert_nothing_is_left(record, made)


def test_an_engine_that_cannot_start_ends_everything_with_its_last_words(start: Callable[..., Running]) -> None:
    before = stack_folders()
    running = start(engine={"extraArgs": ["--no-such-argument"]})
    wait_until(lambda: running.process.poll() is not None, 300.0, running.lines)
    assert running.process.returncode == 2
    assert "engine-0 ended with exit code" in running.lines()
    assert "no-such-argument" in running.lines()
    assert "Traceback" not in running.lines()
    assert running.state.read() is None
    assert stack_folders() <= before
