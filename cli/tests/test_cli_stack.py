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
from coda_engine.contract.profile import CurvePoint, FullKey, HeldOutPoint, PrefillProfile, Profile, Provenance
from coda_operator.desired.processes import ProcessSpec

MACHINE = Machine(
    cores=(0, 1), memory_bytes=16 * 10**9, shared_memory_bytes=4 * 10**9, gpus=0, vllm_version="0.32.0",
    busy_ports=frozenset(), model=None,
)  # fmt: skip


def given_profile(cluster: ClusterFile, folder: Path) -> Path:
    key = FullKey(
        spec=cluster.spec.spec_key("0.32.0"), model_digest="", hardware="", vllm_version="0.32.0", adapter_digest="",
        block_size=32, attention_backend="", graph_mode="", max_batched_tokens=512, max_context_tokens=8192,
    )  # fmt: skip
    prefill = PrefillProfile(
        points=[CurvePoint(x=64, ms=60), CurvePoint(x=128, ms=120)],
        held_out=[HeldOutPoint(x=96, measured_ms=90, predicted_ms=90)],
        error_bound=0.2,
    )
    provenance = Provenance(measured_at="2026-01-01T00:00:00+00:00", duration_s=1, coda_version="0", quick=True)
    file = folder / "given.json"
    file.write_bytes(Profile(full_key=key, prefill=prefill, provenance=provenance).to_json())
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
