"""Notices that kopf's watch has died: it then wakes the loops itself, and fails the liveness probe."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from coda_operator.errors import ApiError
from coda_operator.kube.client import KubeClient
from coda_operator.kube.resources import CODA_CLUSTERS
from coda_operator.loops import Loops
from coda_operator.observed import Key

_logger = logging.getLogger(__name__)

INTERVAL_S = 30.0
_MAX_SILENCE_S = 6 * INTERVAL_S


class Watchdog:
    """Lists the CodaClusters now and then; one that the watch never announced means that the watch is dead.

    A watch can end while the process looks alive (kopf issues 1276, 787, 996). The list keeps the operator
    working at the list's pace, and the failed probe has the process replaced.
    """

    def __init__(
        self,
        kube: KubeClient,
        loops: Loops,
        namespaces: Sequence[str],
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kube = kube
        self._loops = loops
        self._namespaces: Sequence[str | None] = namespaces or [None]
        self._interval_s = interval_s
        self._clock = clock
        self._suspects: frozenset[Key] = frozenset()
        self._missed: frozenset[Key] = frozenset()
        self._looked_at_s = clock()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="watchdog")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def check(self) -> str:
        """Return how many CodaClusters are looked after.

        Raises:
            RuntimeError: The watch missed one, or this watchdog itself is stuck.
        """
        if self._missed:
            names = ", ".join(sorted(f"{key.namespace}/{key.name}" for key in self._missed))
            raise RuntimeError(f"the watch did not announce {names}")
        silence_s = self._clock() - self._looked_at_s
        if silence_s > _MAX_SILENCE_S:
            raise RuntimeError(f"the watchdog has not looked for {silence_s:.0f} s")
        return f"{len(self._loops.keys)} CodaClusters"

    async def look(self) -> None:
        """List the CodaClusters, and wake those without a loop that had none at the last look either.

        Raises:
            ApiError: The API server refused, or could not be reached.
        """
        found: set[Key] = set()
        for namespace in self._namespaces:
            for item in await self._kube.find(CODA_CLUSTERS, namespace):
                if "deletionTimestamp" not in item["metadata"]:  # one that somebody's finalizer holds has no loop
                    found.add(Key(item["metadata"]["namespace"], item["metadata"]["name"]))
        unannounced = found - self._loops.keys
        self._missed |= unannounced & self._suspects
        self._suspects = frozenset(unannounced)
        for key in self._missed & unannounced:
            self._loops.wake(key)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            try:
                await self.look()
            except ApiError as error:
                _logger.warning("cannot list CodaClusters: %s", error)
            # Reaching nobody is the API server's trouble; a new process would not reach it either.
            self._looked_at_s = self._clock()
