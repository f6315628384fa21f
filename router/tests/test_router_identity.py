"""Which session a request belongs to, and how its conversation is named where no client says."""

import json

import pytest

from coda_engine.contract.identity import unpack
from coda_engine.contract.snapshot import session_key
from coda_router.envelope import read_envelope, without_engine_controls
from coda_router.identity import IdentityWriter, Session, SessionSource, session_of
from coda_router.opening import opening_name

ALL_HEADERS = {
    b"x-coda-session": b"coda",
    b"x-claude-code-session-id": b"claude",
    b"session-id": b"codex",
    b"x-session-id": b"generic",
    b"x-session-affinity": b"affinity",
    b"x-litellm-session-id": b"litellm",
}
ALL_BODY = {"prompt_cache_key": "cache-key", "metadata": {"user_id": "user_1_account_2_session_meta"}}


def session(headers: dict[bytes, bytes], body: dict | None = None, chained: str = "") -> tuple[str, str, SessionSource]:
    found = session_of(headers, read_envelope(json.dumps(body or {}).encode()), chained)
    return found.name, found.parent, found.source


def test_the_most_telling_name_wins():
    remaining, found = dict(ALL_HEADERS), []
    for name in ALL_HEADERS:
        found.append(session(remaining, ALL_BODY, "chain")[0])
        del remaining[name]
    assert found == ["coda", "claude", "codex", "generic", "affinity", "litellm"]
    assert session({}, ALL_BODY, "chain") == ("cache-key", "", SessionSource.PROMPT_CACHE_KEY)
    assert session({}, {"metadata": ALL_BODY["metadata"]}, "chain") == ("meta", "", SessionSource.METADATA)
    assert session({}, {"input": "go"}, "chain") == ("chain", "", SessionSource.RESPONSE_CHAIN)
    assert session({})[2] is SessionSource.OPENING


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (
            {b"x-claude-code-session-id": b"s", b"x-claude-code-agent-id": b"a1"},
            ("s/a1", "s", SessionSource.CLAUDE_CODE),
        ),
        (
            {
                b"x-claude-code-session-id": b"s",
                b"x-claude-code-agent-id": b"a2",
                b"x-claude-code-parent-agent-id": b"a1",
            },
            ("s/a2", "s/a1", SessionSource.CLAUDE_CODE),
        ),
        ({b"session-id": b"s", b"thread-id": b"s"}, ("s", "", SessionSource.CODEX)),
        (
            {b"session_id": b"s", b"thread-id": b"t2", b"x-codex-parent-thread-id": b"t1"},
            ("t2", "t1", SessionSource.CODEX),
        ),
        ({b"x-session-id": b"s2", b"x-parent-session-id": b"s1"}, ("s2", "s1", SessionSource.SESSION_HEADER)),
        ({b"x-coda-session": b"s2", b"x-coda-parent-session": b"s1"}, ("s2", "s1", SessionSource.CODA_HEADER)),
    ],
)
def test_a_sub_agent_is_a_session_of_its_own_with_a_parent(headers: dict[bytes, bytes], expected: tuple):
    assert session(headers) == expected


USER_ID = json.dumps({"device_id": "d", "account_uuid": "", "session_id": "root"})


@pytest.mark.parametrize(
    ("headers", "body", "name", "parent"),
    [
        ({"X-Claude-Code-Session-Id": "root", "x-app": "cli"}, {"metadata": {"user_id": USER_ID}}, "root", ""),
        (
            {"X-Claude-Code-Session-Id": "root", "x-app": "cli", "x-claude-code-agent-id": "a530"},
            {"metadata": {"user_id": USER_ID}},
            "root/a530",
            "root",
        ),
        (
            {"session-id": "root", "thread-id": "root", "x-client-request-id": "root", "x-codex-window-id": "root:0"},
            {"prompt_cache_key": "root"},
            "root",
            "",
        ),
        (
            {
                "session-id": "root", "thread-id": "child", "x-client-request-id": "child",
                "x-codex-window-id": "child:0", "x-codex-parent-thread-id": "root",
                "x-openai-subagent": "collab_spawn",
            },
            {"prompt_cache_key": "root"},
            "child",
            "root",
        ),
        ({"x-session-affinity": "ses_1", "x-session-id": "ses_1"}, {"prompt_cache_key": "ses_1"}, "ses_1", ""),
        ({"x-session-affinity": "ses_1", "x-session-id": "ses_1"}, {}, "ses_1", ""),
        (
            {"x-parent-session-id": "ses_1", "x-session-affinity": "ses_2", "x-session-id": "ses_2"},
            {},
            "ses_2",
            "ses_1",
        ),
    ],
    ids=["claude code", "its sub-agent", "codex", "its sub-agent", "opencode", "its title", "its sub-agent"],
)  # fmt: skip
def test_what_agents_send_names_their_session_and_its_parent(
    headers: dict[str, str], body: dict, name: str, parent: str
):
    received = {key.lower().encode(): value.encode() for key, value in headers.items()}
    assert session(received, body)[:2] == (name, parent)


def test_a_parent_is_named_as_its_own_requests_name_it():
    claude = {b"x-claude-code-session-id": b"root"}
    codex = {b"session-id": b"root", b"thread-id": b"root"}
    other = {b"x-session-id": b"ses_1"}
    assert session(claude | {b"x-claude-code-agent-id": b"a"})[1] == session(claude)[0]
    assert session(codex | {b"thread-id": b"child", b"x-codex-parent-thread-id": b"root"})[1] == session(codex)[0]
    assert session({b"x-session-id": b"ses_2", b"x-parent-session-id": b"ses_1"})[1] == session(other)[0]


def test_claude_code_s_metadata_may_be_a_json_string():
    user_id = json.dumps({"device_id": "d", "session_id": "inner"})
    assert session({}, {"metadata": {"user_id": user_id}}) == ("inner", "", SessionSource.METADATA)


@pytest.mark.parametrize(
    "metadata",
    [None, 7, [], {"user_id": 7}, {"user_id": "{"}, {"user_id": "plain"}, {"user_id": '{"a":' + "[" * 100_000}],
    ids=["none", "number", "list", "no string", "open", "plain", "deep"],
)
def test_metadata_without_a_session_falls_back_to_the_opening(metadata: object):
    assert session({}, {"metadata": metadata})[2] is SessionSource.OPENING


def test_a_user_is_never_a_session():
    assert session({}, {"user": "u", "safety_identifier": "i"})[2] is SessionSource.OPENING


def test_an_endless_name_is_replaced_by_its_hash():
    name, _, _ = session({b"x-coda-session": b"x" * 5000})
    assert len(name) == 32


def test_the_largest_identity_still_fits_the_engine_s_header():
    headers = {b"x-coda-session": b"\xff" * 256, b"x-coda-parent-session": b'"' * 256}
    found = session_of(headers, read_envelope(b"{}"))
    secret = b"x" * 16
    value = IdentityWriter("r" * 64, secret).header_value("t" * 253, found, attempt=1, ready_age_ms=3_600_000.0)
    assert unpack(value.decode(), secret).session == found.name


def opening(**body: object) -> str:
    return opening_name(read_envelope(json.dumps({"model": "m"} | body).encode()))


ROUND_1 = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "list the files"}]


def test_later_rounds_of_a_conversation_keep_its_name():
    later = [*ROUND_1, {"role": "assistant", "content": None}, {"role": "tool", "content": "a.py"}]
    assert opening(messages=ROUND_1) == opening(messages=later)


def test_another_first_message_system_prompt_tool_or_model_is_another_conversation():
    base = opening(messages=ROUND_1)
    assert opening(messages=[ROUND_1[0], {"role": "user", "content": "other"}]) != base
    assert opening(messages=[{"role": "system", "content": "x"}, ROUND_1[1]]) != base
    assert opening(messages=ROUND_1, tools=[{"type": "function", "function": {"name": "ls"}}]) != base
    assert opening(messages=ROUND_1, model="other") != base


def test_the_same_text_in_blocks_is_the_same_conversation():
    blocks = [
        {"role": "system", "content": [{"type": "text", "text": "be brief", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": [{"type": "text", "text": "list the files"}]},
    ]
    assert opening(messages=blocks) == opening(messages=ROUND_1)


def test_a_billing_line_does_not_change_the_name():
    prompt = {"type": "text", "text": "you are an agent"}
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=1.2.3; cc_entrypoint=cli;"}
    assert opening(system=[billing, prompt], messages=ROUND_1) == opening(system=[prompt], messages=ROUND_1)


def test_responses_and_completions_have_openings_too():
    items = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "go"}]
    assert opening(input=items) == opening(input=[*items, {"type": "function_call", "name": "ls"}])
    assert opening(input="go") != opening(input="stop")
    prompt = "p" * 2000
    assert opening(prompt=prompt) == opening(prompt=prompt + "more")
    assert opening(prompt=prompt) != opening(prompt="q" + prompt)


@pytest.mark.parametrize("messages", [None, 7, "text", [7], [{"role": 7}], [{"content": {}}]])
def test_odd_messages_have_some_opening(messages: object):
    assert len(opening(messages=messages)) == 32


def test_a_body_without_engine_controls_is_not_touched():
    body = b'{ "model" : "m" }'
    assert without_engine_controls(body, read_envelope(body)) is body


def test_engine_controls_are_cut_out_and_the_rest_keeps_its_bytes():
    body = b'{"model":"m","sess\\u0069on_id":"x","t":1.50e0,"priority":1,"m\\"q":[ 1 ]}'
    cut = without_engine_controls(body, read_envelope(body))
    assert cut == b'{"model":"m","t":1.50e0,"m\\"q":[ 1 ]}'


def test_tenants_do_not_share_sessions():
    signed, unsigned = IdentityWriter("r", b"x" * 16), IdentityWriter("r", None)
    same = Session("s", "", SessionSource.CODA_HEADER)
    for writer in (signed, unsigned):
        assert writer.table_key("a", "s") != writer.table_key("b", "s")
    first, second = (unsigned.header_value(tenant, same, attempt=0, ready_age_ms=0) for tenant in "ab")
    assert first != second
    assert unsigned.table_key("a", "s") == session_key("", first.decode())
