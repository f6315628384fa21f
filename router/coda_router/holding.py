"""Requests held back while no engine can take them: first ready, first served, bounded."""

import asyncio
from bisect import insort
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter
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
    undo: Callable[[T], None]
    size_bytes: int
    ready_at_s: float
    line: Hashable
    outcome: asyncio.Future[T]


_READINESS = attrgetter("ready_at_s")


class HoldingQueue(Generic[T]):
    """Lines of requests that wait for an engine, each in order of readiness.

    A request brings an *attempt*: a function that places it and returns the outcome, or None while it must
    wait. Attempts of one line run in order of readiness (of arrival where that is the same), inside :meth:`admit`
    or :meth:`wake`, so nobody overtakes within it. Lines do not wait for each other: requests for a model whose
    engines are all full, or hang, keep nobody waiting who asks for another one.

    Args:
        limits: Bounds of all lines together; beyond them a request is refused with 503.
    """

    def __init__(self, limits: HoldingLimits) -> None:
        self._limits = limits
        self._lines: dict[Hashable, deque[_Held[T]]] = {}
        self._held_requests = 0
        self._held_bytes = 0
        self._held_total = 0

    def __len__(self) -> int:
        return self._held_requests

    @property
    def held_total(self) -> int:
        """How many requests had to wait since the start."""
        return self._held_total

    async def admit(
        self,
        attempt: Callable[[], T | None],
        undo: Callable[[T], None],
        *,
        size_bytes: int,
        ready_at_s: float,
        line: Hashable = None,
    ) -> T:
        """Return the attempt's outcome, now or after waiting for its turn in its line.

        Args:
            attempt: Places the request and returns the outcome, or None while it must wait.
            undo: Called with an outcome whose request went away before it could be told.
            size_bytes: Size of the request's body.
            ready_at_s: When the request became ready, event loop's time in seconds: also one that was lost at an
                engine and is placed anew goes before those that are younger.
            line: Whom it waits with.

        Raises:
            Refusal: 503 when too much is held back already, or for too long.
        """
        if line not in self._lines:
            outcome = attempt()
            if outcome is not None:
                return outcome
        limits = self._limits
        if self._held_requests >= limits.max_requests or self._held_bytes + size_bytes > limits.max_bytes:
            raise Refusal(
                503, "queue_full", "every engine is busy and the router's queue is full; try again", retry_after_s=2
            )
        outcome_later: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        return await self._wait(_Held(attempt, undo, size_bytes, ready_at_s, line, outcome_later))

    async def _wait(self, held: _Held[T]) -> T:
        insort(self._lines.setdefault(held.line, deque()), held, key=_READINESS)
        self._held_requests += 1
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
                held.undo(held.outcome.result())
            raise
        finally:
            if not held.outcome.done():
                held.outcome.cancel()
                self._remove(held)

    def wake(self) -> None:
        """Try the requests at the lines' heads again, until the head of each has to go on waiting."""
        if not self._held_requests:
            return
        # Where lines compete for the same engines, the one whose head was ready first goes first.
        for line in sorted(self._lines.values(), key=lambda line: line[0].ready_at_s):
            while line:
                held = line[0]
                outcome = held.attempt()
                if outcome is None:
                    break
                self._remove(held)
                held.outcome.set_result(outcome)

    def _remove(self, held: _Held[T]) -> None:
        line = self._lines[held.line]
        line.remove(held)
        if not line:
            del self._lines[held.line]
        self._held_requests -= 1
        self._held_bytes -= held.size_bytes
