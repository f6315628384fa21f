"""One real vLLM server (three processes) with the plug-ins: endpoints, identity, live documents, abort, leftovers."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from scheduler_harness import settings_json

from coda_engine.contract import interface
from coda_engine.contract.identity import LOWEST_TIER, PRIORITY_HEADER, SESSION_HEADER, Identity, pack
from coda_engine.contract.profile import FullKey
from coda_engine.contract.reasons import AdmissionReason, Feature, Reason
from coda_engine.contract.settings import Settings, StateAdmissionPolicyName
from coda_engine.contract.snapshot import EngineSnapshot, SessionDelta, session_key
from coda_engine.profiling.assumed import assumed_profile

START_S = 420
WAIT_S = 30
NAMES = ["smollm2", "an-alias"]
SECRET, TOKEN = "the cluster's secret", "the internal token"


@dataclass
class Server:
    """A running server and how to talk to it."""

    process: subprocess.Popen
    port: int
    pages: Path
    log: Path

    def call(self, method: str, path: str, body=None, headers=None, *, token: str | None = TOKEN):
        """Return status and decoded JSON (or text) of one request."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            sent = {"content-type": "application/json", **(headers or {})}
            if token is not None and path.startswith("/coda"):
                sent["authorization"] = f"Bearer {token}"
            data = json.dumps(body) if isinstance(body, dict) else body
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        with suppress(ValueError):
            return response.status, json.loads(text)
        return response.status, text

    def snapshot(self) -> EngineSnapshot:
        status, document = self.call("GET", interface.SNAPSHOT_PATH)
        assert status == 200, document
        return EngineSnapshot.model_validate(document)

    def snapshot_when(self, matches) -> EngineSnapshot:
        """Return the first snapshot that matches within half a minute."""
        deadline_s = time.monotonic() + WAIT_S
        while not matches(snapshot := self.snapshot()):
            assert time.monotonic() < deadline_s, snapshot
            time.sleep(0.05)
        return snapshot

    def chat(self, content: str, headers=None, **fields):
        body = {"model": "smollm2", "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}
        return self.call("POST", "/v1/chat/completions", body, headers)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(model_folder: Path, folder: Path, *flags: str, **variables: str) -> Server:
    """Start a server with the tests' documents; ``flags`` and environment ``variables`` come on top."""
    pages = folder / "pages"
    pages.mkdir()
    (folder / "secret").write_text(SECRET)
    (folder / "token").write_text(TOKEN)
    (folder / "settings.json").write_text(settings_json())
    left_out = ("CODA_PAGE_FILES", "VLLM_ENABLE_V1_MULTIPROCESSING", "OMP_NUM_THREADS", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in left_out} | {
        "VLLM_PLUGINS": ",".join(interface.VLLM_PLUGIN_NAMES),
        "TMPDIR": str(folder),
        interface.ENV_PAGE_DIR: str(pages),
        interface.ENV_CLUSTER_SECRET_FILE: str(folder / "secret"),
        interface.ENV_INTERNAL_TOKEN_FILE: str(folder / "token"),
        interface.ENV_SETTINGS_FILE: str(folder / "settings.json"),
        interface.ENV_PROFILE_FILE: str(folder / "no-profile-yet.json"),
        **variables,
    }
    port, log = free_port(), folder / "server.log"
    arguments = {
        "--model": str(model_folder), "--host": "127.0.0.1", "--port": str(port),
        "--dtype": "float32", "--kv-cache-memory-bytes": "220000000", "--block-size": "32",
        "--max-num-batched-tokens": "256", "--max-num-seqs": "4", "--max-model-len": "4096",
        "--shutdown-timeout": "120",
    }  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--enforce-eager",
        "--served-model-name",
        *NAMES,
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(part for pair in arguments.items() for part in pair), *flags],
            env=environment, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    server = Server(process, port, pages, log)
    deadline_s = time.monotonic() + START_S
    while True:
        assert process.poll() is None, log.read_text()[-3_000:]
        assert time.monotonic() < deadline_s, log.read_text()[-3_000:]
        with suppress(OSError):
            if server.call("GET", "/health")[0] == 200:
                return server
        time.sleep(0.5)


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    """The module's server; its whole process group is ended at the end, whatever happened."""
    running = start_server(model_folder, tmp_path_factory.mktemp("server"))
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(10)


def signed(session: str, **fields) -> dict[str, str]:
    identity = Identity("alice", session, router_id="router-1", **fields)
    return {SESSION_HEADER: pack(identity, SECRET.encode()), PRIORITY_HEADER: str(identity.tier)}


def put_own_profile(server: Server):
    status, keys = server.call("GET", interface.KEYS_PATH)
    assert status == 200
    profile = assumed_profile(FullKey.model_validate(keys["full_key"]))
    return profile, server.call("PUT", interface.PROFILE_PATH, profile.to_json())


def test_internal_endpoints_ask_for_the_token_and_public_ones_do_not(server):
    for token in (None, "wrong", ""):
        assert server.call("GET", interface.SNAPSHOT_PATH, token=token)[0] == 401
    assert server.call("GET", "/v1/models")[0] == 200


def test_the_snapshot_of_a_new_engine_says_what_is_on_and_why_not(server):
    snapshot = server.snapshot_when(lambda now: len(now.served_models) > 1)
    assert snapshot.served_models == NAMES
    assert (snapshot.waiting, snapshot.running, snapshot.max_running) == (0, 0, 4)
    assert snapshot.capabilities[Feature.IDENTITY].enabled
    state = snapshot.capabilities[Feature.STATE_ADMISSION]
    assert (state.enabled, state.reason) == (False, Reason.NO_PROFILE)


def test_keys_and_documents_in_force_are_served(server):
    status, keys = server.call("GET", interface.KEYS_PATH)
    assert status == 200
    assert FullKey.model_validate(keys["full_key"]).spec.digest() == keys["spec_key_digest"]
    status, settings = server.call("GET", interface.SETTINGS_PATH)
    assert Settings.model_validate(settings["settings"]).digest() == settings["digest"]
    assert server.snapshot().settings_digest == settings["digest"]


def test_profiles_are_taken_refused_or_unreadable(server):
    profile, answer = put_own_profile(server)
    assert answer == (200, {"digest": profile.digest(), "detail": ""})
    foreign = profile.model_copy(update={"full_key": profile.full_key.model_copy(update={"block_size": 16})})
    status, refusal = server.call("PUT", interface.PROFILE_PATH, foreign.to_json())
    assert (status, refusal["reason"]) == (409, Reason.PROFILE_MISMATCH.value)
    assert "block_size" in refusal["detail"]
    assert server.call("PUT", interface.PROFILE_PATH, "{}")[0] == 400
    assert server.call("PUT", interface.PROFILE_PATH, "x" * 70_000)[0] == 400
    status, in_force = server.call("GET", interface.PROFILE_PATH)
    assert (status, in_force["full_key"]["block_size"]) == (200, 32)
    assert server.snapshot_when(lambda snapshot: snapshot.profile_digest == profile.digest())
    assert server.snapshot().capabilities[Feature.STATE_ADMISSION].enabled


def test_settings_change_live_and_bad_ones_name_their_field(server):
    fifo = settings_json(StateAdmissionPolicyName.FIFO)
    status, answer = server.call("PUT", interface.SETTINGS_PATH, fifo)
    assert (status, answer["digest"]) == (200, Settings.parse(fifo).digest())
    state = server.snapshot_when(lambda snapshot: snapshot.settings_digest == answer["digest"]).capabilities
    assert state[Feature.STATE_ADMISSION].reason is Reason.DISABLED_BY_SETTINGS
    status, error = server.call("PUT", interface.SETTINGS_PATH, '{"admission": {"state": {"tauMs": -1}}}')
    assert status == 400
    assert "settings.admission.state.tauMs" in error["error"]["message"]
    assert server.call("PUT", interface.SETTINGS_PATH, settings_json())[0] == 200


def test_a_signed_chat_is_answered_decided_on_and_remembered(server):
    before = server.call("GET", interface.DECISIONS_PATH)[1]["next"]
    question = "What is the capital of France? Answer in one short sentence. " * 3
    status, answer = server.chat(question, signed("s1"), max_tokens=20)
    assert status == 200
    assert "Paris" in answer["choices"][0]["message"]["content"]
    deadline_s = time.monotonic() + WAIT_S
    while (decisions := server.call("GET", f"{interface.DECISIONS_PATH}?since={before}")[1])["next"] == before:
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    (decision,) = decisions["decisions"]
    assert decision["sequence"] == before
    assert decision["reason"] == AdmissionReason.ONLY_CANDIDATE.value
    key, instance = session_key("alice", "s1"), server.snapshot().instance_id
    while True:
        table = SessionDelta.model_validate(server.call("GET", f"{interface.SESSIONS_PATH}?instance={instance}")[1])
        if rows := [row for row in table.sessions if row.key == key]:
            break
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    assert rows[0].hbm_tokens >= 32
    later = server.call("GET", f"{interface.SESSIONS_PATH}?instance={instance}&since={table.version}")[1]
    assert (later["since"], later["sessions"]) == (table.version, [])


def test_hostile_bodies_are_overridden_and_counted(server):
    before = server.snapshot().steps.untrusted_identities
    hostile = {
        "session_id": pack(Identity("alice", "s1"), b"a guessed secret"),
        "priority": 0,
        "cache_salt": "alice's",
        "vllm_xargs": {"coda_tier": 0},
        "max_tokens": 2,
    }
    assert server.chat("Hello", signed("s1"), **hostile)[0] == 200
    assert server.chat("Hello", max_tokens=2)[0] == 200
    snapshot = server.snapshot_when(lambda snapshot: snapshot.steps.untrusted_identities == before + 2)
    assert LOWEST_TIER not in snapshot.running_by_tier


def test_the_stream_of_snapshots_tells_new_versions_and_beats_while_idle(server):
    server.snapshot_when(lambda snapshot: snapshot.running == 0)
    with snapshot_stream(server) as lines:
        seen = [next(lines)]
        while len(seen) < 2 or seen[-1].version != seen[-2].version:
            seen.append(next(lines))
        assert server.chat("Count to ten.", signed("s2"), max_tokens=8)[0] == 200
        assert next(lines).version > seen[-1].version


@contextmanager
def snapshot_stream(server: Server) -> Iterator[Iterator[EngineSnapshot]]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
    try:
        headers = {"authorization": f"Bearer {TOKEN}"}
        connection.request("GET", f"{interface.SNAPSHOT_PATH}?since=0", headers=headers)
        stream = connection.getresponse()
        yield (EngineSnapshot.from_json(line) for line in iter(stream.readline, b""))
    finally:
        connection.close()


def test_a_client_that_leaves_frees_the_engine(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 3_000, "stream": True, "ignore_eos": True}
    headers = {"content-type": "application/json", **signed("s3", tier=2)}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    stream = connection.getresponse()
    assert stream.readline().startswith(b"data:")
    busy = server.snapshot_when(lambda snapshot: snapshot.running == 1)
    assert busy.running_by_tier == {2: 1}
    assert busy.requests_by_router == {"router-1": 1}
    stream.close()
    connection.close()
    idle = server.snapshot_when(lambda snapshot: snapshot.running == 0)
    assert idle.kv_blocks_free == idle.kv_blocks_total


def test_metrics_carry_coda_s_counters(server):
    status, text = server.call("GET", "/metrics")
    assert status == 200
    for line in (
        'coda_engine_admissions_total{reason="OnlyCandidate"}',
        'coda_engine_capability{feature="StateAdmission",reason="Enabled"} 1.0',
        "coda_engine_refused_after_feasible_total 0.0",
        "coda_engine_selection_seconds_count",
        "coda_engine_untrusted_identities_total",
        "vllm:num_requests_running",
    ):
        assert line in text


def test_a_server_told_to_stop_says_so_finishes_its_work_and_leaves_nothing(server):
    assert list(server.pages.glob("coda-page-*"))
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = {"model": "smollm2", "prompt": "Once upon a time", "max_tokens": 150, "stream": True, "ignore_eos": True}
    with snapshot_stream(server) as lines:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        assert answer.readline().startswith(b"data:")
        server.process.send_signal(signal.SIGTERM)
        while not (snapshot := next(lines)).draining:
            assert snapshot.running <= 1
        assert answer.read().rstrip().endswith(b"[DONE]")
        assert all(snapshot.draining for snapshot in lines)
    connection.close()
    server.process.wait(WAIT_S)
    assert list(server.pages.iterdir()) == []
    deadline_s = time.monotonic() + WAIT_S
    while group_lives(server.process.pid):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def group_lives(group: int) -> bool:
    """Return whether any process of the group runs."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
