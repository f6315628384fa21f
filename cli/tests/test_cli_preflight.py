import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from coda_cli.up.machine import Machine, ModelFolder, core_list, look_at_machine
from coda_cli.up.preflight import ENGINE_SHARED_MEMORY_BYTES, check
from coda_operator.desired.processes import shadow_space_bytes
from coda_operator.spec import CodaClusterSpec

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "smollm2-cpu.yaml"
MACHINE = Machine(
    cores=(0, 1), memory_bytes=16 * 10**9, shared_memory_bytes=4 * 10**9, gpus=0, vllm_version="0.32.0",
    busy_ports=frozenset(), model=None,
)  # fmt: skip


def spec_with(**changes: dict[str, Any]) -> CodaClusterSpec:
    spec = yaml.safe_load(EXAMPLE.read_text())["spec"]
    for group, fields in changes.items():
        spec[group] = spec.get(group, {}) | fields
    return CodaClusterSpec.parse(spec)


def problems(spec: CodaClusterSpec, machine: Machine) -> tuple[str, ...]:
    return check(spec, machine, spec.router.port).problems


def test_the_example_runs_on_two_cores_without_a_remark() -> None:
    findings = check(spec_with(), MACHINE, 8080)
    assert findings.problems == ()
    assert findings.notes == ()


def test_too_little_shared_memory_is_named_with_the_way_to_enlarge_it() -> None:
    (problem,) = problems(spec_with(), replace(MACHINE, shared_memory_bytes=64_000_000))
    assert "/dev/shm" in problem
    assert "0.1 GB are free" in problem
    assert "remount" in problem


def test_each_engine_needs_memory_of_its_own() -> None:
    four = spec_with(engine={"replicas": 4}, kvShadow={"size": "0"})
    assert problems(four, MACHINE) == ()
    (problem,) = problems(four, replace(MACHINE, memory_bytes=8 * 10**9))
    assert problem.startswith("spec.engine.kvCacheSize, spec.engine.replicas: 4 engines need about 10.4 GB")


def test_weights_count_as_memory() -> None:
    large = ModelFolder(Path("/m"), {"model_type": "x"}, weight_bytes=20 * 10**9)
    spec = spec_with(model={"source": {"hostPath": "/m"}})
    assert "20.0 GB weights" in problems(spec, replace(MACHINE, model=large))[0]


@pytest.mark.parametrize(("gpus", "part"), [(0, "nvidia-smi lists none"), (2, "2 engines of 4 GPUs need 8")])
def test_missing_gpus_are_named(gpus: int, part: str) -> None:
    spec = spec_with(engine={"device": "cuda", "gpus": 4, "replicas": 2, "cpus": None})
    assert part in problems(spec, replace(MACHINE, gpus=gpus))[0]


@pytest.mark.parametrize("version", [None, "0.31.2", "0.33.0"])
def test_another_vllm_is_named(version: str | None) -> None:
    assert "vLLM" in problems(spec_with(), replace(MACHINE, vllm_version=version))[0]


def test_fields_that_need_a_cluster_are_named_not_refused() -> None:
    spec = spec_with(
        engine={"image": "x/y:1", "podTemplate": {"spec": {}}}, router={"replicas": 3, "apiKeySecret": "k"}
    )
    findings = check(spec, MACHINE, 8080)
    assert findings.problems == ()
    for field in ("spec.engine.image", "spec.engine.podTemplate", "spec.router.replicas", "spec.router.apiKeySecret"):
        assert any(note.startswith(field) for note in findings.notes)


def test_more_threads_than_cores_is_remarked() -> None:
    (note,) = check(spec_with(engine={"replicas": 3, "cpus": 1}), MACHINE, 8080).notes
    assert "3 threads on 2 cores" in note


@pytest.mark.parametrize(
    ("cores", "text"), [((0,), "0"), ((0, 1), "0-1"), ((5, 2, 3, 4), "2-5"), ((0, 2, 3, 7), "0,2-3,7")]
)
def test_cores_are_written_as_ranges(cores: tuple[int, ...], text: str) -> None:
    assert core_list(cores) == text


def test_fields_that_only_a_cluster_uses_are_remarked_when_they_are_written() -> None:
    spec = spec_with(engine={"gpuResource": "nvidia.com/mig-1g.10gb"}, profiling={"timeoutSeconds": 90})
    notes = check(spec, MACHINE, 8080).notes
    assert [note.split(" ")[0] for note in notes if "only in a cluster" in note] == [
        "spec.engine.gpuResource",
        "spec.profiling.timeoutSeconds",
    ]


@pytest.mark.parametrize(("scope", "shadows"), [("Pod", 3), ("Node", 1)])
def test_a_shadow_counts_once_for_each_that_shares_it(scope: str, shadows: int) -> None:
    spec = spec_with(engine={"replicas": 3}, kvShadow={"size": "1Gi", "scope": scope})
    needed = 3 * ENGINE_SHARED_MEMORY_BYTES + shadows * shadow_space_bytes(spec)
    assert problems(spec, replace(MACHINE, shared_memory_bytes=needed)) == ()
    (problem,) = problems(spec, replace(MACHINE, shared_memory_bytes=needed - 1))
    assert problem.startswith("spec.engine.replicas, spec.kvShadow.size: 3 engines need")
    assert "a smaller shadow" in problem


def test_a_shadow_counts_as_memory_beside_the_kv_cache() -> None:
    spec = spec_with(kvShadow={"size": "12G"})
    machine = replace(MACHINE, shared_memory_bytes=20 * 10**9, memory_bytes=14 * 10**9)
    (problem,) = problems(spec, machine)
    assert "12.4 GB CPU shadow in all" in problem
    assert problems(spec_with(), machine) == ()


def test_what_a_shadow_holds_from_before_is_not_missing(tmp_path: Path) -> None:
    spec = spec_with(kvShadow={"size": "1Gi"})
    before = look_at_machine(spec, 8080, tmp_path / "absent")
    held = tmp_path / "engine-0"
    held.mkdir()
    (held / "pages").write_bytes(bytes(1_000_000))
    after = look_at_machine(spec, 8080, tmp_path)
    gained = after.shared_memory_bytes - shutil.disk_usage("/dev/shm").free
    assert before.shared_memory_bytes <= shutil.disk_usage("/dev/shm").total
    assert gained >= 900_000
