"""Small calls beside a conversation: they go their own way and leave the conversation as it was."""

from typing import Any

import pytest
from router_harness import SECRET, RunningRouter, running_router
from scripted_worker import running_worker

from coda_engine.contract.identity import unpack
from coda_engine.contract.snapshot import session_key
from coda_router.auxiliary import AuxiliaryCalls
from coda_router.sessions import Home

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "x" * 4_000}}]


def home(context_tokens: int, has_tools: bool = True) -> Home:
    return Home("a", "incarnation", 0.0, context_tokens, has_tools)


@pytest.mark.parametrize(
    ("known", "has_tools", "context_tokens", "expected"),
    [
        (home(8_000), False, 600, True),
        (home(8_000), False, 2_000, False),
        (home(8_000), True, 600, False),
        (home(8_000, has_tools=False), False, 600, False),
        (None, False, 600, False),
    ],
    ids=["title", "summary of it all", "after a compaction", "agent without tools", "first call"],
)
def test_a_call_is_auxiliary_that_has_no_tools_and_little_text_beside_a_conversation_with_tools_and_more(
    known: Home | None, has_tools: bool, context_tokens: int, expected: bool
):
    assert AuxiliaryCalls().covers(known, has_tools=has_tools, context_tokens=context_tokens) is expected


async def say(router: RunningRouter, text: str, path: str = "/v1/chat/completions", **body: Any) -> None:
    sent = {"model": "small", "messages": [{"role": "user", "content": text}]} | body
    async with router.session.post(f"{router.url}{path}", json=sent, headers={"x-session-id": "s"}) as reply:
        assert reply.status == 200
        await reply.read()


async def test_a_title_call_leaves_the_conversation_its_home_and_its_context():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        await say(router, "a task", tools=TOOLS)
        sessions, key = router.router.dispatcher.sessions, session_key("", "s")
        before = sessions.get(key, 0)
        await say(router, "name this conversation")
        assert sessions.get(key, 0) == before
        await say(router, "a task, next round", tools=TOOLS)
        decisions = await router.decisions()
        identities = [unpack(request.headers["x-session-id"], SECRET) for w in (a, b) for request in w.requests]
    assert before is not None
    assert decisions[0]["worker"] == decisions[2]["worker"] == before.worker
    assert [d["session_source"] for d in decisions] == ["SessionHeader", "Auxiliary", "SessionHeader"]
    assert decisions[1]["session"] != key
    assert sorted((i.session, i.parent) for i in identities) == [("s", ""), ("s", ""), ("s/auxiliary", "s")]


async def test_a_title_call_that_comes_first_is_the_conversation_until_that_begins():
    async with running_worker() as a, running_worker() as b, running_router(a, b) as router:
        await say(router, "name this conversation")
        await say(router, "a task", tools=TOOLS)
        await say(router, "name it again")
        sources = [d["session_source"] for d in await router.decisions()]
    assert sources == ["SessionHeader", "SessionHeader", "Auxiliary"]


async def test_counting_tokens_is_no_auxiliary_call():
    async with running_worker() as worker, running_router(worker) as router:
        await say(router, "a task", tools=TOOLS)
        await say(router, "few", path="/v1/messages/count_tokens")
        sources = [d["session_source"] for d in await router.decisions()]
    assert sources == ["SessionHeader", "SessionHeader"]
