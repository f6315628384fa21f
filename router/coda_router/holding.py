"""Requests held back while no engine can take them: first come, first served, bounded."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from coda_router.errors import Refusal

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HoldingLimits:
    """How much is held back and for how long.

    Attributes:
        max_requests: Most requests held.
        max_bytes: Most bytes of request bodies held.
        max_wait_s: Longest time to hold one, seconds.
    """

    max_requests: int = 512
    max_bytes: int = 32 * 1024 * 1024
    max_wait_s: float = 60.0


@dataclass(eq=False, slots=True)
class _Held(Generic[T]):
    attempt: Callable[[], T | None]
    size_bytes: int
    outcome: asyncio.Future[T]


class HoldingQueue(Generic[T]):
    """A FIFO queue of requests that wait for an engine.

    A request brings an *attempt*: a function that places it and returns the outcome, or None while it must
    wait. Attempts run in order of arrival, inside :meth:`admit` or :meth:`wake`, so nobody overtakes.

    Args:
        limits: Bounds; beyond them a request is refused with 503.
        undo: Called with an outcome whose request went away before it could be told.
    """

    def __init__(self, limits: HoldingLimits, undo: Callable[[T], None]) -> None:
        self._limits = limits
        self._undo = undo
        self._held: deque[_Held[T]] = deque()
        self._held_bytes = 0
        self._held_total = 0

    def __len__(self) -> int:
        return len(self._held)

    @property
    def held_total(self) -> int:
        """How many requests had to wait since the start."""
        return self._held_total

    async def admit(self, attempt: Callable[[], T | None], size_bytes: int) -> T:
        """Return the attempt's outcome, now or after waiting for its turn.

        Raises:
            Refusal: 503 when too much is held back already, or for too long.
        """
        if not self._held:
            outcome = attempt()
            if outcome is not None:
                return outcome
        if len(self._held) >= self._limits.max_requests or self._held_bytes + size_bytes > self._limits.max_bytes:
            raise Refusal(
                503, "queue_full", "every engine is busy and the router's queue is full; try again", retry_after_s=2
            )
        return await self._wait(_Held(attempt, size_bytes, asyncio.get_running_loop().create_future()))

    async def _wait(self, held: _Held[T]) -> T:
        self._held.append(held)
        self._held_total += 1
        self._held_bytes += held.size_bytes
        try:
            async with asyncio.timeout(self._limits.max_wait_s):
                return await asyncio.shield(held.outcome)
        except TimeoutError as error:
            if held.outcome.done():
                return held.outcome.result()
            raise Refusal(
                503,
                "queue_timeout",
                f"no engine could take the request for {self._limits.max_wait_s:g} s; try again",
                retry_after_s=5,
            ) from error
        except asyncio.CancelledError:
            if held.outcome.done():
                self._undo(held.outcome.result())
            raise
        finally:
            if not held.outcome.done():
                held.outcome.cancel()
                self._held.remove(held)
                self._held_bytes -= held.size_bytes

    def wake(self) -> None:
        """Try the requests at the head again, until one of them has to go on waiting."""
        while self._held:
            held = self._held[0]
            outcome = held.attempt()
            if outcome is None:
                return
            self._held.popleft()
            self._held_bytes -= held.size_bytes
            held.outcome.set_result(outcome)
