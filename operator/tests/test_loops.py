import asyncio

from coda_operator.errors import ApiError
from coda_operator.loops import Loops, Pace
from coda_operator.observed import Key

KEY = Key("team", "demo")
QUICK = Pace(settle_s=0.0, first_retry_s=0.001, last_retry_s=0.004)


class Rounds:
    """Records rounds; ``answers`` are returned or raised in turn, the last one for ever."""

    def __init__(self, *answers: float | Exception | None) -> None:
        self.answers = list(answers)
        self.keys: list[Key] = []
        self.running = 0
        self.most_running = 0
        self.happened = asyncio.Event()
        self.gate = asyncio.Event()
        self.gate.set()

    async def __call__(self, key: Key) -> float | None:
        self.keys.append(key)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        self.happened.set()
        await self.gate.wait()
        self.running -= 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def reached(self, count: int) -> None:
        async with asyncio.timeout(5):
            while len(self.keys) < count:
                self.happened.clear()
                await self.happened.wait()


async def test_many_events_during_a_round_become_one_more_round():
    rounds = Rounds(60.0)
    loops = Loops(rounds, QUICK)
    rounds.gate.clear()
    loops.wake(KEY)
    await rounds.reached(1)
    for _ in range(50):
        loops.wake(KEY)
    rounds.gate.set()
    await rounds.reached(2)
    await asyncio.sleep(0.05)
    assert len(rounds.keys) == 2
    await loops.close()


async def test_a_loop_looks_again_by_itself():
    rounds = Rounds(0.001)
    loops = Loops(rounds, QUICK)
    loops.wake(KEY)
    await rounds.reached(3)
    await loops.close()
    assert loops.keys == frozenset()


async def test_one_cluster_is_never_in_two_rounds_and_many_clusters_are_bounded():
    rounds = Rounds(60.0)
    loops = Loops(rounds, Pace(settle_s=0.0, at_once=2))
    rounds.gate.clear()
    for number in range(5):
        loops.wake(Key("team", f"c{number}"))
    await rounds.reached(2)
    await asyncio.sleep(0.02)
    assert rounds.most_running == 2
    rounds.gate.set()
    await rounds.reached(5)
    await loops.close()


async def test_the_loop_of_a_deleted_cluster_ends():
    rounds = Rounds(None)
    loops = Loops(rounds, QUICK)
    loops.wake(KEY)
    async with asyncio.timeout(5):
        while loops.keys:
            await asyncio.sleep(0.001)
    assert rounds.keys == [KEY]


async def test_a_cluster_that_is_made_again_gets_a_loop_again():
    rounds = Rounds(None, 60.0)
    loops = Loops(rounds, QUICK)
    loops.wake(KEY)
    async with asyncio.timeout(5):
        while loops.keys:
            await asyncio.sleep(0.001)
    loops.wake(KEY)
    await rounds.reached(2)
    assert loops.keys == {KEY}
    await loops.close()


async def test_an_api_error_or_a_defect_is_survived():
    rounds = Rounds(ApiError(0, "Unreachable", "no route"), ValueError("defect"), 60.0)
    loops = Loops(rounds, QUICK)
    loops.wake(KEY)
    await rounds.reached(3)
    await loops.close()


async def test_waking_a_namespace_wakes_only_its_clusters():
    rounds = Rounds(60.0)
    loops = Loops(rounds, QUICK)
    loops.wake(KEY)
    loops.wake(Key("other", "demo"))
    await rounds.reached(2)
    await asyncio.sleep(0.01)
    loops.wake_namespace("team")
    await rounds.reached(3)
    assert rounds.keys[2] == KEY
    await loops.close()


def test_retries_back_off_to_a_bound():
    pace = Pace(first_retry_s=1.0, last_retry_s=60.0)
    assert [pace.retry_s(failures) for failures in (1, 2, 3, 7, 50)] == [1.0, 2.0, 4.0, 60.0, 60.0]
