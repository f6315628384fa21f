"""What a waiting prompt would restore, followed by events alone, against a look-up from scratch."""

import random

import pytest
from vllm.v1.kv_offload.base import make_offload_key

from coda_engine.vllm_adapter.scheduler.shadow_residency import RestorableRun, ShadowResidency


class ReadySet:
    """Ready keys with an event for each change, and a count of look-ups."""

    def __init__(self):
        self.keys, self.listeners, self.look_ups = set(), [], 0

    def ready(self, key):
        self.look_ups += 1
        return key in self.keys

    def on_change(self, listener):
        self.listeners.append(listener)

    def turn(self, key):
        self.keys ^= {key}
        for listener in self.listeners:
            listener(key, key in self.keys)


def hashes_of(prompt, blocks):
    """Prompts share their first four blocks."""
    return [b"%d/%d" % (0 if block < 4 else prompt, block) for block in range(blocks)]


def from_scratch(ready, run, start):
    end = start
    while end < len(run.keys) and run.keys[end] in ready.keys:
        end += 1
    return end - start


@pytest.mark.parametrize("seed", range(20))
def test_a_followed_run_is_what_a_look_up_from_scratch_finds(seed):
    rng = random.Random(seed)
    ready = ReadySet()
    residency = ShadowResidency(ready)
    runs = [RestorableRun(hashes_of(prompt, 12), 12) for prompt in range(6)]
    starts = [0] * len(runs)
    for _ in range(2_000):
        if rng.random() < 0.7:
            ready.turn(make_offload_key(rng.choice(hashes_of(rng.randrange(6), 12)), 0))
        else:
            which = rng.randrange(len(runs))
            starts[which] = rng.randrange(13)
        which = rng.randrange(len(runs))
        residency.refresh(runs[which], starts[which])
        assert runs[which].blocks == from_scratch(ready, runs[which], starts[which])
        if rng.random() < 0.02:
            residency.forget(runs[which])
    for run in runs:
        residency.forget(run)
    assert residency.registrations() == 0


def test_nothing_is_looked_up_while_no_event_touches_a_run():
    ready = ReadySet()
    residency, run = ShadowResidency(ready), RestorableRun(hashes_of(1, 90), 90)
    ready.keys |= set(run.keys[:80])
    residency.refresh(run, 0)
    before = ready.look_ups
    ready.turn(make_offload_key(b"somebody else's", 0))
    ready.turn(run.keys[85])
    assert run.current(0)
    residency.refresh(run, 0)
    assert (run.blocks, ready.look_ups) == (80, before)


def test_a_longer_hit_in_hbm_shortens_a_run_without_a_look_up_and_a_shorter_one_looks_only_at_what_is_new():
    ready = ReadySet()
    residency, run = ShadowResidency(ready), RestorableRun(hashes_of(1, 90), 90)
    ready.keys |= set(run.keys)
    residency.refresh(run, 40)
    before = ready.look_ups
    residency.refresh(run, 60)
    assert (run.blocks, ready.look_ups) == (30, before)
    residency.refresh(run, 30)
    assert (run.blocks, ready.look_ups) == (60, before + 10)


def test_a_request_may_limit_what_it_restores_at_once():
    ready = ReadySet()
    run = RestorableRun(hashes_of(1, 20), 20, most_blocks=5)
    ready.keys |= set(run.keys)
    ShadowResidency(ready).refresh(run, 3)
    assert (run.blocks, run.restored_keys()) == (5, run.keys[3:8])
