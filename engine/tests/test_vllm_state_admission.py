"""Tiered-Aging on real vLLM schedulers: order, guard, exact feasibility, nothing lost, live switching."""

import random
import time

import pytest
from scheduler_harness import BLOCK_TOKENS, Drive, attach, native_hit, new_scheduler, settings_json, use_tiered_aging
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from coda_engine.contract.reasons import AdmissionReason, Feature, Reason
from coda_engine.contract.settings import StateAdmissionPolicyName
from coda_engine.vllm_adapter.scheduler.queue import FrontierQueue


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000) for _ in range(count)]


@pytest.fixture
def drive(vllm_config):
    """A scheduler under Tiered-Aging with 200 blocks (6,400 tokens)."""
    scheduler = new_scheduler(vllm_config, 201)
    use_tiered_aging(attach(scheduler))
    return Drive(scheduler)


def runtime_of(drive: Drive):
    return drive.scheduler.coda_runtime


def make_resident(drive: Drive, prompt: list[int]) -> None:
    drive.add(f"warm{len(drive.requests)}", prompt, max_tokens=1, arrival_s=time.time())
    drive.finish()
    drive.admitted.clear()


def test_a_resident_request_passes_a_long_prefill_submitted_before_it(drive):
    session = tokens(1, 600)
    make_resident(drive, session)
    now_s = time.time()
    drive.add("long", tokens(2, 3_000), arrival_s=now_s)
    drive.add("resident", session + tokens(3, 20), arrival_s=now_s)
    drive.finish()
    assert drive.admitted == ["resident", "long"]
    assert runtime_of(drive).admission.log.reordered == 1


def test_past_max_wait_the_old_long_prefill_goes_first(drive):
    session = tokens(1, 600)
    make_resident(drive, session)
    now_s = time.time()
    drive.add("long", tokens(2, 3_000), arrival_s=now_s - 30)
    drive.add("resident", session + tokens(3, 20), arrival_s=now_s)
    drive.finish()
    assert drive.admitted == ["long", "resident"]
    assert runtime_of(drive).admission.log.by_reason[AdmissionReason.MAX_WAIT_REACHED.value] == 1


def test_readiness_is_older_than_arrival_by_the_identity_s_age(drive):
    from coda_engine.vllm_adapter.identity.table import RequestIdentity

    runtime = runtime_of(drive)
    now_s = time.time()
    runtime.identities.put("long", RequestIdentity(ready_age_ms=30_000.0), trusted=True)
    drive.add("short", tokens(3, 40), arrival_s=now_s)
    drive.add("long", tokens(2, 3_000), arrival_s=now_s)
    drive.finish()
    assert drive.admitted == ["long", "short"]


def test_a_request_that_does_not_fit_lets_others_pass_and_is_served_when_it_fits(drive):
    drive.add("holder", tokens(1, 3_000), max_tokens=40, arrival_s=time.time())
    drive.step()
    drive.add("huge", tokens(2, 4_000), arrival_s=time.time() - 60)
    drive.add("small", tokens(3, 100), arrival_s=time.time())
    drive.finish()
    assert drive.admitted == ["holder", "small", "huge"]
    assert runtime_of(drive).admission.refused_after_feasible == 0


def test_when_nothing_fits_the_native_head_stays_and_it_is_counted_once(drive):
    drive.add("holder", tokens(1, 3_000), max_tokens=40, arrival_s=time.time())
    drive.step()
    drive.add("huge", tokens(2, 4_000), arrival_s=time.time() - 60)
    drive.add("huger", tokens(3, 5_000), arrival_s=time.time())
    drive.finish()
    assert drive.admitted == ["holder", "huge", "huger"]
    counts = runtime_of(drive).admission.log.by_reason
    assert 1 <= counts[AdmissionReason.NOTHING_FEASIBLE.value] <= 2


def test_only_the_frontier_is_looked_at(vllm_config):
    scheduler = new_scheduler(vllm_config, 201)
    use_tiered_aging(attach(scheduler), frontier=2)
    drive = Drive(scheduler)
    now_s = time.time()
    drive.add("a", tokens(1, 1_500), arrival_s=now_s)
    drive.add("b", tokens(2, 1_000), arrival_s=now_s)
    drive.add("outside", tokens(3, 40), arrival_s=now_s)
    drive.finish()
    assert drive.admitted[0] == "b"


def test_a_settings_change_reorders_the_same_queue_without_a_restart(drive):
    session = tokens(1, 600)
    make_resident(drive, session)
    runtime = runtime_of(drive)
    runtime.apply_settings(settings_json(StateAdmissionPolicyName.FIFO))
    for policy, expected in (
        (StateAdmissionPolicyName.FIFO, ["long0", "resident0"]),
        (StateAdmissionPolicyName.TIERED_AGING, ["resident1", "long1"]),
    ):
        turn = len(expected) - 2 + (policy is StateAdmissionPolicyName.TIERED_AGING)
        runtime.apply_settings(settings_json(policy))
        drive.admitted.clear()
        drive.add(f"long{turn}", tokens(10 + turn, 2_000), arrival_s=time.time())
        drive.add(f"resident{turn}", session + tokens(20 + turn, 20), arrival_s=time.time())
        drive.finish()
        assert drive.admitted == expected
    state = runtime.capabilities.snapshot()[Feature.STATE_ADMISSION]
    assert (state.enabled, state.reason) == (True, Reason.ENABLED)


def churn(drive: Drive, seed: int, *, check) -> None:
    """Sessions return at random with longer prompts while memory is tight; some requests are aborted."""
    rng = random.Random(seed)
    sessions = [tokens(100 + number, rng.randrange(40, 900)) for number in range(8)]

    def act(step: int) -> None:
        if step < 150 and rng.random() < 0.5:
            prompt = rng.choice(sessions)
            prompt += tokens(step, rng.randrange(5, 150))
            del prompt[2_500:]
            age_s = rng.choice((0, 1, 5, 19, 21, 60))
            drive.add(
                f"r{len(drive.requests)}", list(prompt), max_tokens=rng.randrange(1, 80), arrival_s=time.time() - age_s
            )
        if rng.random() < 0.04 and drive.requests:
            drive.abort([rng.choice(list(drive.requests))])
        check()

    for number in range(20):
        drive.add(f"r{number}", list(rng.choice(sessions)), max_tokens=rng.randrange(1, 80), arrival_s=time.time())
    drive.finish(act)


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
@pytest.mark.parametrize("seed", range(5))
def test_under_churn_predictions_are_the_allocator_s_and_nobody_is_lost(vllm_config, scheduler_class, seed):
    scheduler = new_scheduler(vllm_config, 130, scheduler_class)
    runtime = attach(scheduler)
    use_tiered_aging(runtime)
    drive = Drive(scheduler)
    admission, inspector = runtime.admission, runtime.admission.inspector
    pool = scheduler.kv_cache_manager.block_pool

    def inspections_equal_vllm_s_own_answers() -> None:
        for request in scheduler.waiting:
            ready = inspector.inspect(request, inspector.capacity.room())
            hit = native_hit(scheduler, request)
            assert inspector.resident_tokens(request) == len(hit) * BLOCK_TOKENS
            watermark = scheduler.kv_cache_manager.watermark_blocks if scheduler.running else 0
            demand = inspector.capacity.native_demand(request, hit)
            assert ready.feasible == (demand + watermark <= pool.get_num_free_blocks())
            assert ready.additional_kv_blocks == -(-request.num_tokens // BLOCK_TOKENS) - len(hit)

    churn(drive, seed, check=inspections_equal_vllm_s_own_answers)
    finished = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED)
    assert all(status in finished for status in drive.statuses().values())
    assert len(drive.admitted) == len(set(drive.admitted))
    assert (admission.refused_after_feasible, admission.unconfirmed) == (0, 0)
    assert admission.log.reordered > 0
    assert not scheduler.waiting
    assert len(admission.inspector) == 0
    assert admission._index.registrations() == 0


@pytest.mark.parametrize("seed", range(3))
def test_past_max_wait_no_younger_feasible_request_overtakes(vllm_config, seed):
    scheduler = new_scheduler(vllm_config, 130)
    runtime = attach(scheduler)
    use_tiered_aging(runtime)
    inspector, queue = runtime.admission.inspector, scheduler.waiting
    drive = Drive(scheduler)
    overdue_seen = 0

    class Watching(FrontierQueue):
        """Checks each choice against everybody who waits."""

        def peek_request(self):
            head = super().peek_request()
            nonlocal overdue_seen
            now_ms, usable = time.time() * 1000.0, inspector.capacity.room()
            chosen = inspector.inspect(head, usable)
            if chosen.feasible and head.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED):
                for other in list(self)[:64]:
                    ready = inspector.inspect(other, usable)
                    # Half a second of slack: the choice was made a moment before this check.
                    if ready.feasible and now_ms - ready.ready_at_ms >= 20_500.0:
                        overdue_seen += 1
                        assert chosen.ready_at_ms <= ready.ready_at_ms
            return head

    queue.__class__ = Watching
    churn(drive, seed, check=lambda: None)
    assert overdue_seen > 0


def test_ten_thousand_steps_with_preemption_and_aborts_keep_every_block_and_request(vllm_config):
    scheduler = new_scheduler(vllm_config, 130)
    runtime = attach(scheduler)
    use_tiered_aging(runtime)
    runtime.apply_settings(settings_json(StateAdmissionPolicyName.CODA, max_wait_ms=200, on_time_ms=50))
    drive, rng, pool = Drive(scheduler), random.Random(7), scheduler.kv_cache_manager.block_pool
    sessions = [tokens(number, rng.randrange(40, 900)) for number in range(16)]
    over, added, preempted = set(), 0, 0
    for step in range(10_000):
        if len(scheduler.requests) < 24 and rng.random() < 0.5:
            prompt = rng.choice(sessions)
            prompt += tokens(step, rng.randrange(5, 150))
            del prompt[2_500:]
            drive.add(f"r{added}", list(prompt), max_tokens=rng.randrange(1, 80), arrival_s=time.time())
            added += 1
        if drive.requests and rng.random() < 0.02:
            drive.abort([rng.choice(list(drive.requests))])
        drive.step()
        held = {block for name in scheduler.requests for block in scheduler.kv_cache_manager.get_block_ids(name)[0]}
        assert len(held) + pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        for name in [name for name, request in drive.requests.items() if request.is_finished()]:
            preempted += drive.requests.pop(name).num_preemptions
            over.add(name)
    drive.finish()
    assert over | set(drive.requests) == {f"r{number}" for number in range(added)}
    admission = runtime.admission
    assert (admission.refused_after_feasible, admission.unconfirmed) == (0, 0)
    assert len(admission.inspector) == admission._index.registrations() == 0
    assert preempted > 10
    assert admission.log.by_reason[AdmissionReason.RESERVED_FOR_OLDEST.value] > 0
    assert runtime.capabilities.snapshot()[Feature.STATE_ADMISSION].enabled


def test_freed_blocks_gather_for_the_oldest_once_it_has_waited_max_wait(drive):
    runtime_of(drive).apply_settings(settings_json(StateAdmissionPolicyName.CODA, max_wait_ms=20_000))
    for number in range(2):
        holder = drive.add(f"holder{number}", tokens(number, 2_000), max_tokens=60, arrival_s=time.time())
        while not holder.num_output_tokens:
            drive.step()
    drive.add("large", tokens(10, 5_000), arrival_s=time.time() - 30)
    for number in range(20):
        drive.step()
        drive.add(f"small{number}", tokens(20 + number, 300), max_tokens=40, arrival_s=time.time())
    drive.finish()
    assert drive.admitted[:3] == ["holder0", "holder1", "large"]
    counts = runtime_of(drive).admission.log.by_reason
    assert counts[AdmissionReason.RESERVED_FOR_OLDEST.value] == 1
    assert counts[AdmissionReason.MAX_WAIT_REACHED.value] == 1
    assert runtime_of(drive).admission.refused_after_feasible == 0


def test_a_promoted_request_that_is_passed_over_goes_back_to_where_it_arrived():
    class Promotes:
        reorders = True

        def choose(self, waiting):
            return promoted

        def popped(self, request):
            pass

        def removed(self, requests):
            pass

    requests = [request_that_arrived(second) for second in range(5)]
    promoted = requests[3]
    queue = FrontierQueue(Promotes(), requests)
    passed_over = [queue.pop_request() for _ in range(1) if queue.peek_request() is promoted]
    queue.prepend_requests(passed_over)
    assert list(queue) == requests
    assert queue.peek_request() is promoted
    queue.reconsider()
    assert list(queue) == requests


def request_that_arrived(second: int) -> Request:
    return Request(f"r{second}", [1, 2, 3], SamplingParams(max_tokens=1), None, arrival_time=float(second))


def test_an_aborted_waiting_request_is_forgotten(drive):
    holder = drive.add("holder", tokens(1, 3_000), max_tokens=40, arrival_s=time.time())
    while not holder.num_output_tokens:
        drive.step()
    drive.add("leaving", tokens(2, 4_000), arrival_s=time.time())
    drive.step()
    assert len(runtime_of(drive).admission.inspector) > 0
    drive.abort(["leaving"])
    assert len(runtime_of(drive).admission.inspector) == 0
    drive.finish()
    assert drive.admitted == ["holder"]


def test_an_error_in_the_selection_switches_it_off_and_the_engine_serves_on(drive, monkeypatch):
    runtime = runtime_of(drive)

    def explode(request):
        raise RuntimeError("a bug in the cost model")

    monkeypatch.setattr(runtime.admission.inspector.capacity, "hit_limit", explode)
    drive.add("one", tokens(1, 200), arrival_s=time.time())
    drive.add("two", tokens(2, 100), arrival_s=time.time())
    drive.finish()
    assert drive.admitted == ["one", "two"]
    state = runtime.capabilities.snapshot()[Feature.STATE_ADMISSION]
    assert (state.enabled, state.reason) == (False, Reason.INTERNAL_ERROR)
    assert "a bug in the cost model" in state.detail


def test_settings_cannot_reopen_a_feature_that_failed(drive):
    runtime = runtime_of(drive)
    runtime._admission_failed(RuntimeError("once"))
    runtime.apply_settings(settings_json(tau_ms=7))
    assert not runtime.capabilities.snapshot()[Feature.STATE_ADMISSION].enabled
    assert runtime.admission.plan.policy is None
