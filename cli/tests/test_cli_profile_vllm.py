"""``coda profile`` on a real engine with a CPU shadow: measured, handed over while it runs, looked at again."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from coda_cli.model.catalog import default_model_dir
from coda_cli.profile_file import read_profile, write_profile
from coda_cli.up.machine import free_ports
from coda_engine.contract.interface import HBM_FORGET_PATH
from coda_engine.contract.profile import Profile
from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.snapshot import Capability
from coda_engine.profiling import EngineClient
from coda_operator.desired.processes import EnginePlace, engine_process
from coda_operator.spec import CodaClusterSpec

pytestmark = pytest.mark.vllm

TOKEN = "the internal token"
START_LIMIT_S = 400.0
TRIES = 3
"""A measurement that a busy machine disturbed is refused, as it should be; somebody who sees that tries again."""


@dataclass(frozen=True)
class Engine:
    """The running engine and what a person needs to profile it."""

    client: EngineClient
    token_file: Path

    def admission(self) -> Capability:
        """What the engine says of state admission once its snapshot has caught up."""
        time.sleep(0.2)
        return self.client.snapshot().capabilities[Feature.STATE_ADMISSION]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    model = default_model_dir(os.environ) / "smollm2-135m-instruct"
    if not (model / "config.json").is_file():
        subprocess.run([sys.executable, "-m", "coda_cli", "model"], check=True, timeout=600)
    spec = CodaClusterSpec.parse(
        {
            "model": {
                "name": "small",
                "source": {"hostPath": str(model)},
                "dtype": "float32",
                "maxContextTokens": 2_048,
            },
            "engine": {"device": "cpu", "cpus": 1, "kvCacheSize": "300M", "maxRunning": 8},
            "kvShadow": {"size": "1Gi"},
        }
    )
    token_file, port = folder / "token", free_ports(24_700, 1)[0]
    token_file.write_text(TOKEN)
    (folder / "settings.json").write_text(spec.settings().model_dump_json(by_alias=True))
    shadow = Path("/dev/shm") / f"coda-shadow-profile-test-{os.getpid()}"
    place = EnginePlace(
        "engine-0", sys.executable, "127.0.0.1", port, str(model), str(folder / "settings.json"),
        str(folder / "no-profile-yet.json"), internal_token_file=str(token_file), shadow_dir=str(shadow),
    )  # fmt: skip
    process = engine_process(spec, spec.spec_key("test"), place)
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with (folder / "log").open("wb") as log:
        child = subprocess.Popen(
            process.argv,
            stdout=log,
            stderr=log,
            env={**inherited, **process.env, "TMPDIR": str(folder)},
            start_new_session=True,
        )
    try:
        _wait_healthy(child, port, folder / "log")
        yield Engine(EngineClient(f"http://127.0.0.1:{port}", TOKEN), token_file)
    finally:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(30)
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        shutil.rmtree(shadow, ignore_errors=True)


@dataclass(frozen=True)
class Measured:
    """The engine's quick profile, measured by the command and applied.

    Attributes:
        file: The artifact.
        left_out: Parts that the command said it left out, because this machine was too noisy for them.
    """

    file: Path
    left_out: frozenset[str]


@pytest.fixture(scope="module")
def measured(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    file = tmp_path_factory.mktemp("profile") / "small.json"
    said = patiently(engine, "--quick", "--out", file, "--report", file.with_suffix(".html"), "--apply")
    return Measured(file, frozenset(re.findall(r"left out of the profile: (\w+): ", said)))


def patiently(engine: Engine, *arguments: str | Path) -> str:
    """Run ``coda profile`` until the machine was quiet enough; return what it said."""
    address = ["--engine", engine.client.url, "--internal-token-file", str(engine.token_file)]
    argv = [sys.executable, "-m", "coda_cli", "profile", *address, *map(str, arguments)]
    for _ in range(TRIES):
        outcome = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False)
        if outcome.returncode == 0:
            return outcome.stderr
        assert "nothing was written" in outcome.stderr
    raise AssertionError(outcome.stderr)


def test_a_profile_has_every_part_or_says_which_it_leaves_out_and_is_in_force_at_once(
    engine: Engine, measured: Measured
) -> None:
    profile = read_profile(measured.file)
    assert "prefill" in profile.parts
    assert set(profile.parts) ^ measured.left_out == {"prefill", "prefill_grid", "restore"}
    assert profile.full_key == engine.client.full_key()
    assert profile.full_key.shadow_layout
    assert engine.client.snapshot().profile_digest == profile.digest()
    assert engine.admission().reason is Reason.ENABLED
    assert not list(measured.file.parent.glob(".*"))
    assert measured.file.with_suffix(".html").read_text().count("<svg") == len(profile.parts)


def forgiving(profile: Profile) -> Profile:
    """Return the profile with bounds that no busy machine misses: what is tested is the way, not the machine."""
    return profile.model_copy(
        update={name: part.model_copy(update={"error_bound": 1_000.0}) for name, part in profile.parts.items()}
    )


def test_a_profile_of_another_driver_serves_and_is_looked_at_again_instead_of_measured(
    engine: Engine, measured: Measured, tmp_path: Path
) -> None:
    profile, file = forgiving(read_profile(measured.file)), tmp_path / "older.json"
    older = profile.full_key.model_copy(update={"driver": "an older kernel"})
    write_profile(profile.model_copy(update={"full_key": older}), file)
    applied = engine.client.put_profile(read_profile(file))
    assert "driver: " in applied.outdated
    assert "an older kernel" in applied.outdated
    admission = engine.admission()
    assert (admission.enabled, admission.reason) == (True, Reason.PROFILE_NEEDS_REVALIDATION)

    said = patiently(engine, "--quick", "--out", file, "--apply")
    assert "its held-out points are enough" in said
    again = read_profile(file)
    assert [check.driver for check in again.revalidations] == [profile.full_key.driver]
    assert again.prefill == profile.prefill
    assert engine.admission().reason is Reason.ENABLED


def test_a_profile_of_another_configuration_is_refused_and_the_one_in_force_stays(
    engine: Engine, measured: Measured, tmp_path: Path
) -> None:
    in_force, file = engine.client.profile(), tmp_path / "foreign.json"
    profile = read_profile(measured.file)
    foreign = profile.full_key.model_copy(update={"shadow_layout": ""})
    write_profile(profile.model_copy(update={"full_key": foreign}), file)
    outcome = subprocess.run(
        [sys.executable, "-m", "coda_cli", "profile", "apply", str(file), "--engine", engine.client.url,
         "--internal-token-file", str(engine.token_file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert outcome.returncode == 2
    assert "shadow_layout" in outcome.stderr
    assert engine.client.profile() == in_force


def test_forgetting_what_hbm_holds_asks_for_the_token_and_leaves_the_shadow(engine: Engine, measured: Measured) -> None:
    assert _post(engine, HBM_FORGET_PATH, {}, token="wrong")[0] == 401
    prompt = [(number * 7_919) % 30_000 + 300 for number in range(1_000)]
    assert _cached(engine, prompt) == 0
    assert _cached(engine, prompt) == 992
    assert engine.client.forget_hbm()
    assert _cached(engine, prompt) == 992, "restored from the shadow"


def test_what_hbm_holds_is_not_forgotten_while_a_request_runs(engine: Engine) -> None:
    body = {"model": "small", "prompt": [5] * 40, "max_tokens": 400, "temperature": 0, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", int(engine.client.url.rsplit(":", 1)[1]), timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    try:
        _until(lambda: engine.client.snapshot().running == 1)
        assert not engine.client.forget_hbm()
    finally:
        connection.close()
        _until(lambda: engine.client.snapshot().running == 0)
    assert engine.client.forget_hbm()


def _cached(engine: Engine, prompt: list[int]) -> int | None:
    return engine.client.first_tokens("small", [prompt])[0].cached_tokens


def _post(engine: Engine, path: str, body: dict[str, Any], token: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", int(engine.client.url.rsplit(":", 1)[1]), timeout=60)
    try:
        connection.request("POST", path, json.dumps(body), {"Authorization": f"Bearer {token}"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def _until(condition: Callable[[], bool], limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def _wait_healthy(child: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    deadline_s = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline_s and child.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.5)
    raise AssertionError(log.read_text(errors="replace")[-3_000:])
