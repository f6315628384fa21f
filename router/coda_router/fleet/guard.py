"""Takes from a worker what it holds without moving on, and lets an ejected one back in once it answers again."""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec

from coda_router.errors import WorkerLostError
from coda_router.faults import EngineFault
from coda_router.fleet.worker import Worker

SILENCE_LIMIT_S = 120.0
"""Silence of a request's engine after which the engine counts as hung, if its snapshots do not change either.

An engine changes its snapshot with every step, and no step takes that long."""

PROBE_TIMEOUT_S = 30.0
"""Longest time for the answer to a probe."""

_LONGEST_INTERVAL_S = 1.0
_LOOKS_PER_LIMIT = 4

_log = logging.getLogger("coda.router.fleet")


class Guard:
    """Watches one worker's requests and its ejection until cancelled.

    Args:
        worker: Whom to watch.
        silence_limit_s: Silence after which a request is taken from an engine that does not move on, seconds.
        on_change: Called when the worker's fitness changed.
    """

    def __init__(self, worker: Worker, silence_limit_s: float, on_change: Callable[[], None]) -> None:
        self._worker = worker
        self._silence_limit_s = silence_limit_s
        self._on_change = on_change
        self._interval_s = min(_LONGEST_INTERVAL_S, silence_limit_s / _LOOKS_PER_LIMIT)
        self._watched_s = 0.0
        self._looked_at_s = asyncio.get_running_loop().time()
        self._progress = (worker.progress_at_s, self._watched_s)
        self._waiting_since_s: dict[asyncio.Future[None], float] = {}

    async def run(self) -> None:
        """Watch for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch_silence())
            tasks.create_task(self._watch_ejection())

    async def _watch_silence(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval_s)
            self._look(loop.time())

    def _look(self, now_s: float) -> None:
        """End the requests that have waited too long for an engine that has not moved on for as long.

        A connection waits anew after whatever it received, so the same wait means silence. One that waits for a
        slow client is no matter of the engine and does not wait here. Time in which the router itself stood still
        counts as two looks at most: what was sent meanwhile is read before the next one.
        """
        self._watched_s += min(now_s - self._looked_at_s, 2 * self._interval_s)
        self._looked_at_s = now_s
        if self._worker.progress_at_s != self._progress[0]:
            self._progress = (self._worker.progress_at_s, self._watched_s)
        waiting = {
            waiter: connection
            for connection in list(self._worker.pool.connections)
            if (waiter := connection.waiter) is not None
        }
        self._waiting_since_s = {waiter: self._waiting_since_s.get(waiter, self._watched_s) for waiter in waiting}
        too_long_ago_s = self._watched_s - self._silence_limit_s
        if self._progress[1] > too_long_ago_s:
            return
        overdue = [waiter for waiter, since_s in self._waiting_since_s.items() if since_s <= too_long_ago_s]
        if not overdue:
            return
        if self._worker.mark_hung(now_s):
            _log.warning("worker %s hangs: no step and no byte for %g s", self._worker.name, self._silence_limit_s)
        for waiter in overdue:
            waiting[waiter].lose(EngineFault.SILENT, f"the worker was silent for {self._silence_limit_s:g} s")
        self._on_change()

    async def _watch_ejection(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(self._interval_s)
            if not self._worker.ejection.is_probe_due(loop.time()):
                continue
            if not await self._answers():
                self._worker.ejection.probe_failed(loop.time())
            elif self._worker.ejection.is_ejected:
                self._worker.readmit(loop.time())
                _log.info("worker %s is let back in: it answers", self._worker.name)
                self._on_change()

    async def _answers(self) -> bool:
        """Return whether the worker answers what a client might ask, on a connection made as for a client.

        One token has to come through its engine. What does not generate refuses that (status 4xx): then the
        refusal has to do.
        """
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                connection = await self._worker.pool.connect()
                try:
                    connection.send(*self._probe())
                    return (await connection.head()).status < 500
                finally:
                    connection.abort()
        except (WorkerLostError, TimeoutError) as error:
            _log.debug("worker %s: probe: %r", self._worker.name, error)
            return False

    def _probe(self) -> tuple[bytes, bytes]:
        """Return head and body of the probe."""
        model = min(self._worker.models, default=None)
        line_tail = self._worker.request_line_tail
        if model is None:
            return b"GET /health" + line_tail + b"\r\n", b""
        question: dict[str, Any] = {"model": model, "prompt": "1", "max_tokens": 1}
        body = msgspec.json.encode(question)
        head = b"POST /v1/completions%bcontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        return head % (line_tail, len(body)), body
