"""The CPU shadow under vLLM's asynchronous scheduling, CUDA's default: a step is scheduled before the last one ends."""

import random
from collections import deque

import pytest
from shadow_engine_harness import shadow_folder
from shadow_scheduler_harness import Faults, ShadowDrive, agents, shadowed
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

pytestmark = pytest.mark.vllm

SAMPLED_TOKEN = 7


class TwoInFlight(ShadowDrive):
    """Takes a step's output in only after the next step has been scheduled and computed."""

    def __init__(self, *args, **kwargs) -> None:
        self.in_flight = deque()
        super().__init__(*args, **kwargs)

    def step(self):
        output = self.scheduler.schedule()
        scheduled = dict(output.num_scheduled_tokens)
        for rank in self.ranks:
            rank.before_forward(output)
        for name, count in scheduled.items():
            self._forward(self.scheduler.requests[name], count)
        reports = [self._report(scheduled, rank.after_forward(output)) for rank in self.ranks]
        self.in_flight.append((output, self._aggregator.aggregate(reports) if len(reports) > 1 else reports[0]))
        if len(self.in_flight) > 1 or not self.scheduler.has_unfinished_requests():
            self.take_output_in()
        return scheduled

    def take_output_in(self) -> None:
        self.scheduler.update_from_output(*self.in_flight.popleft())

    def drain(self) -> None:
        self.abort([name for name, request in self.requests.items() if not request.is_finished()])
        for _ in range(300):
            self.step()
            if not self.scheduler.has_requests() and len(self.in_flight) < 2:
                break
        while self.in_flight:
            self.take_output_in()

    def _chain(self, request, end):
        known = self._chains.setdefault(request.request_id, [])
        tokens = request.all_token_ids
        # What is computed ahead of its sampling: the scheduler does not know the token yet, the model does.
        ahead = [SAMPLED_TOKEN] * max(0, end - len(tokens))
        content = chain_content(known, [*tokens, *ahead], hash(request.cache_salt))
        known += content[len(known) : end]
        return known[:end]


def chain_content(known, tokens, salt):
    chain, mask = list(known), 2**64 - 1
    for position in range(len(chain), len(tokens)):
        previous = chain[-1] if chain else salt & mask
        chain.append((previous * 6_364_136_223_846_793_005 + tokens[position] + 1) & mask)
    return chain


@pytest.mark.parametrize("ranks", [1, 2])
def test_with_two_steps_in_flight_no_fault_lets_a_wrong_byte_through_or_keeps_anything(vllm_config, monkeypatch, ranks):
    construct = getattr(AsyncScheduler.__init__, "__wrapped__", AsyncScheduler.__init__)
    own_class = type("OwnAsyncScheduler", (AsyncScheduler,), {"__init__": construct})
    monkeypatch.setattr("shadow_scheduler_harness.Scheduler", own_class)
    faults = Faults(damage=0.01, unreadable=0.005, unwritable=0.03, most_late_steps=3)
    with shadow_folder() as folder:
        config = shadowed(vllm_config, folder, 300, ranks)
        config.scheduler_config.async_scheduling = True
        drive = TwoInFlight(config, 60, faults)
        try:
            script = agents(drive, random.Random(ranks), sessions=10, aborts=0.02)
            for _ in range(1_000):
                next(script)
            drive.drain()
            counters = drive.manager.counters
            assert min(counters.restored, counters.bad, counters.failed_loads, counters.unwritten) > 5
            assert set(drive.leftovers().values()) == {0}, drive.leftovers()
        finally:
            drive.close()
