"""What is kept out of a prompt's prefix, what is left alone, and that a router does so."""

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from agent_requests import (
    BILLING,
    IDENTITY,
    MARKER,
    SYSTEM_PROMPT,
    claude_code,
    marker_message,
    text,
    through_a_gateway,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from router_harness import RunningRouter, running_router
from scripted_worker import running_worker

from coda_router.envelope import read_envelope
from coda_router.hygiene import late_markers, system_text
from coda_router.hygiene.cleaning import Cleaned, HygieneRule, PrefixHygiene
from coda_router.opening import opening_name

CAPTURES = sorted((Path(__file__).resolve().parents[3] / "shared" / "clients").glob("*.json"))

BILLING_LINE = BILLING.format(build="df4")
MARKER_LINE = MARKER.format(tokens=14_999_436)


def cleaned(
    body: bytes | dict[str, Any], hygiene: PrefixHygiene | None = None, *, hoists_system: bool = True
) -> Cleaned:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return (hygiene or PrefixHygiene()).clean(data, read_envelope(data), hoists_system=hoists_system)


def after(body: dict[str, Any], *, hoists_system: bool = True) -> Any:
    return json.loads(cleaned(body, hoists_system=hoists_system).body)


def texts(content: Any) -> str:
    """Return all that a content says, as an engine puts it together."""
    if isinstance(content, str):
        return content
    return "\n".join(block.get("text") or texts(block.get("content") or "") for block in content or [])


def prompt_with_system_first(body: dict[str, Any]) -> str:
    """Return a prompt as engines render it whose chat template takes system messages at the beginning only."""
    system = [texts(body.get("system")), *(texts(m["content"]) for m in body["messages"] if m["role"] == "system")]
    others = [f"[{m['role']}]{texts(m['content'])}{m.get('tool_calls', '')}" for m in body["messages"]]
    said = [line for line, m in zip(others, body["messages"], strict=True) if m["role"] != "system"]
    return "".join(["[system]", *system, *said])


def prompt_in_place(body: dict[str, Any]) -> str:
    return "".join([texts(body.get("system")), *(f"[{m['role']}]{texts(m['content'])}" for m in body["messages"])])


def test_the_billing_block_goes_and_the_rest_of_a_claude_code_request_stays():
    body = claude_code(2)
    expected = {**body, "system": body["system"][1:]}
    result = cleaned(body)
    assert json.loads(result.body) == expected
    assert list(json.loads(result.body)) == list(body)
    assert result.applied == (HygieneRule.BILLING_LINE,)


def test_sessions_and_sub_agents_share_their_system_prompt_once_the_billing_line_is_gone():
    one, other = claude_code(build="df4"), claude_code(build="c16; cc_is_subagent=true", session="2")
    assert prompt_in_place(one) != prompt_in_place(other)
    assert prompt_in_place(after(one)) == prompt_in_place(after(other))


@pytest.mark.parametrize("joint", ["\n", "\n\n", "\r\n", "", " "])
def test_a_billing_line_joined_to_the_prompt_goes_without_a_word_of_the_prompt(joint):
    prompt = f"{BILLING_LINE}{joint}{IDENTITY}"
    assert after({"system": prompt, "messages": []})["system"] == IDENTITY
    assert after({"system": [text(prompt)], "messages": []})["system"] == [text(IDENTITY)]
    assert after({"instructions": prompt, "input": "hi"})["instructions"] == IDENTITY
    chat = {"messages": [{"role": "system", "content": prompt}, {"role": "user", "content": "hi"}]}
    assert after(chat, hoists_system=False)["messages"][0] == {"role": "system", "content": IDENTITY}


def test_only_a_billing_line_at_the_beginning_of_a_system_prompt_counts():
    quoted = {"role": "user", "content": BILLING_LINE}
    tool = {"role": "user", "content": [{"type": "tool_result", "content": [text(BILLING_LINE)]}]}
    bodies = (
        {"system": f"{IDENTITY}\n{BILLING_LINE}", "messages": [quoted, tool]},
        {"system": "x-anthropic-billing-header: what is that?", "messages": [quoted]},
        {"messages": [quoted, {"role": "system", "content": BILLING_LINE}]},
        {"messages": BILLING_LINE, "prompt": BILLING_LINE, "input": [quoted]},
    )
    for body in bodies:
        data = json.dumps(body).encode()
        assert cleaned(data).body is data


def test_each_turn_of_a_session_with_markers_extends_the_one_before():
    turns = [claude_code(count, counts_down=True) for count in range(1, 6)]
    raw = [prompt_with_system_first(turn) for turn in turns]
    assert not any(longer.startswith(shorter) for shorter, longer in pairwise(raw))
    for render in (prompt_with_system_first, prompt_in_place):
        prompts = [render(after(turn)) for turn in turns]
        assert all(longer.startswith(shorter) for shorter, longer in pairwise(prompts))


def test_a_marker_moves_to_the_end_of_the_text_before_it():
    first, second = 15_000_000, 14_999_589
    messages = after(claude_code(2, counts_down=True))["messages"]
    assert [message["role"] for message in messages] == ["user", "system", "assistant", "user"]
    assert messages[0]["content"][1]["text"] == f"say hi\n{MARKER.format(tokens=first)}"
    result = messages[3]["content"][0]
    assert result == {
        "tool_use_id": "toolu_1", "type": "tool_result", "content": f"hi 1\n\n{MARKER.format(tokens=second)}",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("hi \u00e9\\", f"hi \u00e9\\\n{MARKER_LINE}"),
        ("", MARKER_LINE),
        ([], [text(MARKER_LINE)]),
        ([text("a"), text("b")], [text("a"), text(f"b\n{MARKER_LINE}")]),
        ([{"type": "image", "source": {}}], [{"type": "image", "source": {}}, text(MARKER_LINE)]),
        ([{"type": "tool_result"}], [{"type": "tool_result", "content": MARKER_LINE}]),
        ([{"type": "tool_result", "content": None}], [{"type": "tool_result", "content": MARKER_LINE}]),
        (
            [{"type": "tool_result", "content": [text("out")]}],
            [{"type": "tool_result", "content": [text(f"out\n{MARKER_LINE}")]}],
        ),
        (
            [{"type": "tool_result", "content": [{"type": "image"}]}],
            [{"type": "tool_result", "content": [{"type": "image"}, text(MARKER_LINE)]}],
        ),
    ],
)
def test_a_marker_finds_its_place_in_every_kind_of_message(content, expected):
    for marker in (MARKER_LINE, [text(MARKER_LINE)], [text(f" {MARKER_LINE}\n", cache_control={"type": "ephemeral"})]):
        body = {"messages": [{"role": "user", "content": content}, {"role": "system", "content": marker}]}
        assert after(body)["messages"] == [{"role": "user", "content": expected}]


def test_a_marker_that_follows_no_user_stays_and_so_does_a_system_message_that_says_more():
    marker = marker_message(5)
    bodies = (
        [marker],
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}, marker],
        [{"role": "user", "content": "hi"}, {"role": "system", "content": f"Plan first.\n{MARKER_LINE}"}],
        [{"role": "user", "content": "hi"}, {"role": "system", "content": [text(MARKER_LINE), text("Plan first.")]}],
        [{"role": "user", "content": MARKER_LINE}, {"role": "assistant", "content": MARKER_LINE}],
        [
            {"role": "user", "content": "hi"},
            {"role": "system", "content": "<total_tokens>x tokens left</total_tokens>"},
        ],
    )
    for messages in bodies:
        data = json.dumps({"messages": messages}).encode()
        assert cleaned(data).body is data


def test_markers_that_a_gateway_hoisted_are_removed_and_the_prompt_is_stable():
    turns = [after(through_a_gateway(count), hoists_system=False) for count in range(1, 5)]
    assert turns[0]["messages"][0]["content"] == f"{IDENTITY}\n\n{SYSTEM_PROMPT}"
    prompts = [prompt_with_system_first(turn) for turn in turns]
    assert all(longer.startswith(shorter) for shorter, longer in pairwise(prompts))
    assert after({"system": [text(IDENTITY), text(MARKER_LINE)], "messages": []})["system"] == [text(IDENTITY)]


def test_on_chat_a_marker_among_the_messages_stays_where_it_is():
    data = json.dumps({"messages": [{"role": "user", "content": "hi"}, marker_message(5)]}).encode()
    assert cleaned(data, hoists_system=False).body is data


def test_a_rule_that_is_off_does_nothing():
    body = claude_code(2, counts_down=True)
    data = json.dumps(body).encode()
    assert cleaned(data, PrefixHygiene(billing_line=False, rolling_markers=False)).body is data
    assert cleaned(data, PrefixHygiene(billing_line=False)).applied == (HygieneRule.ROLLING_MARKERS,)
    assert cleaned(data, PrefixHygiene(rolling_markers=False)).applied == (HygieneRule.BILLING_LINE,)
    assert cleaned(data).applied == (HygieneRule.BILLING_LINE, HygieneRule.ROLLING_MARKERS)


def test_numbers_order_and_spelling_of_everything_else_survive():
    data = (
        b'{ "seed": 1e400, "model" : "sm\\u0061ll", "temperature":0.10,"system":"' + BILLING_LINE.encode() + b'\\nBe.",'
        b'"n":123456789012345678901234567890, "messages":[ {"role":"user","content":"\\ud83d\\ude00 \\/"} ] }'
    )
    assert cleaned(data).body == data.replace(BILLING_LINE.encode() + b"\\n", b"")
    twice = b'{"model":"a","system":"' + BILLING_LINE.encode() + b'","x":"' + BILLING_LINE.encode() + b'","n":1e400}'
    assert cleaned(twice).body == b'{"model":"a","system":"","x":"' + BILLING_LINE.encode() + b'","n":1e400}'


@pytest.mark.parametrize(
    "data",
    [
        b'{"system":{"text":"' + BILLING_LINE.encode() + b'"},"messages":[]}',
        b'{"system":[1,null,{"text":7},["' + BILLING_LINE.encode() + b'"]],"messages":[]}',
        b'{"messages":[1,"' + MARKER_LINE.encode() + b'",{"role":1},{"role":"system","content":{"a":"'
        + MARKER_LINE.encode() + b'"}}]}',
        b'{"messages":{"role":"user","content":"' + MARKER_LINE.encode() + b'"}}',
    ],
)  # fmt: skip
def test_what_is_no_system_text_is_left_alone(data):
    assert cleaned(data).body is data


def test_a_request_made_to_hold_up_a_router_is_passed_on_as_it_is():
    markers = [marker_message(5)] * 10_000
    bodies: tuple[dict[str, Any], ...] = (
        {"messages": [{"role": "user", "content": "hi"}, *markers]},
        {"system": "x" + " " * 1_000_000 + MARKER_LINE, "messages": []},
        {"system": BILLING_LINE * 10_000, "messages": []},
    )
    for body in bodies:
        data = json.dumps(body).encode()
        assert cleaned(data).body is data
    assert len(after({"messages": [{"role": "user", "content": "hi"}, *markers[:9_999]]})["messages"]) == 1


def test_messages_with_too_many_commas_are_passed_on_without_being_listed(monkeypatch: pytest.MonkeyPatch):
    system = {"role": "system", "content": BILLING_LINE}
    for hoists_system, messages in ((False, [system]), (True, [{"role": "user", "content": "hi"}, marker_message(5)])):
        commas = 262_144 - json.dumps({"messages": [*messages, ""]}).count(",")
        body = {"messages": [*messages, "," * commas]}
        assert after(body, hoists_system=hoists_system) != body
        data = json.dumps({"messages": [*messages, "," * (commas + 1)]}).encode()
        with monkeypatch.context() as patched:
            for module in (late_markers, system_text):
                patched.setattr(module, "items_of", None)
            assert cleaned(data, hoists_system=hoists_system).body is data


def test_a_body_with_too_many_fields_to_be_put_together_again_is_passed_on_as_it_is():
    messages = [{"role": "system", "content": BILLING_LINE}, {"role": "user", "content": "x" * 70_000}]
    fields = {f"field_{n}": n for n in range(256)}
    data = json.dumps({"messages": messages} | fields).encode()
    result = cleaned(data)
    assert result.body is data
    assert result.applied == ()
    del fields["field_0"]
    assert after({"messages": messages} | fields)["messages"][0]["content"] == ""


def test_a_conversation_has_one_name_with_the_billing_line_and_without_it():
    for build in ("df4", "c16"):
        for body in (claude_code(build=build), through_a_gateway(1, build=build)):
            data = json.dumps(body).encode()
            without = cleaned(data, PrefixHygiene(rolling_markers=False)).body
            assert opening_name(read_envelope(data)) == opening_name(read_envelope(without))


PIECES = st.sampled_from(
    [
        "",
        "a",
        "\n",
        " ",
        "\\",
        '"',
        "\u00e9",
        "\U0001f600",
        BILLING_LINE,
        BILLING_LINE[:28],
        MARKER_LINE,
        MARKER_LINE[1:],
    ]
)
TEXTS = st.lists(PIECES, max_size=4).map("".join)
BLOCKS = st.one_of(TEXTS.map(text), st.just({"type": "image", "source": {"type": "url"}}))
RESULTS = st.builds(
    lambda content: {"type": "tool_result", "tool_use_id": "t", "content": content},
    st.one_of(st.none(), TEXTS, st.lists(BLOCKS, max_size=2)),
)
MESSAGES = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "developer", "tool"]),
        "content": st.one_of(TEXTS, st.lists(st.one_of(BLOCKS, RESULTS), max_size=3), st.none()),
    }
)
BODIES = st.fixed_dictionaries(
    {"model": st.just("small"), "messages": st.lists(MESSAGES, max_size=6)},
    optional={
        "system": st.one_of(TEXTS, st.lists(BLOCKS, max_size=3), st.none()),
        "instructions": TEXTS,
        "max_tokens": st.integers(),
    },
)


def without_what_the_rules_name(value: Any) -> Any:
    """Return a body without markers, billing lines, and the empty texts and white space that they leave behind."""
    if isinstance(value, str):
        without = re.sub(r"x-anthropic-billing-header:(?: \w+=[\w.-]+;)+\s*", "", value)
        return re.sub(r"<total_tokens>\d+ tokens left</total_tokens>", "", without).rstrip()
    if isinstance(value, dict):
        fields = {name: without_what_the_rules_name(field) for name, field in value.items()}
        return {name: field for name, field in fields.items() if field not in ("", None, [])}
    if isinstance(value, list):
        items = [without_what_the_rules_name(item) for item in value]
        return [item for item in items if item not in ({"type": "text"}, {"role": "system"})]
    return value


def roles(body: dict[str, Any]) -> list[str]:
    return [message["role"] for message in body["messages"] if message["role"] != "system"]


@settings(max_examples=400, deadline=None)
@given(body=BODIES, hoists_system=st.booleans(), escapes=st.booleans())
def test_any_request_says_the_same_but_for_what_the_rules_name(body, hoists_system, escapes):
    data = json.dumps(body, ensure_ascii=escapes).encode()
    result = cleaned(data, hoists_system=hoists_system)
    parsed = json.loads(result.body)
    assert without_what_the_rules_name(parsed) == without_what_the_rules_name(body)
    assert roles(parsed) == roles(body)
    assert (result.body is data) == (result.applied == ())
    again = cleaned(result.body, hoists_system=hoists_system)
    assert again.body is result.body


@settings(max_examples=200, deadline=None)
@given(body=BODIES)
def test_a_request_without_a_word_for_the_rules_is_the_same_object(body):
    data = re.sub(rb"billing|tokens left", b"-", json.dumps(body).encode())
    assert cleaned(data).body is data


@pytest.mark.skipif(not CAPTURES, reason="captures of real clients are not part of this repository")
@pytest.mark.parametrize("file", CAPTURES, ids=lambda path: path.stem)
def test_a_captured_request_loses_its_billing_block_at_most(file):
    capture = json.loads(file.read_text())
    body = capture["body"]
    result = cleaned(body, hoists_system="/messages" in capture["path"])
    if capture["client"] == "claude-code":
        assert result.applied == (HygieneRule.BILLING_LINE,)
        assert json.loads(result.body) == {**body, "system": body["system"][1:]}
    else:
        assert result.applied == ()


@pytest.mark.parametrize("path", ["/v1/messages?beta=true", "/v1/messages/count_tokens"])
async def test_a_router_cleans_what_an_engine_gets_and_counts_it(path):
    async with running_worker() as worker, running_router(worker) as router:
        body = claude_code(2, counts_down=True)
        async with router.session.post(f"{router.url}{path}", json=body) as reply:
            assert reply.status == 200
            await reply.read()
        assert worker.requests[-1].json() == after(body)
        counts = await cleaned_requests(router)
    assert counts == {"BillingLine": 1, "RollingMarkers": 1}


async def test_a_router_cleans_chat_and_leaves_other_bodies_byte_for_byte():
    async with running_worker() as worker, running_router(worker) as router:
        gateways = through_a_gateway(3)
        plain = b'{"messages": [{"content": "hi", "role":"user"}],  "model":"small"}'
        for data in (json.dumps(gateways).encode(), plain):
            async with router.session.post(f"{router.url}/v1/chat/completions", data=data) as reply:
                assert reply.status == 200
                await reply.read()
        assert worker.requests[0].json() == after(gateways, hoists_system=False)
        assert worker.requests[1].body == plain
        assert await cleaned_requests(router) == {"BillingLine": 1, "RollingMarkers": 1}


async def test_each_rule_can_be_turned_off_while_a_router_runs():
    body = claude_code(2, counts_down=True)
    async with running_worker() as worker, running_router(worker) as router:
        document = {"hygiene": {"billingLine": False, "rollingMarkers": False}}
        async with router.session.put(f"{router.url}/coda/settings", json=document) as reply:
            assert reply.status == 200
        async with router.session.post(f"{router.url}/v1/messages", data=json.dumps(body)) as reply:
            await reply.read()
        assert worker.requests[-1].body == json.dumps(body).encode()
        assert await cleaned_requests(router) == {"BillingLine": 0, "RollingMarkers": 0}


async def cleaned_requests(router: RunningRouter) -> dict[str, float]:
    _, metrics = await router.get("/metrics")
    found = re.findall(r'coda_router_cleaned_requests_total\{rule="(\w+)"\} ([\d.]+)', metrics)
    return {rule: float(count) for rule, count in found}
