"""The victim window on real vLLM schedulers: whose blocks go, that none is lost, and that off means stock."""

import random
from collections import Counter

import pytest
from scheduler_harness import BLOCK_TOKENS, Drive, attach, new_scheduler
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from coda_engine.contract.reasons import Feature, Reason, VictimReason
from coda_engine.contract.settings import AdmissionSettings, ReclaimPolicyName, ReclaimSettings, Settings
from coda_engine.policy.reclaim import ToolAware
from coda_engine.vllm_adapter.identity.table import RequestIdentity
from coda_engine.vllm_adapter.reclaim.owners import NOBODY, BlockOwners
from coda_engine.vllm_adapter.reclaim.reclaim import Reclaim
from coda_engine.vllm_adapter.reclaim.window import ReclaimPlan
from coda_engine.vllm_adapter.runtime import EngineRuntime

READ, TEST = ["Read", "read"], ["Bash", "test"]


def tokens(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(1_000) for _ in range(count)]


def reclaim_json(policy: ReclaimPolicyName, window_blocks: int = 4_096, *, learn_online: bool = False) -> str:
    reclaim = ReclaimSettings(policy=policy, window_blocks=window_blocks, learn_online=learn_online)
    return Settings(admission=AdmissionSettings(reclaim=reclaim)).model_dump_json(by_alias=True)


class Served:
    """An engine with reclaim, its own clock, and a shadow that holds what the test says (default: everything)."""

    def __init__(self, vllm_config, blocks: int, window_blocks: int = 4_096):
        self.now_s = 1_000.0
        self.scheduler = new_scheduler(vllm_config, blocks)
        self.runtime = attach(self.scheduler)
        self.reclaim: Reclaim = self.runtime.reclaim
        self.reclaim.gaps._clock = self.reclaim.window._clock = lambda: self.now_s
        self.published = lambda _key: True
        self.reclaim.window._published = lambda: self.published
        self.reclaim.window.use(ReclaimPlan(ToolAware(), window_blocks))
        self.drive = Drive(self.scheduler)

    @property
    def pool(self):
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def victims(self) -> dict[str, int]:
        return self.reclaim.window.victims

    def start(self, session: str, prompt: list[int], max_tokens: int = 1) -> str:
        name = f"r{len(self.drive.requests)}"
        self.runtime.identities.put(name, RequestIdentity(session_key=session), trusted=True)
        self.drive.add(name, prompt, max_tokens=max_tokens)
        return name

    def serve(self, session: str, prompt: list[int], tools=None) -> None:
        """Serve one turn to its end; ``tools``: what its reply calls (None: nobody says)."""
        self.start(session, prompt)
        self.drive.finish()
        if tools is not None:
            self.reclaim.turn_ended(session, tools)
        self.now_s += 1.0

    def resident(self, prompt: list[int]) -> list[bool]:
        """Return which of a prompt's full blocks are cached."""
        request = self.drive.add(f"probe{len(self.drive.requests)}", [*prompt, 0])
        self.drive.abort([request.request_id])
        self.drive.finish()
        look_up = self.pool.get_cached_block
        return [look_up(block_hash, [0]) is not None for block_hash in request.block_hashes]


@pytest.fixture
def served(vllm_config):
    return Served(vllm_config, 41)


def test_the_session_that_waits_for_the_longer_tool_goes_first_though_it_was_used_last(served):
    reads, tests = tokens(1, 320), tokens(2, 320)
    served.serve("reads", reads, [READ])
    served.serve("tests", tests, [TEST])
    served.serve("new", tokens(3, 30 * BLOCK_TOKENS))
    assert served.resident(reads) == [True] * 10
    assert served.resident(tests) == [False] * 10
    assert served.victims == {VictimReason.PREDICTED_IDLE.value: 10}


def test_its_deepest_blocks_go_first(served):
    tests = tokens(2, 320)
    served.serve("reads", tokens(1, 320), [READ])
    served.serve("tests", tests, [TEST])
    served.serve("new", tokens(3, 23 * BLOCK_TOKENS))
    assert served.resident(tests) == [True] * 7 + [False] * 3
    assert served.victims == {VictimReason.PREDICTED_IDLE.value: 3}


def test_a_session_that_a_person_answers_goes_before_one_that_waits_for_a_tool(served):
    answered, tests = tokens(1, 320), tokens(2, 320)
    served.serve("tests", tests, [TEST])
    served.serve("answered", answered, [])
    served.serve("new", tokens(3, 25 * BLOCK_TOKENS))
    assert served.resident(answered) == [True] * 5 + [False] * 5
    assert served.resident(tests) == [True] * 10


def test_blocks_without_content_are_used_before_any_cached_one_goes(served):
    served.serve("tests", tokens(2, 320), [TEST])
    served.serve("new", tokens(3, 29 * BLOCK_TOKENS))
    assert served.victims == {}
    assert served.reclaim.window.looks == 0


def test_shared_blocks_keep_native_order(served):
    system = tokens(9, 160)
    one, two = system + tokens(1, 160), system + tokens(2, 160)
    served.serve("one", one, [TEST])
    served.serve("two", two, [TEST])
    served.serve("new", tokens(3, 30 * BLOCK_TOKENS))
    assert served.resident(one) == [True] * 5 + [False] * 5
    assert served.resident(two)[:5] == [True] * 5
    assert served.victims == {VictimReason.PREDICTED_IDLE.value: 5}
    served.serve("newer", tokens(4, 35 * BLOCK_TOKENS))
    assert served.victims[VictimReason.SHARED.value] > 0


def test_unpublished_blocks_keep_native_order(served):
    reads, tests = tokens(1, 320), tokens(2, 320)
    served.published = lambda _key: False
    served.serve("reads", reads, [READ])
    served.serve("tests", tests, [TEST])
    served.serve("new", tokens(3, 30 * BLOCK_TOKENS))
    assert served.resident(reads) == [False] * 10
    assert served.resident(tests) == [True] * 10
    assert served.victims == {VictimReason.NOT_PUBLISHED.value: 10}


def test_without_a_shadow_everything_is_native(served):
    reads = tokens(1, 320)
    served.reclaim.window._published = lambda: None
    served.serve("reads", reads, [READ])
    served.serve("tests", tokens(2, 320), [TEST])
    served.serve("new", tokens(3, 30 * BLOCK_TOKENS))
    assert served.resident(reads) == [False] * 10
    assert set(served.victims) == {VictimReason.NOT_PUBLISHED.value}


def test_a_session_of_which_nobody_said_anything_keeps_native_order(served):
    unknown, reads = tokens(1, 320), tokens(2, 320)
    served.serve("unknown", unknown, None)
    served.serve("reads", reads, [READ])
    served.serve("new", tokens(3, 30 * BLOCK_TOKENS))
    assert served.resident(unknown) == [True] * 10
    served.serve("newer", tokens(4, 38 * BLOCK_TOKENS))
    assert served.victims == {VictimReason.PREDICTED_IDLE.value: 10, VictimReason.NO_PREDICTION.value: 38}


def test_a_session_that_has_come_back_is_not_chosen(served):
    reads, tests = tokens(1, 320), tokens(2, 320)
    served.serve("reads", reads, [READ])
    served.serve("tests", tests, [TEST])
    served.drive.scheduler.max_num_running_reqs = 1
    served.start("new", tokens(3, 30 * BLOCK_TOKENS))
    served.start("tests", tests + tokens(5, 40))
    served.drive.finish()
    assert served.victims[VictimReason.PREDICTED_IDLE.value] == 10
    assert served.resident(reads) == [False] * 10


def test_a_ranking_does_not_outlive_its_sessions_gap(served):
    tests = tokens(2, 320)
    served.serve("reads", tokens(1, 320), [READ])
    served.serve("tests", tests, [TEST])
    served.serve("new", tokens(3, 21 * BLOCK_TOKENS))
    assert served.victims == {VictimReason.PREDICTED_IDLE.value: 1}
    ranked = list(served.reclaim.window._ranked)
    assert len(ranked) == 19
    served.now_s -= 1.0
    served.serve("tests", tests + tokens(5, 40), [READ])
    good = [one for one in ranked if served.reclaim.window._still_good(one, served.published)]
    assert {candidate[-1].session for candidate in good} == {"reads"}


def test_only_the_window_is_looked_at(vllm_config):
    served = Served(vllm_config, 41, window_blocks=10)
    reads, tests = tokens(1, 320), tokens(2, 320)
    served.serve("reads", reads, [READ])
    served.serve("tests", tests, [TEST])
    served.serve("new", tokens(3, 25 * BLOCK_TOKENS))
    assert served.resident(reads) == [True] * 5 + [False] * 5
    assert served.resident(tests) == [True] * 10


def test_the_next_look_waits_until_looks_are_two_percent_of_the_time(served):
    ticks = iter(range(10**6))
    served.reclaim.window._clock = lambda: served.now_s + next(ticks) * 1e-3
    served.serve("tests", tokens(2, 320), [TEST])
    served.serve("new", tokens(3, 38 * BLOCK_TOKENS))
    window = served.reclaim.window
    assert window.looks == 1
    assert window._next_look_s == pytest.approx(window._ranked_until_s - 0.5 + 49 * window.look_seconds)


def test_an_error_in_a_choice_closes_the_feature_and_serving_goes_on(served):
    class Broken(ToolAware):
        def rank(self, session):
            raise RuntimeError("broken order")

    served.reclaim.window.use(ReclaimPlan(Broken(), 4_096))
    served.serve("tests", tokens(2, 320), [TEST])
    served.serve("new", tokens(3, 38 * BLOCK_TOKENS))
    capability = served.runtime.capabilities.snapshot()[Feature.RECLAIM]
    assert (capability.enabled, capability.reason) == (False, Reason.INTERNAL_ERROR)
    check_pool(served.scheduler)
    assert "digest" in served.runtime.apply_settings(reclaim_json(ReclaimPolicyName.IDLENESS))
    assert served.reclaim.window._plan.order is None


@pytest.mark.parametrize(
    ("policy", "window", "reason"),
    [
        (ReclaimPolicyName.TOOL_AWARE, 4_096, Reason.NOT_AVAILABLE),
        (ReclaimPolicyName.LRU, 4_096, Reason.DISABLED_BY_SETTINGS),
        (ReclaimPolicyName.IDLENESS, 0, Reason.DISABLED_BY_SETTINGS),
        (ReclaimPolicyName.IDLENESS, 16, Reason.ENABLED),
        (ReclaimPolicyName.CACHEWISE, 16, Reason.NOT_AVAILABLE),
    ],
)
def test_the_capability_says_what_runs_and_what_is_missing(vllm_config, policy, window, reason):
    runtime = attach(new_scheduler(vllm_config, 41))
    runtime.apply_settings(reclaim_json(policy, window))
    capability = runtime.capabilities.snapshot()[Feature.RECLAIM]
    assert (capability.enabled, capability.reason) == (reason is Reason.ENABLED, reason)


def test_cachewise_runs_once_the_api_process_sees_tools(vllm_config):
    runtime = attach(new_scheduler(vllm_config, 41))
    runtime.apply_settings(reclaim_json(ReclaimPolicyName.CACHEWISE))
    runtime.tools_seen("no tool parser is configured")
    assert "tool parser" in runtime.capabilities.snapshot()[Feature.RECLAIM].detail
    runtime.tools_seen("")
    assert runtime.capabilities.snapshot()[Feature.RECLAIM].enabled


def test_whoever_tells_of_a_turn_sees_tools(vllm_config):
    runtime = attach(new_scheduler(vllm_config, 41))
    runtime.apply_settings(reclaim_json(ReclaimPolicyName.CACHEWISE))
    runtime.tools_seen("no tool parser is configured")
    runtime.turn_ended("s", [["Bash", "test"]])
    assert runtime.capabilities.snapshot()[Feature.RECLAIM].enabled


# Nothing lost, nothing changed when off --------------------------------------------------------------------


def check_pool(scheduler: Scheduler) -> None:
    """Assert that free and used blocks together are all, and that the free queue is a sound list."""
    pool = scheduler.kv_cache_manager.block_pool
    queue = pool.free_block_queue
    free = queue.get_all_free_blocks()
    assert len(free) == queue.num_free_blocks == len({block.block_id for block in free})
    assert all(block.ref_cnt == 0 and not block.is_null for block in free)
    backwards, block = [], queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head:
        backwards.append(block)
        block = block.prev_free_block
    assert backwards[::-1] == free
    used = [block for block in pool.blocks if block.ref_cnt > 0 or block.is_null]
    assert len(free) + len(used) == pool.num_gpu_blocks


def run_script(scheduler: Scheduler, runtime: EngineRuntime | None, seed: int, steps: int, *, told: bool = True):
    """Run sessions that return, call tools, are aborted and preempted; return every request's blocks at each step."""
    rng = random.Random(seed)
    drive = Drive(scheduler)
    system = [rng.randrange(1_000) for _ in range(96)]
    sessions = [system * rng.randrange(2) + [rng.randrange(1_000) for _ in range(100)] for _ in range(12)]
    owner: dict[str, int] = {}
    blocks, preempted = [], 0
    kinds = ["read", "test", "build", "human", None]
    for number in range(steps):
        if rng.random() < 0.25 and len(scheduler.requests) < 12:
            chosen = rng.randrange(len(sessions))
            sessions[chosen] += [rng.randrange(1_000) for _ in range(rng.randrange(5, 120))]
            if len(sessions[chosen]) > 1_500:
                del sessions[chosen][300:]
            name = f"r{len(owner)}"
            owner[name] = chosen
            if runtime is not None:
                runtime.identities.put(name, RequestIdentity(session_key=f"s{chosen}"), trusted=True)
            drive.add(name, list(sessions[chosen]), max_tokens=rng.randrange(1, 200), arrival_s=float(number))
        if rng.random() < 0.03 and scheduler.requests:
            drive.abort([rng.choice(sorted(scheduler.requests))])
        before = set(scheduler.requests)
        drive.step()
        preempted += sum(request.num_preemptions > 0 for request in scheduler.running)
        for name in sorted(before - set(scheduler.requests)):
            kind = rng.choice(kinds)
            if runtime is not None and told and kind is not None:
                runtime.reclaim.turn_ended(f"s{owner[name]}", [] if kind == "human" else [["tool", kind]])
        chains = scheduler.kv_cache_manager.coordinator.single_type_managers[0].req_to_blocks
        blocks.append({name: [block.block_id for block in chain] for name, chain in chains.items()})
        check_pool(scheduler)
    return blocks, drive.trace, preempted


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
@pytest.mark.parametrize(
    ("policy", "window", "told"),
    [
        (ReclaimPolicyName.TOOL_AWARE, 0, True),
        (ReclaimPolicyName.IDLENESS, 0, True),
        (ReclaimPolicyName.LRU, 4_096, True),
        (ReclaimPolicyName.CACHEWISE, 4_096, False),
    ],
)
def test_off_or_knowing_nothing_every_block_is_the_one_that_stock_would_take(
    vllm_config, scheduler_class, policy, window, told
):
    stock = run_script(new_scheduler(vllm_config, 150, scheduler_class), None, 7, 1_500)
    scheduler = new_scheduler(vllm_config, 150, scheduler_class)
    runtime = attach(scheduler)
    runtime.tools_seen("")
    assert "digest" in runtime.apply_settings(reclaim_json(policy, window))
    assert run_script(scheduler, runtime, 7, 1_500, told=told) == stock
    assert stock[2] > 0
    assert VictimReason.PREDICTED_IDLE.value not in runtime.reclaim.window.victims


@pytest.mark.parametrize(
    "policy", [ReclaimPolicyName.TOOL_AWARE, ReclaimPolicyName.CACHEWISE, ReclaimPolicyName.IDLENESS]
)
@pytest.mark.parametrize("window", [8, 4_096])
def test_no_block_is_lost_over_thousands_of_steps_with_preemption_and_aborts(vllm_config, policy, window):
    scheduler = new_scheduler(vllm_config, 150)
    runtime = attach(scheduler)
    runtime.tools_seen("")
    runtime.reclaim.window._published = lambda: lambda key: key[0] % 4 != 0
    runtime.apply_settings(reclaim_json(policy, window, learn_online=True))
    if policy is ReclaimPolicyName.TOOL_AWARE:
        runtime.reclaim.window.use(ReclaimPlan(ToolAware(), window))
    _, _, preempted = run_script(scheduler, runtime, 11, 2_000)
    assert preempted > 0
    victims = Counter(runtime.reclaim.window.victims)
    assert victims[VictimReason.PREDICTED_IDLE.value] > 100
    assert len(runtime.reclaim.gaps) == 12
    assert not runtime.capabilities.is_closed(Feature.RECLAIM)
    gaps = runtime.reclaim.gaps
    assert set(gaps._live) == set(scheduler.requests)


# Owners ------------------------------------------------------------------------------------------------------


def chain(*names: str) -> list[KVCacheBlock]:
    """Return blocks numbered from 0 with these hashes; "" = none yet."""
    blocks = [KVCacheBlock(number) for number in range(len(names))]
    for block, name in zip(blocks, names, strict=True):
        if name:
            block.set_block_hash(name.encode(), num_tokens=BLOCK_TOKENS)
    return blocks


def test_a_claimed_block_is_its_session_s_as_long_as_it_carries_the_hash():
    owners, blocks = BlockOwners(3), chain("a", "b", "")
    owners.claim("s", blocks)
    assert [owners.owner(block) for block in blocks] == ["s", "s", NOBODY]
    assert owners.depth(blocks[1]) == 1
    blocks[1].reset_hash()
    blocks[1].set_block_hash(b"other", num_tokens=BLOCK_TOKENS)
    assert owners.owner(blocks[1]) == NOBODY


def test_a_block_that_another_session_uses_becomes_nobody_s_with_those_before_it():
    owners, blocks = BlockOwners(4), chain("a", "b", "c", "d")
    owners.claim("first", blocks[:3])
    owners.claim("second", [blocks[0], blocks[1], blocks[3]])
    assert [owners.owner(block) for block in blocks] == [NOBODY, NOBODY, "first", "second"]
    owners.claim("first", blocks[:3])
    assert owners.owner(blocks[0]) == NOBODY


def test_a_turn_claims_its_new_blocks_only():
    owners, blocks = BlockOwners(4), chain("a", "b", "c", "d")
    owners.claim("s", blocks[:2])
    read = []

    class Counted(list):
        def __getitem__(self, index):
            read.append(index)
            return super().__getitem__(index)

    owners.claim("s", Counted(blocks))
    assert read == [3, 2, 1]


def test_blocks_of_a_request_without_a_session_are_nobody_s():
    owners, blocks = BlockOwners(3), chain("a", "b", "c")
    owners.claim("s", blocks[:2])
    owners.claim(NOBODY, blocks)
    assert {owners.owner(block) for block in blocks} == {NOBODY}
