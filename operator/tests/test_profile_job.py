import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from operator_builders import cluster_of, profile_of

from coda_engine.profiling.assumed import assumed_key, assumed_profile
from coda_operator.crd.definitions import coda_profile_definition
from coda_operator.desired.profiling_job import profiling_job
from coda_operator.errors import JobError
from coda_operator.profile_job import JobOptions, parse_options, run
from coda_operator.profile_object import CodaProfileSpec, profile_object
from coda_operator.running_engine import running_engine

OWNER = {"apiVersion": "coda-serving.dev/v1alpha1", "kind": "CodaCluster", "name": "demo", "uid": "u"}
NOWHERE = "http://127.0.0.1:24999"


def options(*engine: str, startup_timeout_s: float = 10) -> JobOptions:
    return JobOptions("team", OWNER, NOWHERE, None, startup_timeout_s, True, engine)


def refused(item: dict[str, Any]) -> None:
    raise AssertionError(f"written: {item}")


def test_the_jobs_command_line_is_what_the_module_reads():
    command = profiling_job(cluster_of(profiling={"quick": True}))["spec"]["template"]["spec"]["containers"][0][
        "command"
    ]
    assert command[:3] == ["python3", "-m", "coda_operator.profile_job"]
    parsed = parse_options(command[3:])
    assert parsed.owner["uid"] == cluster_of().uid
    assert parsed.quick
    assert parsed.engine_argv[:3] == ("python3", "-m", "vllm.entrypoints.openai.api_server")


def test_an_engine_that_ends_early_is_reported_with_the_line_that_says_why():
    script = "import sys; print('loading'); print('ValueError: no such model', flush=True); print('bye'); sys.exit(3)"
    with pytest.raises(JobError, match=r"exit code 3 before it was ready; its log: ValueError: no such model"):
        run(options(sys.executable, "-c", script), refused, say=lambda _: None)


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: no such model",
        "(VllmWorker-0 pid=35) ERROR 11-29 23:56:14 [multiproc_executor.py:953] ValueError: no such model",
    ],
)
def test_warnings_that_mention_an_error_are_not_taken_for_it(line: str):
    warning = "(APIServer pid=7) WARNING 11-29 23:55:06 [system_utils.py:255] fd limit errors like OSError: [Errno 24]"
    script = f"import sys; print({warning!r}); print({line!r}, flush=True); print('RuntimeError: later'); sys.exit(1)"
    with pytest.raises(JobError, match=r"its log: ValueError: no such model$"):
        run(options(sys.executable, "-c", script), refused, say=lambda _: None)


def test_an_engine_that_is_never_ready_is_ended_and_names_the_field():
    script = "import time; print('still loading', flush=True); time.sleep(60)"
    with pytest.raises(JobError, match=r"raise spec\.engine\.startupTimeoutSeconds; its log: still loading"):
        run(options(sys.executable, "-c", script, startup_timeout_s=1.0), refused, say=lambda _: None)


def test_a_program_that_is_not_there_is_said():
    with pytest.raises(JobError, match=r"cannot be started: /no/such/python"):
        run(options("/no/such/python"), refused, say=lambda _: None)


def test_the_engines_children_end_with_it(tmp_path: Path):
    child = "import time; time.sleep(60)"
    parent = f"import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', {child!r}]); "
    parent += f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(60)"
    with running_engine([sys.executable, "-c", parent]):
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            pass
        pid = int((tmp_path / "pid").read_text())
        assert Path(f"/proc/{pid}").exists()
    # The kernel has the kill by now; on a busy machine the child still has to get a turn to end.
    until_s = time.monotonic() + 10
    while state_of(pid) not in ("gone", "Z") and time.monotonic() < until_s:
        time.sleep(0.01)
    assert state_of(pid) in ("gone", "Z")


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except (FileNotFoundError, ProcessLookupError):
        return "gone"


def test_outside_a_pod_the_job_says_that_it_cannot_write():
    """Run as a person might, by hand: one line, exit status 1."""
    arguments = ["--namespace", "team", "--owner", json.dumps(OWNER), "--engine-url", NOWHERE]
    command = [sys.executable, "-m", "coda_operator.profile_job", *arguments, "--", "/no/such/engine"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 1
    assert ended.stderr == "profile: the engine cannot be started: /no/such/engine: No such file or directory\n"


def test_the_job_needs_no_kubernetes_client():
    script = "import coda_operator.profile_job, sys; print({'kopf', 'aiohttp', 'kubernetes'} & {*sys.modules})"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == "set()\n"


def test_a_profile_object_comes_back_as_it_went_in():
    cluster = cluster_of()
    profile = profile_of(cluster.spec_key)
    item = profile_object(profile, "team", OWNER)
    parsed = CodaProfileSpec.parse(json.loads(json.dumps(item))["spec"])
    assert parsed.artifact == profile
    assert parsed.artifact.digest() == profile.digest()
    assert item["metadata"]["labels"]["coda-serving.dev/spec-key"] == cluster.spec_key.digest()


def test_a_profile_object_has_only_fields_that_the_api_server_knows():
    measured = assumed_profile(assumed_key(), ms_per_context_token=0.01, restore_ms_per_mb=1.0)
    item = profile_object(measured, "team", OWNER)
    version = coda_profile_definition()["spec"]["versions"][0]
    spec_schema = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    assert list(unknown_fields(item["spec"], spec_schema, "spec")) == []
    assert item["spec"]["artifact"]["restore"]["curves"]


def unknown_fields(value: Any, schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the paths that strict validation would refuse: unknown, or null."""
    if value is None:
        yield f"{path}: null"
    if isinstance(value, dict):
        for name, item in value.items():
            known = schema.get("properties", {}).get(name)
            yield from [f"{path}.{name}"] if known is None else unknown_fields(item, known, f"{path}.{name}")
    if isinstance(value, list):
        for item in value:
            yield from unknown_fields(item, schema["items"], f"{path}[]")
