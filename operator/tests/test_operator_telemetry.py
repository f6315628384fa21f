"""What is asked of engines and routers, over real HTTP: slow, cut and endless answers are reports, never errors."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence

import pytest
from aiohttp import web
from operator_builders import pod

import coda_operator.telemetry as telemetry_module
from coda_engine.contract.snapshot import EngineSnapshot
from coda_operator.desired.cluster import ENGINE
from coda_operator.telemetry import EngineReport, Telemetry

SNAPSHOT = EngineSnapshot(instance_id="i", version=1, published_at_s=0.0, started_at_s=0.0, served_models=["small"])


@contextlib.asynccontextmanager
async def answering(pieces: Sequence[bytes], monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in pieces:
            await response.write(piece)
            await asyncio.sleep(0.02)
        return response

    app = web.Application()
    app.router.add_get("/coda/snapshot", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(telemetry_module, "ENGINE_PORT", runner.addresses[0][1])
    try:
        yield
    finally:
        await runner.cleanup()


async def report() -> EngineReport:
    async with Telemetry() as telemetry:
        reports = await telemetry.engines([pod("engine-0", ENGINE, ip="127.0.0.1")], None)
    return reports[0]


async def test_an_answer_that_comes_in_pieces_is_read_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    document = SNAPSHOT.to_json()
    async with answering([document[:100], document[100:200], document[200:]], monkeypatch):
        assert (await report()).snapshot == SNAPSHOT


async def test_an_endless_answer_is_a_problem_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry_module, "_MAX_ANSWER_BYTES", 1000)
    async with answering([b"x" * 600] * 3, monkeypatch):
        found = await report()
    assert found.snapshot is None
    assert "larger than 1000 bytes" in found.problem
