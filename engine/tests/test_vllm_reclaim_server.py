"""A real server (three processes) with a CPU shadow: what replies call reaches EngineCore, by every protocol, gaps
close, and the KV of sessions that wait is what makes room."""

import json
import os
import signal
import time
from contextlib import suppress

import pytest
from test_vllm_server import WAIT_S, Server, signed, start_server

from coda_engine.contract import interface
from coda_engine.contract.identity import SESSION_HEADER
from coda_engine.contract.reasons import Feature, Reason, VictimReason
from coda_engine.contract.settings import AdmissionSettings, ReclaimPolicyName, ReclaimSettings, Settings
from coda_engine.contract.snapshot import SessionDelta, SessionResidency, session_key

COMMAND_SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "string", "enum": ["cd /repo && pytest -q"]}},
    "required": ["command"],
    "additionalProperties": False,
}
BASH = {"name": "Bash", "description": "Run a command.", "parameters": COMMAND_SCHEMA, "strict": True}
ASK = "Run the project's tests with the Bash tool, then say whether they pass. " * 3


@pytest.fixture(scope="module")
def server(model_folder, tmp_path_factory):
    """The module's server; its whole process group is ended at the end, whatever happened."""
    folder = tmp_path_factory.mktemp("tools")
    shadow = {interface.ENV_SHADOW_BYTES: "300000000", interface.ENV_SHADOW_DIR: str(folder / "shadow")}
    running = start_server(model_folder, folder, "--enable-auto-tool-choice", "--tool-call-parser", "hermes", **shadow)
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            os.killpg(running.process.pid, signal.SIGKILL)
        running.process.wait(10)


def row(server: Server, session: str) -> SessionResidency | None:
    instance = server.snapshot().instance_id
    status, document = server.call("GET", f"{interface.SESSIONS_PATH}?instance={instance}")
    assert status == 200
    rows = {row.key: row for row in SessionDelta.model_validate(document).sessions}
    return rows.get(session_key("alice", session))


def row_when(server: Server, session: str, matches) -> SessionResidency:
    """Return the session's row as soon as it matches, within half a minute."""
    deadline_s = time.monotonic() + WAIT_S
    while not ((found := row(server, session)) and matches(found)):
        assert time.monotonic() < deadline_s, found
        time.sleep(0.1)
    return found


def chat_tools(**fields):
    return {"tools": [{"type": "function", "function": BASH}], "tool_choice": "required", "max_tokens": 80, **fields}


def test_the_engine_knows_that_tools_are_seen_and_follows_settings(server):
    lru, tool_aware = (
        Settings(admission=AdmissionSettings(reclaim=ReclaimSettings(policy=policy))).model_dump_json(by_alias=True)
        for policy in (ReclaimPolicyName.LRU, ReclaimPolicyName.TOOL_AWARE)
    )
    now = server.snapshot_when(lambda now: now.capabilities[Feature.RECLAIM].enabled)
    assert now.capabilities[Feature.RECLAIM].detail == "tool-aware"
    for document, reason in ((lru, Reason.DISABLED_BY_SETTINGS), (tool_aware, Reason.ENABLED)):
        digest = server.call("PUT", interface.SETTINGS_PATH, document)[1]["digest"]
        now = server.snapshot_when(lambda now, digest=digest: now.settings_digest == digest)
        assert now.capabilities[Feature.RECLAIM].reason is reason


def test_a_chat_reply_s_tool_is_waited_for_until_its_session_returns(server):
    messages = [{"role": "user", "content": ASK}]
    body = {"model": "smollm2", "messages": messages, "temperature": 0, **chat_tools()}
    before_s = time.time()
    status, answer = server.call("POST", "/v1/chat/completions", body, signed("chat"))
    assert status == 200, answer
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])["command"][-9:]) == (
        "Bash", "pytest -q",
    )  # fmt: skip
    waiting = row_when(server, "chat", lambda row: row.tool is not None)
    assert waiting.tool == "Bash:test"
    assert before_s < waiting.tool_waiting_since_s <= time.time()
    messages += [answer["choices"][0]["message"], {"role": "tool", "tool_call_id": call["id"], "content": "3 passed"}]
    closing = {**body, "messages": messages, "tool_choice": "none", "max_tokens": 5}
    status, answer = server.call("POST", "/v1/chat/completions", closing, signed("chat"))
    assert status == 200, answer
    closed = row_when(server, "chat", lambda row: row.tool is None)
    assert closed.tool_waiting_since_s is None


def test_a_streamed_chat_reply_s_tool_is_seen(server):
    status, text = server.chat(ASK, signed("stream"), stream=True, **chat_tools())
    assert status == 200
    assert "[DONE]" in text
    assert row_when(server, "stream", lambda row: row.tool is not None).tool == "Bash:test"


def test_a_final_answer_leaves_no_tool(server):
    status, answer = server.chat(ASK, signed("plain"), **chat_tools(tool_choice="none", max_tokens=5))
    assert status == 200, answer
    assert row_when(server, "plain", lambda row: row.hbm_tokens > 0).tool is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_messages_reply_s_tool_is_seen(server, stream):
    tool = {"name": "Bash", "description": "Run a command.", "input_schema": COMMAND_SCHEMA, "strict": True}
    body = {
        "model": "smollm2", "max_tokens": 80, "temperature": 0, "stream": stream,
        "messages": [{"role": "user", "content": ASK}], "tools": [tool], "tool_choice": {"type": "any"},
    }  # fmt: skip
    session = f"messages-{stream}"
    status, answer = server.call("POST", "/v1/messages", body, signed(session))
    assert status == 200, answer
    assert row_when(server, session, lambda row: row.tool is not None).tool.startswith("Bash:")


@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_reply_s_tool_is_seen(server, stream):
    body = {
        "model": "smollm2", "max_output_tokens": 80, "temperature": 0, "stream": stream, "store": False,
        "input": ASK, "tools": [{"type": "function", **BASH}], "tool_choice": "required",
    }  # fmt: skip
    session = f"responses-{stream}"
    status, answer = server.call("POST", "/v1/responses", body, signed(session))
    assert status == 200, answer
    assert row_when(server, session, lambda row: row.tool is not None).tool == "Bash:test"


def test_what_an_unsigned_client_calls_is_nobody_s(server):
    before = server.snapshot().steps.untrusted_identities
    assert server.chat(ASK, {"X-Session-ID": "forged"}, **chat_tools())[0] == 200
    server.snapshot_when(lambda now: now.steps.untrusted_identities == before + 1 and now.running == 0)
    status, document = server.call("GET", interface.SESSIONS_PATH)
    assert status == 200
    assert session_key("", "forged") not in {row["key"] for row in document["sessions"]}
    assert server.snapshot().capabilities[Feature.RECLAIM].enabled


def test_somebody_outside_may_tell_of_a_turn_that_vllm_does_not_parse(server):
    identity = signed("text-agent")
    assert server.chat("Answer with a shell command in a code block.", identity, max_tokens=5)[0] == 200
    turn = {"session_id": identity[SESSION_HEADER], "tools": [{"name": "bash", "command": "make -j4 && make test"}]}
    assert server.call("POST", interface.TURNS_PATH, turn, token=None)[0] == 401
    assert server.call("POST", interface.TURNS_PATH, turn) == (200, {})
    assert row_when(server, "text-agent", lambda row: row.tool is not None).tool == "bash:build"
    status, error = server.call("POST", interface.TURNS_PATH, {"session_id": "", "tools": [{}]})
    assert status == 400
    assert "session_id" in error["error"]["message"]


def test_published_kv_of_waiting_sessions_makes_room(server):
    assert server.chat(ASK, signed("victim"), **chat_tools())[0] == 200
    row_when(server, "victim", lambda row: row.tool is not None)
    before = server.snapshot().steps.reclaimed.get(VictimReason.PREDICTED_IDLE.value, 0)
    for number in range(4):
        prompt = f"{number} " + "word " * 1_300
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": 1, "temperature": 0}
        assert server.call("POST", "/v1/completions", body, signed(f"long-{number}"))[0] == 200
    reclaimed = server.snapshot_when(
        lambda now: now.steps.reclaimed.get(VictimReason.PREDICTED_IDLE.value, 0) > before
    ).steps.reclaimed
    assert set(reclaimed) <= {reason.value for reason in VictimReason}
    status, text = server.call("GET", "/metrics")
    assert status == 200
    assert 'coda_engine_reclaimed_blocks_total{reason="PredictedIdle"}' in text
