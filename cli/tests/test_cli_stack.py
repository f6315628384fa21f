"""What a stack is going to start, before anything is started."""

from collections.abc import Callable
from pathlib import Path

import pytest

from coda_cli.errors import StackError
from coda_cli.up.cluster_file import ClusterFile, read_cluster_file
from coda_cli.up.leftovers import end_run
from coda_cli.up.machine import Machine
from coda_cli.up.run_record import StateDir
from coda_cli.up.stack import Place, Stack
from coda_engine.contract.interface import ENV_PROFILE_FILE
from coda_engine.profiling.assumed import assumed_key, assumed_profile
from coda_operator.desired.processes import ProcessSpec

MACHINE = Machine(
    cores=(0, 1), memory_bytes=16 * 10**9, shared_memory_bytes=4 * 10**9, gpus=0, vllm_version="0.32.0",
    busy_ports=frozenset(), model=None,
)  # fmt: skip


def given_profile(cluster: ClusterFile, folder: Path) -> Path:
    file = folder / "given.json"
    file.write_bytes(assumed_profile(assumed_key(cluster.spec.spec_key("0.32.0"))).to_json())
    return file


def engines_of(cluster: ClusterFile, folder: Path, given: Path | None) -> list[ProcessSpec]:
    """Return the engines' processes of a stack that is not started; its folders are removed again."""
    state = StateDir(folder / "state")
    state.path.mkdir()
    stack = Stack(cluster, Place(MACHINE, 26_050, None, state, folder / "cache", {}, given), print)
    record = state.read()
    assert record is not None
    end_run(record, grace_s=0)
    return [engine.process for engine in stack._engines]


def test_an_engine_that_is_started_again_loads_the_profile_that_was_given(
    cluster_file: Callable[..., Path], tmp_path: Path
) -> None:
    cluster = read_cluster_file(cluster_file())
    given = given_profile(cluster, tmp_path)
    (engine,) = engines_of(cluster, tmp_path, given)
    assert engine.env[ENV_PROFILE_FILE] == str(given)


def test_without_a_given_profile_it_loads_the_stored_one(cluster_file: Callable[..., Path], tmp_path: Path) -> None:
    (engine,) = engines_of(read_cluster_file(cluster_file()), tmp_path, None)
    assert engine.env[ENV_PROFILE_FILE].startswith(str(tmp_path / "cache" / "profiles"))


def test_a_given_profile_that_nobody_would_use_is_refused(cluster_file: Callable[..., Path], tmp_path: Path) -> None:
    cluster = read_cluster_file(cluster_file("spec.profiling.mode", "Disabled"))
    with pytest.raises(StackError, match=r"spec\.profiling\.mode is Disabled"):
        engines_of(cluster, tmp_path, given_profile(cluster, tmp_path))
