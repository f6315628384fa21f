"""Sessions played against a small server that answers like an engine: causality, records, failures."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import aiohttp
import pytest
from aiohttp import web

from coda_bench.engine.calibration import overload_arrivals_s, session_cost
from coda_bench.engine.first_token import ask
from coda_bench.engine.records import RequestRecord
from coda_bench.engine.replay import ReplayError, Target, Trace, play_to_the_end, play_until
from coda_bench.engine.router_process import running_router
from coda_bench.ports import free_ports
from coda_bench.workload.agents import Provider
from coda_bench.workload.content import new_text
from coda_bench.workload.sessions import Round, Session
from coda_engine.contract.settings import PlacementPolicyName, PlacementSettings, Settings

SESSION = Session(
    index=3,
    provider=Provider.CODEX,
    shared_tokens=16,
    rounds=(Round(0.0, None, 40, 3), Round(0.06, "Bash", 9, 4), Round(0.08, None, 12, 2)),
)
OTHER = Session(index=4, provider=Provider.CODEX, shared_tokens=16, rounds=(Round(0.0, None, 30, 5),))


@dataclass
class Engine:
    """A server that generates token ids 7, 8, 9, ... and remembers what it was asked."""

    token_s: float = 0.002
    answers_status: int = 200
    cut_short: bool = False
    seen: list[dict[str, object]] = field(default_factory=list)
    told: list[dict[str, object]] = field(default_factory=list)
    finished: int = 0
    aborted: int = 0

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        entry = {"at_s": time.perf_counter(), "session": request.headers["X-Session-ID"], **body}
        self.seen.append(entry)
        if self.answers_status != 200:
            return web.Response(status=self.answers_status, text="no such model")
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        try:
            for number in range(body["max_tokens"] - self.cut_short):
                await asyncio.sleep(self.token_s)
                await self._send(reply, {"choices": [{"text": "", "token_ids": [7 + number]}]})
            usage = {"prompt_tokens_details": {"cached_tokens": 32}}
            await self._send(reply, {"choices": [], "usage": usage})
            await reply.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        entry["finished_s"] = time.perf_counter()
        self.finished += 1
        return reply

    async def turns(self, request: web.Request) -> web.Response:
        self.told.append(await request.json())
        return web.json_response({})

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _send(self, reply: web.StreamResponse, chunk: dict[str, object]) -> None:
        await reply.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")


@asynccontextmanager
async def served(engine: Engine) -> AsyncIterator[Target]:
    application = web.Application()
    application.router.add_post("/v1/completions", engine.completions)
    application.router.add_get("/v1/models", engine.models)
    application.router.add_post("/coda/turns", engine.turns)
    application.router.add_get("/health", engine.health)
    runner = web.AppRunner(application, handler_cancellation=True)
    await runner.setup()
    (port,) = free_ports(1)
    await web.TCPSite(runner, "127.0.0.1", port).start()
    try:
        yield Target(f"http://127.0.0.1:{port}", "m")
    finally:
        await runner.cleanup()


async def test_a_round_is_sent_when_the_reply_has_finished_and_its_gap_is_over():
    engine = Engine()
    async with served(engine) as target:
        await play_to_the_end(target, Trace([SESSION], [0.0], seed=1), limit_s=20)
    first, second, third = engine.seen
    assert second["at_s"] - first["finished_s"] >= 0.059
    assert third["at_s"] - second["finished_s"] >= 0.079


async def test_a_prompt_is_the_whole_history_with_the_replies_that_really_came():
    engine = Engine()
    async with served(engine) as target:
        await play_to_the_end(target, Trace([SESSION], [0.0], seed=1), limit_s=20)
    first, second, third = engine.seen
    texts = [new_text(SESSION, number, seed=1) for number in range(3)]
    assert first["prompt"] == texts[0]
    assert second["prompt"] == texts[0] + [7, 8, 9] + texts[1]
    assert third["prompt"] == second["prompt"] + [7, 8, 9, 10] + texts[2]
    assert [len(seen["prompt"]) for seen in engine.seen] == SESSION.prompt_tokens
    assert {seen["session"] for seen in engine.seen} == {"bench-1-3"}
    assert all(seen["ignore_eos"] and seen["stream"] for seen in engine.seen)


async def test_records_hold_what_the_client_saw():
    async with served(Engine()) as target:
        records, _ = await play_to_the_end(target, Trace([SESSION, OTHER], [0.0, 0.03], seed=1), limit_s=20)
    by_round = {(record.session, record.round): record for record in records}
    assert set(by_round) == {(3, 0), (3, 1), (3, 2), (4, 0)}
    assert all(record.finished and record.cached_tokens == 32 for record in records)
    assert by_round[3, 1].prompt_tokens == 40 + 3 + 9
    assert by_round[3, 1].new_tokens == 9
    assert by_round[4, 0].sent_s >= 0.03
    assert list(by_round[4, 0].token_s) == sorted(by_round[4, 0].token_s)


async def test_the_end_of_a_window_aborts_what_is_going_on_and_keeps_its_record():
    engine = Engine(token_s=0.4)
    async with served(engine) as target:
        records = await play_until(target, Trace([SESSION, OTHER], [0.0, 5.0], seed=1), end_s=0.6)
        async with asyncio.timeout(10):
            while engine.aborted == 0:
                await asyncio.sleep(0.01)
    (record,) = records
    assert len(record.token_s) == 1
    assert not record.finished
    assert engine.finished == 0


async def test_an_engine_is_told_which_tool_a_session_waits_for():
    engine = Engine()
    async with served(engine) as target:
        await play_to_the_end(replace(target, tells_turns=True), Trace([SESSION], [0.0], seed=1), limit_s=20)
    assert [turn["session_id"] for turn in engine.told] == ["bench-1-3"] * 3
    assert [[tool["name"] for tool in turn["tools"]] for turn in engine.told] == [["Bash"], [], []]
    assert {seen["session"] for seen in engine.seen} == {"bench-1-3"}


async def test_an_engine_is_told_nothing_unless_asked_for():
    engine = Engine()
    async with served(engine) as target:
        await play_to_the_end(target, Trace([SESSION], [0.0], seed=1), limit_s=20)
    assert engine.told == []


async def test_nobody_arriving_is_a_run_without_records():
    async with served(Engine()) as target:
        assert await play_until(target, Trace([SESSION], [9.0], seed=1), end_s=0.05) == []


async def test_a_refused_request_ends_the_run_with_the_engines_words():
    async with served(Engine(answers_status=404)) as target:
        with pytest.raises(ReplayError, match="404: no such model"):
            await play_until(target, Trace([SESSION], [0.0], seed=1), end_s=5)


async def test_a_reply_that_is_too_short_ends_the_run():
    async with served(Engine(cut_short=True)) as target:
        with pytest.raises(ReplayError, match="2 tokens came instead of 3"):
            await play_until(target, Trace([SESSION], [0.0], seed=1), end_s=5)


async def test_an_engine_that_is_not_there_ends_the_run():
    (port,) = free_ports(1)
    with pytest.raises(ReplayError, match="a request failed"):
        await play_until(Target(f"http://127.0.0.1:{port}", "m"), Trace([SESSION], [0.0], seed=1), end_s=5)


async def test_a_fleets_sessions_reach_the_engines_through_a_real_router():
    one, other = Engine(), Engine()
    settings = Settings(placement=PlacementSettings(policy=PlacementPolicyName.ROUND_ROBIN))
    async with served(one) as first, served(other) as second:
        async with running_router(settings, [first.url, second.url]) as url:
            sessions = [replace(SESSION, index=number) for number in range(6)]
            records, _ = await play_to_the_end(Target(url, "m"), Trace(sessions, [0.0] * 6, seed=1), limit_s=30)
    assert len(records) == 18
    assert all(record.finished and record.cached_tokens == 32 for record in records)
    assert len(one.seen) == len(other.seen) == 9


async def test_a_single_request_tells_its_first_token_and_what_was_reused():
    async with served(Engine(token_s=0.01)) as target, aiohttp.ClientSession(target.url) as client:
        client.headers["X-Session-ID"] = "one"
        answer = await ask(client, "m", [1, 2, 3], output_tokens=3)
    assert answer.token_ids == (7, 8, 9)
    assert answer.cached_tokens == 32
    assert answer.ms >= 9


def test_a_sessions_cost_is_taken_apart_into_prefill_and_the_rest():
    population = [SESSION, OTHER]
    records = [
        RequestRecord(0, 0, 100, 100, 2, sent_s=1.0, token_s=(12.0, 13.0), cached_tokens=0),
        RequestRecord(1, 0, 300, 100, 8, sent_s=2.0, token_s=tuple(14.0 + n / 10 for n in range(8)), cached_tokens=100),
    ]
    cost = session_cost(records, population, prefill_s_per_token=0.01, start_s=10.0, end_s=20.0)
    # 200 new tokens were wanted and 300 computed: 3 s of prefill, the other 7 s made 10 tokens.
    assert cost.prefill_s == pytest.approx((61 + 30) / 2 * 1.5 * 0.01)
    assert cost.decode_s == pytest.approx((9 + 5) / 2 * 0.7)
    assert cost.sessions_per_s == pytest.approx(1 / (cost.prefill_s + cost.decode_s))


def test_no_capacity_is_told_from_a_run_without_output():
    with pytest.raises(ValueError, match="--capacity"):
        session_cost([], [SESSION], 0.01, 10.0, 20.0)


def test_calibration_meets_a_queue_at_once_which_then_grows_by_the_cases_overload():
    arrivals = overload_arrivals_s(guessed_per_s=0.3)
    assert arrivals == sorted(arrivals)
    assert sum(at_s < 15 for at_s in arrivals) >= 16
    later = [at_s for at_s in arrivals if at_s >= 30]
    assert len(later) / 100 == pytest.approx(1.35 * 0.3, rel=0.4)
