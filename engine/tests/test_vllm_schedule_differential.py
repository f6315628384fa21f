"""With the selector off, vLLM's schedule is its own, step by step, request by request, block by block."""

import random

import pytest
from scheduler_harness import Drive, Trace, attach, new_scheduler, settings_json, use_tiered_aging
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from coda_engine.contract.reasons import AdmissionReason
from coda_engine.contract.settings import StateAdmissionPolicyName


def off_without_profile(scheduler):
    return attach(scheduler)


def fifo_by_settings(scheduler):
    runtime = attach(scheduler)
    use_tiered_aging(runtime)
    runtime.apply_settings(settings_json(StateAdmissionPolicyName.FIFO))
    return runtime


def run_script(scheduler: Scheduler, seed: int) -> tuple[Trace, dict, list]:
    """Run a random script: sessions that return with a longer prompt, fresh long prompts, aborts, tight memory."""
    rng = random.Random(seed)
    drive = Drive(scheduler)
    sessions = [[rng.randrange(1_000) for _ in range(rng.randrange(40, 900))] for _ in range(6)]
    blocks = []

    def act(step: int) -> None:
        blocks.append(scheduler.kv_cache_manager.block_pool.get_num_free_blocks())
        if step < 120 and rng.random() < 0.35:
            prompt = rng.choice(sessions)
            prompt += [rng.randrange(1_000) for _ in range(rng.randrange(5, 200))]
            del prompt[3_000:]
            drive.add(f"r{len(drive.requests)}", list(prompt), max_tokens=rng.randrange(1, 60), arrival_s=float(step))
        if rng.random() < 0.05 and drive.requests:
            drive.abort([rng.choice(list(drive.requests))])

    for number in range(12):
        drive.add(f"r{number}", list(rng.choice(sessions)), max_tokens=rng.randrange(1, 60))
    trace = drive.finish(act)
    return trace, drive.statuses(), blocks


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
@pytest.mark.parametrize("prepare", [off_without_profile, fifo_by_settings])
@pytest.mark.parametrize("seed", range(4))
def test_the_schedule_without_the_selector_is_stock(vllm_config, scheduler_class, prepare, seed):
    stock = run_script(new_scheduler(vllm_config, 120, scheduler_class), seed)
    scheduler = new_scheduler(vllm_config, 120, scheduler_class)
    runtime = prepare(scheduler)
    assert run_script(scheduler, seed) == stock
    assert len(stock[0]) > 100
    assert runtime.admission.log.reordered == 0


@pytest.mark.parametrize("seed", range(4))
def test_the_script_is_one_that_the_selector_would_reorder(vllm_config, seed):
    stock = run_script(new_scheduler(vllm_config, 120), seed)
    scheduler = new_scheduler(vllm_config, 120)
    runtime = attach(scheduler)
    use_tiered_aging(runtime)
    trace, _, _ = run_script(scheduler, seed)
    assert trace != stock[0]
    assert runtime.admission.log.reordered > 0


def test_fifo_decisions_are_reported_as_ready_order_and_a_closed_feature_as_off(vllm_config):
    for prepare, reason in (
        (fifo_by_settings, AdmissionReason.READY_ORDER),
        (off_without_profile, AdmissionReason.FEATURE_OFF),
    ):
        scheduler = new_scheduler(vllm_config, 120)
        runtime = prepare(scheduler)
        drive = Drive(scheduler)
        drive.add("one", list(range(100)))
        drive.add("two", list(range(100)))
        drive.finish()
        assert runtime.admission.log.by_reason == {reason.value: 2}
