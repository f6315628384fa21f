"""Everything one engine publishes: which page, when, and how often."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from coda_engine.contract.interface import SNAPSHOT_INTERVAL_S
from coda_engine.vllm_adapter.telemetry.page import PageWriter, page_path, remove_pages
from coda_engine.vllm_adapter.telemetry.pages import (
    CONTROL_PAGE,
    DECISIONS_PAGE,
    MEASURES_PAGE,
    SESSIONS_PAGE,
    SNAPSHOT_PAGE,
)
from coda_engine.vllm_adapter.telemetry.publisher import Flusher, Publisher

Encoder = Callable[[int], bytes]

DECISIONS_INTERVAL_S = 0.25
SESSIONS_INTERVAL_S = 1.0
MEASURES_INTERVAL_S = 1.0


class SnapshotSource(Protocol):
    """What the snapshot page shows."""

    def population(self) -> tuple[int, int]:
        """Return running and waiting requests."""
        ...

    def gather(self) -> Encoder:
        """Return the encoder of the state as it is now."""
        ...


class MeasuresSource(Protocol):
    """What the measures page shows."""

    def gather(self) -> Encoder:
        """Return the encoder of the measures as they are now."""
        ...


class SessionSource(Protocol):
    """What the sessions page shows."""

    @property
    def doubtful(self) -> bool:
        """Whether anything changed since the last gathering."""
        ...

    def gather(self) -> Encoder:
        """Return the encoder of the table as it is now."""
        ...


class Board:
    """The engine's pages, written from the engine's thread and, for what came too early, by the flusher.

    Args:
        prefix: Path prefix of the pages, made by the engine's first process.
        snapshot: Source of the snapshot page.
        sessions: Source of the sessions page; None when residency cannot be known.
        measures: Source of the measures page.
        decisions: Encodes the decisions page; None without state admission.
        failed: Told of an error in an encoder, on the thread that publishes.
        owned_here: This process made the pages; otherwise the death of the one that did removes them.
    """

    def __init__(
        self,
        prefix: Path,
        snapshot: SnapshotSource,
        sessions: SessionSource | None,
        measures: MeasuresSource,
        decisions: Callable[[], bytes] | None,
        failed: Callable[[Exception], None],
        *,
        owned_here: bool,
    ) -> None:
        self._source = snapshot
        self._session_source = sessions
        self._measures_source = measures
        self._encode_decisions = decisions
        self._population: tuple[int, int] | None = None

        def publisher(page: str, interval_s: float) -> Publisher:
            return Publisher(PageWriter(page_path(prefix, page)), interval_s, failed)

        self._snapshot = publisher(SNAPSHOT_PAGE, SNAPSHOT_INTERVAL_S)
        self._sessions = publisher(SESSIONS_PAGE, SESSIONS_INTERVAL_S)
        self._measures = publisher(MEASURES_PAGE, MEASURES_INTERVAL_S)
        self._decisions = publisher(DECISIONS_PAGE, DECISIONS_INTERVAL_S)
        self._control = publisher(CONTROL_PAGE, 0.0)
        self._publishers = [self._snapshot, self._sessions, self._measures, self._decisions, self._control]
        self._flusher = Flusher(
            self._publishers,
            None if owned_here else lambda: remove_pages(prefix),
        )

    def open(self, control: bytes) -> None:
        """Publish the first state and begin to flush."""
        self.publish_control(control)
        self.after_update(idle=True)
        self._flusher.start()

    def publish_control(self, control: bytes) -> None:
        """Publish settings and profile in force (they change rarely), and a snapshot with their digests."""
        self._offer(self._control, lambda _version: control)
        self._offer(self._snapshot, self._source.gather())

    def after_schedule(self) -> None:
        """Publish what the step that begins now runs, if it is time or other requests run or wait."""
        population = self._source.population()
        if population != self._population or self._snapshot.due(time.monotonic()):
            self._population = population
            self._offer(self._snapshot, self._source.gather())

    def after_update(self, *, idle: bool) -> None:
        """Publish what the step left; when the engine goes idle, everything, since no step follows."""
        now_s = time.monotonic()
        if idle or self._snapshot.due(now_s):
            self._population = self._source.population()
            self._offer(self._snapshot, self._source.gather())
        sessions = self._session_source
        if sessions is not None and sessions.doubtful and (idle or self._sessions.due(now_s)):
            self._offer(self._sessions, sessions.gather())
        if self._encode_decisions is not None and (idle or self._decisions.due(now_s)):
            document = self._encode_decisions()
            self._offer(self._decisions, lambda _version: document)

        if idle or self._measures.due(now_s):
            self._offer(self._measures, self._measures_source.gather())

    def withdraw(self) -> None:
        """Take back what is published, for good: nothing will renew it, and no reader shall believe it."""
        for publisher in self._publishers:
            publisher.withdraw()

    def close(self) -> None:
        """Publish what is kept and stop the flusher."""
        self._flusher.stop()

    def _offer(self, publisher: Publisher, encode: Encoder) -> None:
        if publisher.offer(encode, time.monotonic()) is not None:
            self._flusher.wake()
