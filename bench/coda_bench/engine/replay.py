"""Sessions played against an engine: causal, so a session's next request waits for its reply and its gap."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

from coda_bench.engine.records import RequestRecord
from coda_bench.workload.content import new_text
from coda_bench.workload.sessions import Session
from coda_engine.contract.identity import SESSION_HEADER
from coda_engine.contract.interface import TURNS_PATH
from coda_engine.contract.turns import CalledTool, TurnEnd

REQUEST_LIMIT_S = 600.0
"""Longest time that one request may take; longer than any phase, so that it ends hangs and nothing else."""

_CLOSING_LIMIT_S = 20.0


class ReplayError(RuntimeError):
    """A request failed: what was measured is not the workload."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        url: Base URL of an engine or router.
        model: Name to ask for.
        tells_turns: Whether the engine is told what each reply called: prompts are token ids here, so that it
            cannot read it from the reply as it does for agents.
    """

    url: str
    model: str
    tells_turns: bool = False


@dataclass(frozen=True, slots=True)
class Trace:
    """Sessions with the time at which each begins.

    Attributes:
        sessions: The sessions.
        arrivals_s: Seconds from the run's start, one for each.
        seed: With which the sessions were generated; their text is its too.
    """

    sessions: Sequence[Session]
    arrivals_s: Sequence[float]
    seed: int

    @property
    def requests(self) -> int:
        """Requests of all sessions."""
        return sum(len(session.rounds) for session in self.sessions)


@dataclass(slots=True)
class _Request:
    session: int
    round: int
    prompt_tokens: int
    new_tokens: int
    wanted_tokens: int
    sent_s: float
    token_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    cached_tokens: int | None = None

    def record(self) -> RequestRecord:
        return RequestRecord(
            self.session,
            self.round,
            self.prompt_tokens,
            self.new_tokens,
            self.wanted_tokens,
            self.sent_s,
            tuple(self.token_s),
            self.cached_tokens,
        )


async def play_until(target: Target, trace: Trace, end_s: float) -> list[RequestRecord]:
    """Play ``trace`` for ``end_s`` seconds, abort what is still going on, and return every request sent.

    Raises:
        ReplayError: A request failed.
    """
    return await _play(target, trace, end_s)


async def play_to_the_end(target: Target, trace: Trace, limit_s: float) -> tuple[list[RequestRecord], float]:
    """Play ``trace`` until every reply is there, at most ``limit_s``, and return the records and the time it took.

    Raises:
        ReplayError: A request failed.
    """
    started_s = time.perf_counter()
    records = await _play(target, trace, limit_s)
    return records, time.perf_counter() - started_s


async def _play(target: Target, trace: Trace, limit_s: float) -> list[RequestRecord]:
    sent: list[_Request] = []
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        target.url, connector=connector, timeout=aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    ) as client:
        player = _Player(client, target, trace, time.perf_counter(), sent)
        tasks = [
            asyncio.create_task(player.play(session, at_s))
            for session, at_s in zip(trace.sessions, trace.arrivals_s, strict=True)
            if at_s < limit_s
        ]
        try:
            for task in await _ended(tasks, limit_s):
                if (error := task.exception()) is not None:
                    raise ReplayError(f"a request failed: {error or type(error).__name__}") from error
        finally:
            for task in tasks:
                task.cancel()
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), _CLOSING_LIMIT_S)
    return [request.record() for request in sent]


async def _ended(tasks: Sequence[asyncio.Task[None]], limit_s: float) -> set[asyncio.Task[None]]:
    """Return the sessions that have ended, after the limit, or as soon as all have or one has failed."""
    if not tasks:
        await asyncio.sleep(limit_s)
        return set()
    done, _ = await asyncio.wait(tasks, timeout=limit_s, return_when=asyncio.FIRST_EXCEPTION)
    return done


@dataclass(frozen=True, slots=True)
class _Player:
    client: aiohttp.ClientSession
    target: Target
    trace: Trace
    started_s: float
    sent: list[_Request]

    async def play(self, session: Session, at_s: float) -> None:
        """Play one session: each prompt is the whole history plus the round's new text."""
        await asyncio.sleep(max(0.0, at_s - self._now_s()))
        history: list[int] = []
        for number, round_ in enumerate(session.rounds):
            if number > 0:
                await asyncio.gather(asyncio.sleep(round_.gap_s), self._tell(session, round_.tool))
            history += new_text(session, number, self.trace.seed)
            request = _Request(
                session.index, number, len(history), round_.new_tokens, round_.output_tokens, self._now_s()
            )
            self.sent.append(request)
            await self._ask(session, history, request)
            history += request.token_ids
        await self._tell(session, None)

    async def _tell(self, session: Session, tool: str | None) -> None:
        """Tell the engine that the session's turn has ended, and which tool it waits for; None: for a human."""
        if not self.target.tells_turns:
            return
        turn = TurnEnd(session_id=self._name(session), tools=[CalledTool(name=tool)] if tool else [])
        async with self.client.post(TURNS_PATH, data=turn.to_json()) as reply:
            if reply.status != 200:
                raise ReplayError(f"POST {TURNS_PATH} answered {reply.status}")

    def _name(self, session: Session) -> str:
        return f"bench-{self.trace.seed}-{session.index}"

    async def _ask(self, session: Session, prompt: Sequence[int], request: _Request) -> None:
        body = {
            "model": self.target.model,
            "prompt": list(prompt),
            "max_tokens": request.wanted_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        headers = {SESSION_HEADER: self._name(session)}
        async with self.client.post("/v1/completions", json=body, headers=headers) as reply:
            if reply.status != 200:
                raise ReplayError(f"{reply.status}: {(await reply.text())[:300]}")
            async for line in reply.content:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line[6:]), request)
        if len(request.token_ids) != request.wanted_tokens:
            raise ReplayError(f"{len(request.token_ids)} tokens came instead of {request.wanted_tokens}")

    def _take(self, chunk: Mapping[str, object], request: _Request) -> None:
        if "error" in chunk:
            raise ReplayError(str(chunk["error"])[:300])
        choices, usage = chunk.get("choices"), chunk.get("usage")
        if isinstance(choices, list):
            for choice in choices:
                token_ids = choice.get("token_ids") or []
                request.token_ids += token_ids
                request.token_s += [self._now_s()] * len(token_ids)
        if isinstance(usage, dict):
            details = usage.get("prompt_tokens_details") or {}
            request.cached_tokens = int(details.get("cached_tokens") or 0)

    def _now_s(self) -> float:
        return time.perf_counter() - self.started_s
