"""The queue of requests that wait for an engine: by readiness, within a line and between lines."""

import asyncio
from collections.abc import Hashable

import pytest
from router_harness import until

from coda_router.holding import HoldingLimits, HoldingQueue


class Door:
    """Lets so many requests through, and notes who went."""

    def __init__(self) -> None:
        self.queue: HoldingQueue[str] = HoldingQueue(HoldingLimits())
        self.room = 0
        self.went: list[str] = []
        self.undone: list[str] = []

    def _attempt(self, name: str) -> str | None:
        if not self.room:
            return None
        self.room -= 1
        self.went.append(name)
        return name

    async def ask(self, name: str, ready_at_s: float, line: Hashable = None) -> "asyncio.Task[str]":
        """Return the task of a request that waits."""
        waiting = len(self.queue)
        asking = asyncio.create_task(
            self.queue.admit(
                lambda: self._attempt(name), self.undone.append, size_bytes=1, ready_at_s=ready_at_s, line=line
            )
        )
        await until(lambda: len(self.queue) == waiting + 1)
        return asking

    def open(self, room: int) -> None:
        self.room = room
        self.queue.wake()


@pytest.mark.parametrize("line_of_the_retried", ["line", "line of the retried"])
async def test_a_request_that_was_lost_at_an_engine_goes_before_those_that_are_younger(line_of_the_retried: str):
    door = Door()
    asking = [await door.ask("younger", 2.0, "line"), await door.ask("youngest", 3.0, "line")]
    asking.append(await door.ask("retried", 1.0, line_of_the_retried))
    for _ in asking:
        door.open(1)
    assert door.went == ["retried", "younger", "youngest"]
    assert await asyncio.gather(*asking) == ["younger", "youngest", "retried"]


async def test_requests_that_became_ready_together_go_as_they_came():
    door = Door()
    asking = [await door.ask(f"r{n}", 1.0) for n in range(5)]
    door.open(5)
    await asyncio.gather(*asking)
    assert door.went == [f"r{n}" for n in range(5)]


async def test_the_outcome_of_a_request_that_left_just_then_is_undone():
    door = Door()
    stays, leaves = await door.ask("stays", 1.0), await door.ask("leaves", 2.0)
    door.open(2)
    leaves.cancel()
    await asyncio.gather(stays, leaves, return_exceptions=True)
    assert (door.undone, len(door.queue)) == (["leaves"], 0)
