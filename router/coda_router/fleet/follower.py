"""Follows one worker: its snapshot stream, its session table, and its health where the stream is silent."""

import asyncio
import json
import logging
from collections.abc import Callable
from enum import StrEnum
from http import HTTPStatus

import aiohttp

from coda_engine.contract.errors import DocumentError
from coda_engine.contract.interface import SESSIONS_PATH, SNAPSHOT_PATH
from coda_engine.contract.snapshot import EngineSnapshot, SessionDelta
from coda_router.fleet.worker import TELEMETRY_TIMEOUT_S, Worker

PROBE_INTERVAL_S = 0.5
"""Time between health probes of a worker without a snapshot stream."""

PROBE_TIMEOUT_S = 2.0
"""Longest time for one health probe's answer."""

RESIDENCY_INTERVAL_S = 1.0
"""Time between two requests for session-table changes."""

MODELS_INTERVAL_S = 10.0
"""Time between two requests for the model list of a worker that publishes no snapshots."""

MAX_ANSWER_BYTES = 64 * 1024 * 1024
"""Most bytes read of a worker's session table or model list; a table of 100,000 sessions has about a third of it."""

CODA_RETRY_INTERVAL_S = 10.0
"""Time after which a worker that had no Coda endpoints is asked for them again."""

_log = logging.getLogger("coda.router.fleet")


class StreamEnd(StrEnum):
    """Why a snapshot stream is not read any more."""

    NOT_CODA = "NotCoda"
    TOKEN_REFUSED = "TokenRefused"  # noqa: S105 - a reason, not a secret
    UNREADABLE = "Unreadable"
    SILENT = "Silent"
    CLOSED = "Closed"


_NOTHING_TO_OFFER = frozenset({StreamEnd.NOT_CODA, StreamEnd.TOKEN_REFUSED, StreamEnd.UNREADABLE})


class Follower:
    """Keeps one :class:`Worker` up to date until cancelled.

    Args:
        worker: Whom to follow and where to write.
        session: HTTP client, with the internal token in its headers.
        on_change: Called after every snapshot or change of health.
        on_evicted: Called with the worker and the hashes of the keys of sessions of which it has nothing left.
    """

    def __init__(
        self,
        worker: Worker,
        session: aiohttp.ClientSession,
        on_change: Callable[[], None],
        on_evicted: Callable[[Worker, list[int]], None],
    ) -> None:
        self._worker = worker
        self._session = session
        self._on_change = on_change
        self._on_evicted = on_evicted
        self._last_end: StreamEnd | None = None
        self._ask_coda_at_s = float("-inf")
        self._ask_models_at_s = float("-inf")

    async def run(self) -> None:
        """Follow the worker for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow_state())
            tasks.create_task(self._follow_residency())

    async def _follow_state(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if loop.time() >= self._ask_coda_at_s:
                end = await self._read_stream()
                if end is not StreamEnd.CLOSED and end is not StreamEnd.SILENT:
                    self._ask_coda_at_s = loop.time() + CODA_RETRY_INTERVAL_S
                if end is not self._last_end:
                    self._last_end = end
                    _log.warning("worker %s: no snapshots (%s)", self._worker.name, end.value)
            await self._probe()
            await asyncio.sleep(PROBE_INTERVAL_S)

    async def _read_stream(self) -> StreamEnd:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=PROBE_TIMEOUT_S, sock_read=TELEMETRY_TIMEOUT_S)
        loop = asyncio.get_running_loop()
        try:
            async with self._session.get(
                f"{self._worker.address.url}{SNAPSHOT_PATH}", params={"since": "0"}, timeout=timeout
            ) as reply:
                if reply.status in {HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN}:
                    return StreamEnd.TOKEN_REFUSED
                if reply.status != HTTPStatus.OK:
                    return StreamEnd.NOT_CODA if reply.status == HTTPStatus.NOT_FOUND else StreamEnd.UNREADABLE
                async for line in reply.content:
                    snapshot = EngineSnapshot.from_json(line)
                    was_known = self._worker.is_known and self._worker.is_healthy
                    self._worker.take_snapshot(snapshot, loop.time())
                    self._last_end = None
                    if not was_known:
                        _log.info("worker %s is up (instance %s)", self._worker.name, snapshot.instance_id)
                    self._on_change()
        except DocumentError as error:
            _log.warning("worker %s: unreadable snapshot: %s", self._worker.name, error)
            return StreamEnd.UNREADABLE
        except TimeoutError:
            return StreamEnd.SILENT
        except (aiohttp.ClientError, OSError, ValueError, RuntimeError) as error:
            # RuntimeError is how aiohttp's reader says that its connection is closed.
            _log.debug("worker %s: snapshot stream ended: %r", self._worker.name, error)
        return StreamEnd.CLOSED

    async def _probe(self) -> None:
        is_healthy = await self._answers_health()
        if is_healthy and self._last_end in _NOTHING_TO_OFFER:
            # Without snapshots, its answer to the probe is the only sign that the worker moves on.
            self._worker.note_progress(asyncio.get_running_loop().time())
        if is_healthy and (self._worker.snapshot is None or not self._worker.models):
            await self._ask_models()
        if self._worker.set_health(is_healthy):
            _log.log(
                logging.INFO if is_healthy else logging.WARNING,
                "worker %s %s",
                self._worker.name,
                "is up" if is_healthy else "does not answer",
            )
            if not is_healthy:
                # Its next incarnation may be another kind of engine with other models.
                self._ask_coda_at_s = self._ask_models_at_s = float("-inf")
        self._on_change()

    async def _answers_health(self) -> bool:
        try:
            async with self._session.get(
                f"{self._worker.address.url}/health", timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            ) as reply:
                return reply.status == HTTPStatus.OK
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
            return False

    async def _ask_models(self) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < self._ask_models_at_s:
            return
        self._ask_models_at_s = loop.time() + MODELS_INTERVAL_S
        try:
            async with self._session.get(
                f"{self._worker.address.url}/v1/models", timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
            ) as reply:
                document = json.loads(await _whole(reply))
                self._worker.take_models(frozenset(str(model["id"]) for model in document["data"]))
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, TypeError) as error:
            _log.warning("worker %s: its /v1/models cannot be read: %s", self._worker.name, error)

    async def _follow_residency(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(RESIDENCY_INTERVAL_S)
            if not self._worker.has_telemetry(loop.time()):
                continue
            instance_id, version = self._worker.residency_position
            try:
                async with self._session.get(
                    f"{self._worker.address.url}{SESSIONS_PATH}",
                    params={"instance": instance_id, "since": str(version)},
                    timeout=aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S),
                ) as reply:
                    if reply.status != HTTPStatus.OK:
                        continue
                    delta = SessionDelta.from_json(await _whole(reply))
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError):
                continue
            gone = self._worker.take_residency(delta)
            if gone:
                self._on_evicted(self._worker, gone)


async def _whole(reply: aiohttp.ClientResponse) -> bytes:
    """Return the body of a worker's answer.

    Raises:
        ValueError: It is longer than any that makes sense.
    """
    body = bytearray()
    async for chunk in reply.content.iter_any():
        body += chunk
        if len(body) > MAX_ANSWER_BYTES:
            raise ValueError(f"more than {MAX_ANSWER_BYTES} bytes")
    return bytes(body)
