"""State admission beside the CPU shadow: true costs, the allocator's own answers, restores in nobody's way."""

import json
import random
import time

import pytest
from scheduler_harness import BLOCK_TOKENS, attach, native_hit, settings_json, use_tiered_aging
from shadow_engine_harness import shadow_folder
from shadow_scheduler_harness import Faults, agents, driving, shadowed
from vllm.v1.request import RequestStatus

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.settings import StateAdmissionPolicyName
from coda_engine.vllm_adapter.scheduler.queue import FrontierQueue
from coda_engine.vllm_adapter.scheduler.shadow_residency import shadow_key

HBM_BLOCKS, SHADOW_BLOCKS = 60, 300
WAITS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


@pytest.fixture
def folder():
    with shadow_folder() as made:
        yield made


@pytest.fixture
def drive(vllm_config, folder):
    """An engine with 60 blocks of HBM and 300 of shadow whose restores take three steps, under Coda's own order."""
    late = Faults(most_late_steps=3)
    late.rng.randint = lambda low, high: high
    with driving(shadowed(vllm_config, folder, SHADOW_BLOCKS), HBM_BLOCKS, late) as made:
        use_order(attach(made.scheduler), StateAdmissionPolicyName.CODA)
        yield made


def use_order(runtime, policy, **state):
    use_tiered_aging(runtime)
    runtime.apply_settings(settings_json(policy, **state))
    capability = runtime.capabilities.snapshot()[Feature.STATE_ADMISSION]
    assert (capability.enabled, capability.reason) == (True, Reason.ENABLED), capability


def admission_of(drive):
    return drive.scheduler.coda_runtime.admission


def tokens(seed, count):
    rng = random.Random(seed)
    return [rng.randrange(1_000) for _ in range(count)]


def decisions_of(drive):
    return {one["request_id"]: one for one in json.loads(admission_of(drive).log.encode())["decisions"]}


def publish(drive, prompt):
    """Let a prompt's KV be computed and published, and leave HBM."""
    drive.add(f"warm{len(drive.requests)}", prompt, max_tokens=1, arrival_s=time.time())
    drive.finish()
    for _ in range(10):
        drive.step()
    assert drive.scheduler.reset_prefix_cache()
    drive.admitted.clear()


def test_a_restorable_request_passes_a_long_prefill_and_is_decided_once(drive):
    session = tokens(1, 640)
    publish(drive, session)
    drive.add("long", tokens(2, 900), arrival_s=time.time())
    drive.add("returning", session + tokens(3, 20), arrival_s=time.time())
    drive.finish()
    decisions = decisions_of(drive)
    assert decisions["returning"]["sequence"] < decisions["long"]["sequence"]
    paths = {name: [one[f"{tier}_tokens"] for tier in ("hbm", "shadow", "prefill")] for name, one in decisions.items()}
    assert paths["returning"] == [0, 640, 20]
    assert paths["long"] == [0, 0, 900]
    assert sum(admission_of(drive).log.by_reason.values()) == 3


def test_a_request_that_is_being_restored_is_in_nobodys_way(drive):
    session, other = tokens(1, 640), tokens(2, 320)
    publish(drive, session)
    drive.add("warm", other, max_tokens=1, arrival_s=time.time())
    drive.finish()
    returning = drive.add("returning", session + tokens(3, 20), arrival_s=time.time())
    drive.step()
    assert returning.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    resident = drive.add("resident", other + tokens(4, 10), arrival_s=time.time())
    drive.step()
    assert resident.status == RequestStatus.RUNNING
    assert returning.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    drive.finish()


def test_who_shares_what_is_being_restored_waits_for_it_and_lets_others_pass(drive):
    session = tokens(1, 640)
    publish(drive, session)
    first = drive.add("first", session + tokens(3, 20), arrival_s=time.time())
    drive.step()
    second = drive.add("second", session + tokens(4, 20), arrival_s=time.time())
    fresh = drive.add("fresh", tokens(5, 100), arrival_s=time.time())
    drive.step()
    assert [one.status for one in (first, second, fresh)] == [
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.WAITING,
        RequestStatus.RUNNING,
    ]
    drive.finish()
    assert decisions_of(drive)["second"]["hbm_tokens"] == 640
    assert admission_of(drive).refused_after_feasible == 0


def test_the_cost_of_a_restore_is_its_own_time_and_that_of_those_before_it(drive):
    session = tokens(1, 640)
    publish(drive, session)
    admission = admission_of(drive)
    drive.add("holder", tokens(7, 900), max_tokens=30, arrival_s=time.time())
    drive.step()
    waiting = drive.add("returning", session + tokens(3, 20), arrival_s=time.time())
    admission._follow_shadow()
    inspector = admission.inspector
    room = inspector.capacity.room()
    restore_only = inspector.inspect(waiting, room)
    assert inspector.restorable_tokens(waiting) == 640
    assert (restore_only.additional_kv_blocks, restore_only.blocks_to_compute) == (21, 1)
    assert inspector.inspect(waiting, room, queueing_ms=7.0).state_cost_ms == restore_only.state_cost_ms + 7.0
    fresh = drive.add("fresh", tokens(9, 660), arrival_s=time.time())
    assert inspector.inspect(fresh, room, queueing_ms=7.0).state_cost_ms > restore_only.state_cost_ms + 7.0
    drive.finish()


def test_what_vanishes_from_the_shadow_is_to_be_computed_and_what_comes_back_is_not(drive):
    session = tokens(1, 640)
    publish(drive, session)
    admission, index = admission_of(drive), drive.manager.index
    admission._follow_shadow()
    inspector = admission.inspector
    drive.scheduler.coda_runtime.apply_settings(settings_json(StateAdmissionPolicyName.FIFO))
    waiting = drive.add("returning", session + tokens(3, 20), arrival_s=time.time())
    room = inspector.capacity.room()
    inspector.inspect(waiting, room)
    fifth = inspector._inspections[waiting].run.keys[5]
    index.poison(index.pin([fifth]))
    inspector.inspect(waiting, room)
    assert inspector.restorable_tokens(waiting) == 5 * BLOCK_TOKENS
    refs = index.reserve([fifth])
    for ref in refs:
        drive.ranks[0].pages.begin_write(ref)
        drive.ranks[0].pages.seal(ref)
    index.publish(refs)
    inspector.inspect(waiting, room)
    assert inspector.restorable_tokens(waiting) == 640
    index.poison(index.pin([fifth]))
    drive.finish()


def test_a_shadow_that_closes_leaves_admission_running_without_it(drive):
    session = tokens(1, 640)
    publish(drive, session)
    drive.manager.close(Reason.INTERNAL_ERROR, "for the test")
    drive.add("long", tokens(2, 900), arrival_s=time.time())
    drive.add("returning", session + tokens(3, 20), arrival_s=time.time())
    drive.finish()
    assert decisions_of(drive)["returning"]["prefill_tokens"] == 660
    assert drive.scheduler.coda_runtime.capabilities.snapshot()[Feature.STATE_ADMISSION].enabled


class Invariants:
    """Checked after each step of a run: what admission believes against what vLLM and the index say."""

    def __init__(self, drive):
        self.drive = drive
        self.inspected = self.restorable = 0

    def check(self) -> None:
        scheduler, inspector = self.drive.scheduler, admission_of(self.drive).inspector
        pool = scheduler.kv_cache_manager.block_pool
        held = {block for name in scheduler.requests for block in scheduler.kv_cache_manager.get_block_ids(name)[0]}
        assert len(held) + pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        arrivals = [one.arrival_time for one in scheduler.waiting if one.status != RequestStatus.PREEMPTED]
        assert arrivals == sorted(arrivals)
        if inspector.shadow is None:
            return
        room = inspector.capacity.room()
        for request in list(scheduler.waiting):
            if request.status in WAITS:
                self._same(inspector, request, room)

    def _same(self, inspector, request, room) -> None:
        ready = inspector.inspect(request, room)
        hit = native_hit(self.drive.scheduler, request)
        index, shadow = self.drive.manager.index, self.drive.connector.coda_shadow
        restorable, limit = len(hit), request.num_tokens // BLOCK_TOKENS
        while restorable < limit and index.ready(shadow_key(request.block_hashes[restorable])):
            restorable += 1
        restore_blocks = restorable - len(hit) if shadow.may_restore(request.request_id) else 0
        assert inspector.resident_tokens(request) == len(hit) * BLOCK_TOKENS
        assert inspector.restorable_tokens(request) == restore_blocks * BLOCK_TOKENS
        assert ready.feasible == inspector.capacity.confirm(request, hit, restore_blocks, room)
        self.inspected += 1
        self.restorable += restore_blocks > 0


def soak(drive, steps, seed, aborts=0.03):
    """Run agents for ``steps`` steps and drain; return what was checked."""
    invariants = Invariants(drive)
    script = agents(drive, random.Random(seed), sessions=16, aborts=aborts)
    for _ in range(steps):
        next(script)
        invariants.check()
    for _ in range(3_000):
        if not drive.scheduler.has_requests():
            break
        drive.step()
        invariants.check()
    admission = admission_of(drive)
    assert set(drive.leftovers().values()) == {0}, drive.leftovers()
    assert (admission.refused_after_feasible, admission.unconfirmed) == (0, 0)
    assert not drive.scheduler.waiting
    assert len(admission.inspector) == admission._index.registrations() == 0
    assert admission.inspector.shadow.residency.registrations() == 0
    assert drive.scheduler.coda_runtime.capabilities.snapshot()[Feature.STATE_ADMISSION].enabled
    return invariants


@pytest.mark.parametrize("policy", [name for name in StateAdmissionPolicyName if name != "fifo"])
def test_under_churn_every_order_predicts_the_allocator_and_loses_nobody(vllm_config, folder, policy):
    late = Faults(most_late_steps=3)
    with driving(shadowed(vllm_config, folder, SHADOW_BLOCKS), HBM_BLOCKS, late) as drive:
        use_order(attach(drive.scheduler), policy)
        checked = soak(drive, 800, seed=3)
        assert min(checked.inspected, checked.restorable, admission_of(drive).log.reordered) > 100


def test_ten_thousand_steps_with_faults_preemption_and_aborts_leave_nothing_behind(vllm_config, folder):
    faults = Faults(damage=0.002, unreadable=0.002, unwritable=0.01, most_late_steps=3)
    with driving(shadowed(vllm_config, folder, SHADOW_BLOCKS), HBM_BLOCKS, faults) as drive:
        use_order(attach(drive.scheduler), StateAdmissionPolicyName.CODA, max_wait_ms=50, on_time_ms=20)
        preempted = 0
        original = drive.scheduler._preempt_request

        def count(*args, **kwargs):
            nonlocal preempted
            preempted += 1
            return original(*args, **kwargs)

        drive.scheduler._preempt_request = count
        soak(drive, 10_000, seed=4)
        reasons = admission_of(drive).log.by_reason
        assert preempted > 5
        assert reasons["ReservedForOldest"] > 0
        assert drive.manager.counters.failed_loads > 10
        assert drive.manager.counters.restored > 1_000
        assert isinstance(drive.scheduler.waiting, FrontierQueue)
