"""Every mistake ends with a message that names the field and the remedy, exit code 2 and no stack trace."""

import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coda_engine.contract.profile import SpecKey
from coda_engine.profiling.assumed import assumed_key, assumed_profile

Coda = Callable[..., Any]
ClusterFile = Callable[..., Path]

WRONG_FIELDS = [
    ("spec.engine.replicsa", 2, "spec.engine.replicsa: unknown field"),
    ("spec.nonsense", {}, "spec.nonsense: unknown field"),
    ("specs", {}, "specs: unknown field"),
    ("spec.engine.replicas", "two", "spec.engine.replicas: input should be a valid integer"),
    ("spec.engine.replicas", "2", "spec.engine.replicas: input should be a valid integer (given: '2')"),
    ("spec.engine.replicas", 0, "spec.engine.replicas: at least 1"),
    ("spec.engine.kvCacheSize", "lots", "spec.engine.kvCacheSize"),
    ("spec.engine.gpus", 1, "gpus and gpuProduct are for device cuda"),
    ("spec.engine.extraArgs", ["--scheduler-cls", "x.Y"], "--scheduler-cls belongs to Coda"),
    (
        "spec.engine.podTemplate",
        {"template": {}},
        "spec.engine.podTemplate.template: unknown field; a pod template has metadata and spec",
    ),
    ("spec.admission.state.policy", "lifo", "spec.admission.state.policy"),
    ("spec.admission.state.tauMs", -5, "spec.admission.state.tauMs"),
    ("spec.admission.execution.minCohort", 3, "set minCohort <= 2 or minRequests >= 6"),
    ("spec.router.placement.policy", "random", "spec.router.placement.policy"),
    ("spec.model", None, "spec.model: field required"),
    ("spec.model.source.hub", "org/name", "spec.model.source: set exactly one of hub, builtin, hostPath"),
    ("spec", None, "spec: is missing"),
    ("metadata.name", "Not A Name", "metadata.name: at most 40 characters of a-z"),
    ("metadata.name", "n" * 41, "metadata.name: at most 40 characters of a-z"),
    ("metadata.name", "1st", "starting with a letter"),
    ("apiVersion", "v1", "apiVersion: must be coda-serving.dev/v1alpha1"),
    ("kind", "CodaClutser", "kind: needs one document of kind CodaCluster (found: CodaClutser)"),
    ("spec.model.maxContextTokens", 20_000, "spec.model.maxContextTokens: 20000 is more than the model's own 8192"),
    ("spec.engine.kvCacheSize", "50M", "spec.engine.kvCacheSize: 50M holds 1085 tokens, less than one request of 8192"),
    (
        "spec.engine.kvCacheSize",
        "900T",
        "spec.engine.replicas, spec.kvShadow.size: 1 engines need about",
    ),
    ("spec.model.source.hostPath", "/nowhere/at/all", "spec.model.source.hostPath: /nowhere/at/all does not exist"),
    ("spec.model.source.hostPath", "/proc/version", "spec.model.source.hostPath: /proc/version is a file"),
    ("spec.model.source.hostPath", "/proc", "spec.model.source.hostPath: /proc has no readable config.json"),
]


@pytest.mark.parametrize(
    ("field", "value", "message"), WRONG_FIELDS, ids=[f"{case[0]}={case[1]}" for case in WRONG_FIELDS]
)
def test_a_wrong_field_is_named_with_what_is_allowed(
    coda: Coda, cluster_file: ClusterFile, field: str, value: object, message: str
) -> None:
    outcome = coda("up", "-f", cluster_file(field, value))
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_every_wrong_field_is_named_at_once(coda: Coda, cluster_file: ClusterFile) -> None:
    file = cluster_file("spec.engine.replicas", 0)
    file.write_text(file.read_text().replace("policy: coda", "policy: lifo").replace("v1alpha1", "v9"))
    err = coda("up", "-f", file).err
    assert "spec.engine.replicas" in err
    assert "spec.admission.state.policy" in err
    assert "apiVersion" in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind: [CodaCluster", "is not YAML"),
        ("kind: CodaCluster\nkind: CodaCluster\n", "line 2, column 1 is not YAML: kind is given twice"),
        (
            "kind: CodaCluster\nmetadata: 2024-13-45\n",
            "that cannot be: month must be in 1..12",
        ),
        ("kind: CodaCluster\nmetadata: !!timestamp soon\n", "has a date or tagged value that cannot be"),
        ("kind: CodaCluster\nmetadata: !!bool perhaps\n", "has a date or tagged value that cannot be"),
        ("metadata: " + "[" * 5000, "is nested too deeply"),
        ("", "kind: needs one document of kind CodaCluster (found: nothing)"),
        ("- a\n- b\n", "found: list"),
        ("kind: CodaCluster\n---\nkind: CodaCluster\n", "has 2 documents of kind CodaCluster"),
        ("kind: CodaCluster\nmetadata: 3\nspec: 4\n", "metadata.name"),
    ],
)
def test_a_file_that_is_no_codacluster_is_refused(coda: Coda, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    outcome = coda("validate", "-f", file)
    assert outcome.code == 2
    assert message in outcome.err


def test_a_missing_file_is_named(coda: Coda, tmp_path: Path) -> None:
    outcome = coda("up", "-f", tmp_path / "absent.yaml")
    assert outcome.code == 2
    assert "absent.yaml: cannot be read: No such file or directory" in outcome.err


def test_a_port_in_use_is_named_and_its_owner_is_left_alone(coda: Coda, cluster_file: ClusterFile) -> None:
    with socket.create_server(("127.0.0.1", 23_700)) as owner:
        outcome = coda("up", "-f", cluster_file())
        with socket.create_connection(("127.0.0.1", 23_700)):
            owner.accept()[0].close()
    assert outcome.code == 2
    assert "spec.router.port: 127.0.0.1:23700 is in use" in outcome.err
    assert "--port" in outcome.err


def test_a_profile_of_another_configuration_is_refused_before_anything_starts(
    coda: Coda, cluster_file: ClusterFile, tmp_path: Path
) -> None:
    file = tmp_path / "profile.json"
    file.write_bytes(assumed_profile(assumed_key(SpecKey(model="another"))).to_json())
    outcome = coda("up", "-f", cluster_file(), "--profile", file)
    assert outcome.code == 2
    assert "--profile" in outcome.err
    assert "was measured for another specification" in outcome.err
    assert not list((tmp_path / "state").rglob("engine-0.log"))


def test_a_profile_that_cannot_be_read_is_refused(coda: Coda, cluster_file: ClusterFile, tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text("{}")
    outcome = coda("up", "-f", cluster_file(), "--profile", file)
    assert outcome.code == 2
    assert "cannot be read" in outcome.err


def test_the_command_itself_prints_no_stack_trace(cluster_file: ClusterFile) -> None:
    command = [sys.executable, "-m", "coda_cli", "up", "-f", str(cluster_file("spec.engine.replicas", 0))]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert done.stderr.startswith("coda: ")
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("profile",), "--engine: needs the base URL"),
        (("profile", "--engine", "localhost:1"), "--engine: needs the base URL"),
        (("profile", "--engine", "http://127.0.0.1:9"), "--out: name the file to write"),
        (("profile", "--engine", "http://127.0.0.1:9", "--out", "/nowhere/p.json"), "its folder does not exist"),
        (("profile", "--engine", "http://127.0.0.1:9", "--apply"), "cannot be reached"),
        (("model", "gpt-9"), "'gpt-9' is not 'smollm2-135m-instruct'"),
        (("down",), "nothing runs here"),
        (("down", "absent"), "absent does not run here"),
    ],
)
def test_other_commands_say_what_they_need(coda: Coda, arguments: tuple[str, ...], message: str) -> None:
    outcome = coda(*arguments)
    assert outcome.code == 2
    assert message in outcome.err
    assert "Traceback" not in outcome.err


def test_a_folder_of_state_that_cannot_be_made_is_named(
    coda: Coda, cluster_file: ClusterFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    outcome = coda("up", "-f", cluster_file())
    assert outcome.code == 2
    assert "/proc/nowhere" in outcome.err


def test_a_token_file_that_is_no_text_is_a_message(coda: Coda, tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_bytes(b"\xff\xfe")
    outcome = coda("profile", "--engine", "http://127.0.0.1:9", "--apply", "--internal-token-file", file)
    assert outcome.code == 2
    assert "can't decode" in outcome.err
