"""Gaps of sessions, and replies' tools as vLLM's own parsers give them."""

import asyncio
import gc
import json
from types import SimpleNamespace

import pytest
from hand_clock import HandClock
from scheduler_harness import attach, new_scheduler
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser.parser_manager import ParserManager
from vllm.tokenizers import get_tokenizer

from coda_engine.contract.identity import Identity, pack
from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.snapshot import session_key
from coda_engine.policy.tool_gaps import TOOL_PRIOR
from coda_engine.policy.tool_use import ToolKind, ToolUse
from coda_engine.vllm_adapter.compat import TOUCHED_BY_REPLIES, check_replies, installed_version, resolve_target
from coda_engine.vllm_adapter.reclaim.gaps import LearntGaps, SessionGaps
from coda_engine.vllm_adapter.tools.replies import ReplyWatch
from coda_engine.vllm_adapter.tools.reports import MAX_OUTSTANDING, TOOLS_SEEN, TURN_ENDED, TurnReports, watch_replies

BASH = ToolUse("Bash", ToolKind.TEST)


@pytest.fixture
def clock():
    return HandClock()


@pytest.fixture
def gaps(clock):
    return SessionGaps(clock)


def turn(gaps: SessionGaps, clock: HandClock, session: str, name: str, tools=None, seconds: float = 2.0) -> None:
    gaps.arrived(name, session)
    clock.now_s += 1.0
    gaps.started(name)
    clock.now_s += seconds
    gaps.over(name)
    if tools is not None:
        gaps.turn_ended(session, tools)


def test_a_gap_opens_with_the_reply_s_tool_and_closes_with_the_next_request(gaps, clock):
    closed = []
    gaps.closed = lambda tools, gap_s: closed.append((tools, gap_s))
    turn(gaps, clock, "s", "r1", (BASH,))
    clock.now_s += 7.0
    assert gaps.waits_for("s") == ("Bash:test", 7.0)
    idle = gaps.idle("s")
    assert (idle.idle_s, idle.tools, idle.reasoning_s) == (7.0, (BASH,), 2.0)
    gaps.arrived("r2", "s", ready_age_s=3.0)
    assert (gaps.waits_for("s"), gaps.idle("s"), gaps.is_active("s")) == (None, None, True)
    assert closed == [((BASH,), 4.0)]
    gaps.over("r2")
    assert gaps.idle("s").tools is None
    assert [(cycle.reasoning_s, cycle.acting_s) for cycle in gaps.idle("s").cycles] == [(2.0, 4.0)]


def test_what_a_reply_called_may_be_told_before_its_request_is_over(gaps, clock):
    gaps.arrived("r1", "s")
    gaps.turn_ended("s", (BASH,))
    assert gaps.waits_for("s") is None
    gaps.over("r1")
    clock.now_s += 1.0
    assert gaps.waits_for("s") == ("Bash:test", 1.0)


def test_a_final_answer_beside_a_tool_call_does_not_hide_it(gaps, clock):
    gaps.arrived("title", "s")
    turn(gaps, clock, "s", "r1", (BASH,))
    assert gaps.idle("s") is None
    gaps.turn_ended("s", ())
    gaps.over("title")
    assert gaps.idle("s").tools == (BASH,)


def test_a_session_with_several_requests_is_active_until_the_last_is_over(gaps, clock):
    gaps.arrived("r1", "s")
    gaps.arrived("r2", "s")
    gaps.over("r1")
    assert gaps.is_active("s")
    gaps.over("r2")
    gaps.over("r2")
    assert not gaps.is_active("s")
    assert gaps.idle("s").idle_s == 0.0


def test_what_is_told_of_an_unknown_session_opens_a_gap_now(gaps, clock):
    gaps.turn_ended("after a restart", (BASH,))
    clock.now_s += 5.0
    assert gaps.waits_for("after a restart") == ("Bash:test", 5.0)
    gaps.turn_ended("", (BASH,))
    gaps.arrived("r", "")
    assert len(gaps) == 1


def test_the_table_is_bounded_and_keeps_sessions_with_requests(clock):
    gaps = SessionGaps(clock, max_sessions=10)
    gaps.arrived("live", "old and live")
    for number in range(50):
        turn(gaps, clock, f"s{number}", f"r{number}", (BASH,))
    assert len(gaps) == 10
    assert gaps.is_active("old and live")
    assert gaps.idle("s0") is None
    assert gaps.waits_for("s49") is not None
    assert list(gaps._live) == ["live"]


def test_learnt_gaps_are_by_tool_bounded_and_only_of_single_calls():
    learnt = LearntGaps()
    prior_s = TOOL_PRIOR[ToolKind.TEST].mean_rest_s(0.0)
    learnt.learn((BASH, BASH), 5.0)
    learnt.learn((), 5.0)
    assert len(learnt) == 0
    for _ in range(64):
        learnt.learn((BASH,), 2.0)
    assert learnt.mean_rest_s(BASH, 0.0) < prior_s / 2
    assert learnt.mean_rest_s(ToolUse("Bash", ToolKind.BUILD), 0.0) == TOOL_PRIOR[ToolKind.BUILD].mean_rest_s(0.0)
    for number in range(1_000):
        learnt.learn((ToolUse(f"tool{number}"),), 1.0)
    assert len(learnt) == 256


# What EngineCore believes -----------------------------------------------------------------------------------


def test_a_turn_s_end_is_believed_only_with_the_cluster_s_signature(vllm_config, tmp_path):
    (tmp_path / "secret").write_text("s3cret")
    runtime = attach(new_scheduler(vllm_config, 41), {"CODA_CLUSTER_SECRET_FILE": str(tmp_path / "secret")})
    signed = pack(Identity("alice", "s1"), b"s3cret")
    runtime.turn_ended(pack(Identity("alice", "s2"), b"guessed"), [["Bash", "test"]])
    runtime.turn_ended("s3", [["Bash", "test"]])
    runtime.turn_ended(signed, [["Bash", "test"]])
    assert len(runtime.reclaim.gaps) == 1
    assert runtime.reclaim.gaps.waits_for(session_key("alice", "s1"))[0] == "Bash:test"


def test_nonsense_from_another_process_closes_reclaim_and_nothing_else(vllm_config):
    runtime = attach(new_scheduler(vllm_config, 41))
    runtime.turn_ended("s", [["too", "many", "words"]])
    capabilities = runtime.capabilities.snapshot()
    assert capabilities[Feature.RECLAIM].reason is Reason.INTERNAL_ERROR
    assert capabilities[Feature.LIVE_SETTINGS].enabled


# Replies, parsed by vLLM's own parsers ------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "Bash", "parameters": {"type": "object"}}}]
REPLY = (
    'I will test.\n<tool_call>\n{"name": "Bash", "arguments": {"command": "cd /a && pytest -q"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "Read", "arguments": {"path": "a.py"}}\n</tool_call>'
)


@pytest.fixture(scope="module")
def tokenizer(model_folder):
    return get_tokenizer(str(model_folder))


class Serving:
    """What a serving object has that replies are seen by; its parser is vLLM's."""

    def __init__(self, tokenizer) -> None:
        self.parser_cls = ParserManager.get_parser(tool_parser_name="hermes", enable_auto_tools=True)
        self._tokenizer = tokenizer

    def _get_session_id(self, request, raw_request):
        return raw_request

    def _make_parser(self, request, tokenizer, chat_template_kwargs):
        return self.parser_cls(tokenizer, request.tools)


@pytest.fixture
def watched(tokenizer):
    told = []
    serving = Serving(tokenizer)
    assert ReplyWatch(lambda session, uses: told.append((session, list(uses)))).install(serving)
    return serving, told


def chat(**fields) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="m", messages=[{"role": "user", "content": "Test it."}], **fields)


def parse(serving, tokenizer, request, text: str, session: str | None = "s1"):
    """Return the reply as chat's full generator has it parsed."""
    parser = serving._make_parser(request, tokenizer, None)
    serving._get_session_id(request, session)
    return parser.parse(text, request, enable_auto_tools=True)


def stream(serving, tokenizer, request, text: str, session: str | None = "s1"):
    """Return the deltas as chat's stream generator has them parsed, token by token."""
    parser = serving._make_parser(request, tokenizer, None)
    serving._get_session_id(request, session)
    numbers = tokenizer.encode(text, add_special_tokens=False)
    pieces, so_far = [], ""
    for count in range(1, len(numbers) + 1):
        decoded = tokenizer.decode(numbers[:count])
        pieces.append((decoded[len(so_far) :], numbers[count - 1]))
        so_far = decoded
    deltas = []
    for position, (piece, number) in enumerate(pieces):
        last = position == len(pieces) - 1
        deltas.append(
            parser.parse_delta(
                delta_text=piece, delta_token_ids=[number], request=request, prompt_token_ids=[1], finished=last
            )
        )
    return deltas


@pytest.mark.parametrize("reply", [parse, stream])
def test_a_reply_s_calls_are_told_with_the_class_of_their_command(watched, tokenizer, reply):
    serving, told = watched
    reply(serving, tokenizer, chat(tools=TOOLS), REPLY)
    assert told == [("s1", [ToolUse("Bash", ToolKind.TEST), ToolUse("Read", ToolKind.READ)])]


@pytest.mark.parametrize("reply", [parse, stream])
def test_a_final_answer_is_told_as_such(watched, tokenizer, reply):
    serving, told = watched
    reply(serving, tokenizer, chat(tools=TOOLS), "All tests pass.")
    assert told == [("s1", [])]


@pytest.mark.parametrize("reply", [parse, stream])
def test_replies_without_a_session_or_without_tools_to_call_say_nothing(watched, tokenizer, reply):
    serving, told = watched
    reply(serving, tokenizer, chat(tools=TOOLS), "All tests pass.", session=None)
    reply(serving, tokenizer, chat(), "All tests pass.")
    assert told == []


def test_replies_are_what_they_are_without_a_watch(watched, tokenizer):
    serving, _ = watched
    request = chat(tools=TOOLS)
    plain = parse(Serving(tokenizer), tokenizer, request, REPLY)
    seen = parse(serving, tokenizer, request, REPLY)
    assert [(call.name, call.arguments) for call in seen[2]] == [(call.name, call.arguments) for call in plain[2]]
    assert seen[:2] == plain[:2]


def test_an_error_in_what_is_told_does_not_reach_the_reply(tokenizer, caplog):
    def fail(session, uses):
        raise RuntimeError("nobody listens")

    serving = Serving(tokenizer)
    ReplyWatch(fail).install(serving)
    for _ in range(2):
        assert parse(serving, tokenizer, chat(tools=TOOLS), REPLY)[2]


def test_sessions_of_requests_go_with_their_requests(tokenizer):
    watch = ReplyWatch(lambda session, uses: None)
    serving = Serving(tokenizer)
    watch.install(serving)
    requests = [chat(tools=TOOLS), ResponsesRequest(model="m", input="Test it.")]
    for request in requests:
        serving._get_session_id(request, "s")
    assert len(watch._sessions._entries) == 2
    requests.clear()
    del request
    gc.collect()
    assert watch._sessions._entries == {}


# Reports to EngineCore ----------------------------------------------------------------------------------------


async def test_reports_do_not_wait_for_the_engine_and_are_bounded():
    step_ends, calls = asyncio.Event(), []

    async def call(*arguments):
        calls.append(arguments)
        await step_ends.wait()

    reports = TurnReports(call)
    for _ in range(MAX_OUTSTANDING + 3):
        reports("s1", [BASH])
    assert reports.dropped == 3
    await asyncio.sleep(0)
    assert calls == [(TURN_ENDED, "s1", [["Bash", "test"]])] * MAX_OUTSTANDING
    json.dumps(calls)
    step_ends.set()
    while reports._outstanding:
        await asyncio.sleep(0)
    reports("s1", [])
    await asyncio.sleep(0)
    assert calls[-1] == (TURN_ENDED, "s1", [])


async def told_of(state, gate) -> list:
    calls = []

    async def call(*arguments):
        calls.append(arguments)

    await watch_replies(state, call, gate)
    return calls


async def test_the_engine_is_told_whether_tools_are_seen(tokenizer):
    gate = check_replies(installed_version())
    ((name, problem),) = await told_of(SimpleNamespace(openai_serving_chat=Serving(tokenizer)), gate)
    assert (name, problem) == (TOOLS_SEEN, "")
    without = Serving(tokenizer)
    without.parser_cls = None
    ((_, problem),) = await told_of(SimpleNamespace(openai_serving_chat=without), gate)
    assert "--tool-call-parser" in problem
    ((_, problem),) = await told_of(SimpleNamespace(openai_serving_chat=Serving(tokenizer)), check_replies("0.33.0"))
    assert "0.33.0" in problem


def test_the_gate_of_replies_is_open_here_and_closed_for_changed_sources():
    assert check_replies(installed_version()).open

    def resolve(target: str) -> object:
        return resolve_target("json:dumps") if target == TOUCHED_BY_REPLIES[0] else resolve_target(target)

    gate = check_replies(installed_version(), resolve)
    assert (gate.open, gate.reason) == (False, Reason.CHANGED_VLLM_INTERNALS)
    assert "_get_session_id has changed" in gate.detail
