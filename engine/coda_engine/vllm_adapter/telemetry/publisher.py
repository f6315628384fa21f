"""Writes pages at a bounded rate without ever keeping the engine's thread waiting."""

import os
import threading
import time
from collections.abc import Callable

from coda_engine.vllm_adapter.log import logger
from coda_engine.vllm_adapter.telemetry.page import PageWriter

_PARENT_CHECK_S = 1.0


class Publisher:
    """One page's rate limit: at most one publication each ``interval_s``, and the last offer always arrives.

    The engine's thread asks :meth:`due` whether gathering is worth it and offers what it gathered; an offer
    that comes too early is kept and written by the flusher when its time has come. What does not fit the page is
    left out with a warning.

    Args:
        writer: The page.
        interval_s: Shortest time between two publications, seconds.
        failed: Told of any other error, on the thread on which it came up; that offer is lost.
    """

    def __init__(
        self, writer: PageWriter, interval_s: float, failed: Callable[[Exception], None] = lambda error: None
    ) -> None:
        self.interval_s = interval_s
        self._failed = failed
        self._writer = writer
        self._lock = threading.Lock()
        self._pending: Callable[[int], bytes] | None = None
        self._published_at_s = float("-inf")
        self._withdrawn = False

    @property
    def version(self) -> int:
        """Version of the latest publication; 0 before the first."""
        return self._writer.last_version

    def due(self, now_s: float) -> bool:
        """Return whether an offer made now would be published at once (monotonic seconds)."""
        return now_s - self._published_at_s >= self.interval_s

    def offer(self, encode: Callable[[int], bytes], now_s: float) -> float | None:
        """Publish what ``encode`` makes of the next version, now or when due.

        Returns:
            None when published; else the seconds until the flusher should call :meth:`flush`.
        """
        with self._lock:
            self._pending = None if self._withdrawn else encode
        return self.flush(now_s)

    def withdraw(self) -> None:
        """Empty the page and take no more offers."""
        with self._lock:
            self._withdrawn, self._pending = True, None
            self._writer.write(self._writer.last_version + 1, b"")

    def flush(self, now_s: float) -> float | None:
        """Publish a kept offer if it is due; return the seconds until it is, None when nothing is kept."""
        with self._lock:
            if self._pending is None:
                return None
            if not self.due(now_s):
                return self._published_at_s + self.interval_s - now_s
            error = self._publish(self._pending, now_s)
        if error is not None:
            # Outside the lock: whoever is told may want to publish something else.
            self._failed(error)
        return None

    def _publish(self, encode: Callable[[int], bytes], now_s: float) -> Exception | None:
        self._pending, self._published_at_s = None, now_s
        version = self._writer.last_version + 1
        try:
            payload = encode(version)
            if len(payload) <= self._writer.capacity:
                self._writer.write(version, payload)
            else:
                logger.warning(
                    "coda: a page was not published: %d bytes do not fit %d", len(payload), self._writer.capacity
                )
        except Exception as error:
            return error
        return None


class Flusher:
    """The thread that publishes kept offers, so that an engine gone idle still shows its last state.

    It also watches the process that made the pages: when that one has died without removing them, it calls
    ``orphaned`` and ends.
    """

    def __init__(self, publishers: list[Publisher], orphaned: Callable[[], None] | None) -> None:
        self._publishers = publishers
        self._orphaned = orphaned
        self._parent_pid = os.getppid()
        self._wake = threading.Event()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="coda-flusher", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Tell the thread that an offer was kept."""
        self._wake.set()

    def stop(self) -> None:
        """Publish what is kept and end the thread."""
        self._stopped = True
        self._wake.set()
        self._thread.join(timeout=_PARENT_CHECK_S)

    def _run(self) -> None:
        wait_s: float | None = None
        while not self._stopped:
            self._wake.wait(_PARENT_CHECK_S if wait_s is None else min(wait_s, _PARENT_CHECK_S))
            self._wake.clear()
            now_s = time.monotonic()
            waits = [wait for publisher in self._publishers if (wait := publisher.flush(now_s)) is not None]
            wait_s = max(0.001, min(waits)) if waits else None
            if self._orphaned is not None and os.getppid() != self._parent_pid:
                self._orphaned()
                return
