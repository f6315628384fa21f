"""Which session a request belongs to, and how its conversation is named where no client says."""

import json

import pytest
from router_harness import running_router
from scripted_worker import running_worker

from coda_engine.contract.identity import unpack
from coda_engine.contract.snapshot import session_key
from coda_router import envelope as envelope_module
from coda_router.envelope import decoded, read_envelope, without_engine_controls
from coda_router.errors import Refusal
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


def test_a_value_too_long_for_a_name_names_no_session():
    assert session({}, {"prompt_cache_key": "k" * 65_534})[2] is SessionSource.PROMPT_CACHE_KEY
    assert session({}, {"prompt_cache_key": "k" * 65_535})[2] is SessionSource.OPENING
    metadata = ALL_BODY["metadata"] | {"filler": [0] * 65_536}
    assert session({}, {"metadata": metadata})[2] is SessionSource.OPENING
    for name in ("previous_response_id", "store"):
        assert decoded(getattr(read_envelope(json.dumps({name: [0] * 65_536}).encode()), name)) is None


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


def test_a_name_takes_a_bounded_number_of_messages_blocks_and_tools():
    system = [{"role": "system", "content": f"{n}"} for n in range(65)]
    blocks = [{"type": "text", "text": f"{n}"} for n in range(65)]
    tools = [{"name": f"t{n}"} for n in range(65)]
    for first, counts in ((63, True), (64, False)):
        is_another = opening(messages=[*system[:first], ROUND_1[1]]) != opening(messages=[*system[:first], system[0]])
        assert is_another is counts
        assert (opening(system=blocks[:first]) != opening(system=blocks[: first + 1])) is counts
        assert (opening(tools=tools[:first]) != opening(tools=tools[: first + 1])) is counts


def test_a_conversation_of_system_messages_alone_keeps_its_name_over_its_turns():
    messages = [{"role": "system", "content": f"{n}"} for n in range(5_000)]
    assert opening(messages=messages) == opening(messages=[*messages, *ROUND_1])


@pytest.mark.parametrize("letter", ["a", "\u00e9", "\U0001f600", "\\"])
def test_of_a_long_text_the_beginning_counts_however_it_is_sent(letter: str):
    letters = 410_000 // len(json.dumps(letter)[1:-1])
    for shift in range(12):
        text = "x" * shift + letter * letters
        blocks = [{"type": "text", "text": text}]
        assert opening(system=text) == opening(system=blocks) == opening(system=text + "more")
        assert opening(system=text) != opening(system="y" + text)
    billing = "x-anthropic-billing-header: cc_version=1.2.3; cc_entrypoint=cli;\n"
    assert opening(system=billing + text) == opening(system=text)


def test_messages_too_long_to_decode_are_named_by_how_they_begin():
    picture = {"type": "image", "data": "i" * 8 * 1024 * 1024}
    long = {"role": "user", "content": [{"type": "text", "text": "go"}, picture]}
    other = {"role": "user", "content": [{"type": "text", "text": "stop"}, picture]}
    assert opening(messages=[long]) == opening(messages=[long, ROUND_1[0]]) != opening(messages=[other])
    assert opening(system=long["content"]) != opening(system=other["content"])


def test_a_prompt_of_token_ids_is_named_by_its_first_ones():
    ids = list(range(1_000, 2_000))
    for batch in (lambda prompt: prompt, lambda prompt: [prompt]):
        assert opening(prompt=batch(ids)) == opening(prompt=batch([*ids, 7]))
        assert opening(prompt=batch(ids)) != opening(prompt=batch([7, *ids]))
    assert opening(prompt=["go", "stop"]) == opening(prompt="go")


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


def many_fields(count: int) -> dict:
    return {f"field_{n}": n for n in range(count)}


def without_controls(body: dict) -> dict:
    data = json.dumps(body).encode()
    return json.loads(without_engine_controls(data, read_envelope(data)))


def test_a_body_with_too_many_fields_to_cut_engine_controls_out_of_is_refused():
    assert without_controls(many_fields(255) | {"priority": 1}) == many_fields(255)
    with pytest.raises(Refusal, match=r"take priority out.*at most 256 fields") as refused:
        without_controls(many_fields(256) | {"priority": 1})
    assert (refused.value.status, refused.value.code) == (400, "too_many_fields")
    assert without_controls(many_fields(1_000)) == many_fields(1_000)


def test_what_may_be_a_million_fields_is_refused_before_they_are_listed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(envelope_module, "_fields_decoder", None)
    body = b'{"priority":1,%b}' % b",".join([b'"a":1'] * 1_000_000)
    with pytest.raises(Refusal, match="at most 256 fields"):
        without_engine_controls(body, read_envelope(body))


def test_fields_within_messages_and_tools_do_not_count():
    parameters = {f"p{n}": {"type": "string", "description": "a: b"} for n in range(40_000)}
    body = {"tools": [{"name": "t", "parameters": parameters}], "input": ":" * 200_000, "user": "u"}
    assert without_controls(body | {"cache_salt": "x"}) == body


async def test_a_client_with_too_many_fields_is_told_what_to_leave_out():
    async with running_worker() as worker, running_router(worker) as router:
        status, reply = await router.chat(**many_fields(300), cache_salt="x")
        error = json.loads(reply)["error"]
        assert (status, error["code"], error["param"]) == (400, "too_many_fields", "cache_salt")
        assert "cache_salt" in error["message"]
        assert not worker.requests


def test_tenants_do_not_share_sessions():
    signed, unsigned = IdentityWriter("r", b"x" * 16), IdentityWriter("r", None)
    same = Session("s", "", SessionSource.CODA_HEADER)
    for writer in (signed, unsigned):
        assert writer.table_key("a", "s") != writer.table_key("b", "s")
    first, second = (unsigned.header_value(tenant, same, attempt=0, ready_age_ms=0) for tenant in "ab")
    assert first != second
    assert unsigned.table_key("a", "s") == session_key("", first.decode())
