"""One loop for each CodaCluster: woken by watch events and by its own clock, never twice at once."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from coda_operator.errors import ApiError
from coda_operator.observed import Key

_logger = logging.getLogger(__name__)

Round = Callable[[Key], Awaitable[float | None]]


@dataclass(frozen=True, slots=True)
class Pace:
    """How often the loops go round.

    Attributes:
        settle_s: Pause after each round; events that come meanwhile become one round.
        first_retry_s: Pause after a failed round; doubles with each further failure.
        last_retry_s: Longest pause after a failed round.
        at_once: Rounds of different CodaClusters that may run at the same time.
    """

    settle_s: float = 0.3
    first_retry_s: float = 1.0
    last_retry_s: float = 60.0
    at_once: int = 8

    def retry_s(self, failures: int) -> float:
        """Return the pause after the ``failures``-th failure in a row, seconds."""
        return min(self.first_retry_s * 2.0 ** (failures - 1), self.last_retry_s)


@dataclass(slots=True)
class _Loop:
    woken: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[None] | None = None


class Loops:
    """The loops of all CodaClusters. A loop ends when its CodaCluster is gone."""

    def __init__(self, go_round: Round, pace: Pace = Pace()) -> None:
        self._round = go_round
        self._pace = pace
        self._slots = asyncio.Semaphore(pace.at_once)
        self._loops: dict[Key, _Loop] = {}

    @property
    def keys(self) -> frozenset[Key]:
        """CodaClusters that have a loop."""
        return frozenset(self._loops)

    def wake(self, key: Key) -> None:
        """Have a round soon; starts the loop of a new CodaCluster."""
        loop = self._loops.get(key)
        if loop is None:
            loop = self._loops[key] = _Loop()
            loop.task = asyncio.create_task(self._run(key, loop), name=f"{key.namespace}/{key.name}")
        loop.woken.set()

    def wake_namespace(self, namespace: str) -> None:
        """Have a round soon for each CodaCluster of a namespace."""
        for key in self.keys:
            if key.namespace == namespace:
                self.wake(key)

    async def close(self) -> None:
        """Stop all loops; rounds in progress are cancelled, which is safe because the next one starts anew."""
        tasks = [loop.task for loop in self._loops.values() if loop.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._loops.clear()

    async def _run(self, key: Key, loop: _Loop) -> None:
        failures = 0
        while True:
            loop.woken.clear()
            pause_s, failures = await self._one_round(key, failures)
            if pause_s is None:
                if not loop.woken.is_set():
                    del self._loops[key]
                    return
                pause_s = 0.0  # made again under the same name meanwhile
            await asyncio.sleep(self._pace.settle_s)
            if failures:
                # A broken API server is not asked again with every event that still trickles in.
                await asyncio.sleep(pause_s)
            else:
                await _wait(loop.woken, pause_s)

    async def _one_round(self, key: Key, failures: int) -> tuple[float | None, int]:
        """Return the pause until the next round (None = gone) and the failures in a row."""
        try:
            async with self._slots:
                return await self._round(key), 0
        except ApiError as error:
            _logger.warning("%s/%s: %s", key.namespace, key.name, error)
        except Exception:
            # A defect in one CodaCluster's round must not end the loop, which nothing would start again.
            _logger.exception("%s/%s: round failed", key.namespace, key.name)
        return self._pace.retry_s(failures + 1), failures + 1


async def _wait(woken: asyncio.Event, timeout_s: float) -> None:
    try:
        await asyncio.wait_for(woken.wait(), timeout_s)
    except TimeoutError:
        return
