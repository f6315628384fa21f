"""The CPU shadow in a real engine: real forward passes, real pages, the answers compared with those of HBM hits."""

import pytest
from engine_harness import tokens
from shadow_engine_harness import BLOCK_BYTES, BLOCK_TOKENS, ShadowEngine, flip_a_byte, shadow_folder
from vllm.v1.request import RequestStatus

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.vllm_adapter.scheduler.shadow_residency import shadow_key
from coda_engine.vllm_adapter.shadow.manager import FAILED_LOADS_PER_REQUEST

SHADOW_BLOCKS = 200
PROMPT_BLOCKS = 12
"""Whole blocks of the fixture ``prompt``."""


@pytest.fixture(scope="module")
def engine(model_folder):
    """One engine for the module (12 s)."""
    with shadow_folder() as folder, ShadowEngine.running(model_folder, folder, SHADOW_BLOCKS) as built:
        yield built


@pytest.fixture
def fresh(engine):
    """The engine with nothing in HBM; nothing may be held when the test is over."""
    engine.renew()
    yield engine
    assert set(engine.leftovers().values()) == {0}, engine.leftovers()
    assert not engine.runtime.capabilities.is_closed(Feature.KV_SHADOW)


@pytest.fixture
def unique(request):
    """Prompts that no other test has published."""
    return lambda seed, count: tokens(f"{request.node.name} {seed}", count)


@pytest.fixture
def prompt(unique):
    """A prompt of 12 whole blocks and a rest."""
    return unique(1, 400)


def prompt_keys(engine, prompt):
    """The shadow's keys of a prompt's whole blocks, hashed as the engine hashes them."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

    request = EngineCoreRequest(
        request_id="keys",
        prompt_token_ids=prompt,
        mm_features=None,
        sampling_params=SamplingParams(),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    hashes = Request.from_engine_core_request(request, engine.core.request_block_hasher).block_hashes
    return [shadow_key(block_hash) for block_hash in hashes]


def test_the_plug_in_configured_the_shadow_and_says_so(fresh):
    state = fresh.runtime.capabilities.snapshot()[Feature.KV_SHADOW]
    assert (state.enabled, state.reason) == (True, Reason.ENABLED)
    assert fresh.connector.coda_shadow.page_bytes_all_ranks == BLOCK_BYTES
    assert fresh.statistics.capacity_pages == SHADOW_BLOCKS


def test_a_restored_prefix_is_answered_as_from_an_hbm_hit(fresh, prompt):
    fresh.answer("cold", prompt)
    from_hbm = fresh.answer("hbm", prompt)
    assert fresh.manager.counters.restored == 0
    fresh.forget_hbm()
    restored = fresh.answer("restored", prompt)
    assert restored == from_hbm
    assert fresh.manager.counters.restored == PROMPT_BLOCKS


def test_generated_tokens_are_published_as_well_as_prompts(fresh, prompt, unique):
    answer = fresh.answer("first", prompt, max_tokens=90)
    second = prompt + answer + unique(2, 20)
    fresh.answer("warm", second)
    from_hbm = fresh.answer("hbm", second)
    fresh.forget_hbm()
    before = fresh.manager.counters.restored
    assert fresh.answer("restored", second) == from_hbm
    assert fresh.manager.counters.restored - before == len(second) // BLOCK_TOKENS
    assert len(second) // BLOCK_TOKENS > PROMPT_BLOCKS + 2


def test_only_what_hbm_misses_is_restored(fresh, prompt):
    fresh.answer("long", prompt)
    fresh.forget_hbm()
    fresh.answer("head", prompt[: 5 * BLOCK_TOKENS + 1], max_tokens=1)
    before = fresh.manager.counters.restored
    fresh.answer("again", prompt)
    assert fresh.manager.counters.restored - before == PROMPT_BLOCKS - 5


def test_another_engine_on_the_node_restores_what_the_first_published(fresh, prompt):
    fresh.answer("cold", prompt)
    from_hbm = fresh.answer("hbm", prompt)
    fresh.renew()
    assert fresh.answer("restored", prompt) == from_hbm
    assert fresh.manager.counters.restored == PROMPT_BLOCKS


def test_a_prompt_of_several_chunks_is_published_chunk_by_chunk_and_restored_at_once(fresh, unique):
    prompt = unique(3, 900)
    published = []
    fresh.serve({0: [("cold", prompt, 2)]}, act=lambda step: published.append(fresh.statistics.published))
    assert sorted(set(published))[:3] == [0, 8, 16]
    from_hbm = fresh.answer("hbm", prompt)
    fresh.forget_hbm()
    assert fresh.answer("restored", prompt) == from_hbm
    assert fresh.manager.counters.restored == 28


def half_warm_answer(engine, prompt, blocks):
    """The answer when exactly the first blocks come from HBM: what a restore that stops there must equal."""
    engine.forget_hbm()
    engine.manager.index, index = None, engine.manager.index
    engine.answer("head", prompt[: blocks * BLOCK_TOKENS + 1], max_tokens=1)
    answer = engine.answer("reference", prompt)
    engine.manager.index = index
    engine.forget_hbm()
    return answer


def test_a_page_with_a_flipped_byte_is_recomputed_counted_and_published_again(fresh, prompt):
    fresh.answer("cold", prompt)
    reference = half_warm_answer(fresh, prompt, 5)
    key = prompt_keys(fresh, prompt)[5]
    flip_a_byte(fresh, key)
    assert fresh.answer("damaged", prompt) == reference
    counters = fresh.manager.counters
    assert (counters.bad, counters.failed_loads, fresh.statistics.poisoned) == (1, 1, fresh.statistics.poisoned)
    assert fresh.manager.index.ready(key)
    fresh.forget_hbm()
    before = counters.restored
    assert fresh.answer("healed", prompt) == reference
    assert (counters.restored - before, counters.bad) == (PROMPT_BLOCKS, 1)


def test_a_flipped_byte_in_the_first_page_starts_the_prompt_anew(fresh, prompt):
    fresh.answer("cold", prompt)
    flip_a_byte(fresh, prompt_keys(fresh, prompt)[0], offset=BLOCK_BYTES - 1)
    fresh.forget_hbm()
    run = fresh.serve({0: [("damaged", prompt, 8)]})
    assert run.finished == ["damaged"]
    assert fresh.manager.counters.bad == 1
    assert all(fresh.manager.index.ready(key) for key in prompt_keys(fresh, prompt))


@pytest.mark.parametrize("fails_at", [1, 7, 12])
def test_a_load_that_fails_once_half_way_is_recomputed_from_there(fresh, prompt, monkeypatch, fails_at):
    fresh.answer("cold", prompt)
    reference = half_warm_answer(fresh, prompt, fails_at - 1)
    calls, intact = [], fresh.worker._pages.intact

    def fails_once(ref, copy=None):
        calls.append(ref)
        return len(calls) != fails_at and intact(ref)

    monkeypatch.setattr(fresh.worker._pages, "intact", fails_once)
    assert fresh.answer("half-way", prompt) == reference
    assert fresh.manager.counters.failed_loads == 1


def test_loads_that_always_fail_cost_a_few_attempts_and_no_answer(fresh, prompt, unique, monkeypatch):
    fresh.answer("cold", prompt)
    fresh.forget_hbm()

    def breaks(page, block):
        raise OSError("no such memory")

    monkeypatch.setattr(fresh.worker._copies, "from_page", breaks)
    run = fresh.serve({0: [("a", prompt, 4)], 3: [("b", prompt + unique(4, 40), 4)]})
    assert sorted(run.finished) == ["a", "b"]
    assert 1 <= fresh.manager.counters.failed_loads <= 2 * FAILED_LOADS_PER_REQUEST
    assert fresh.manager.counters.restored == 0


def test_a_vanished_page_is_recomputed(fresh, prompt, monkeypatch):
    fresh.answer("cold", prompt)
    fresh.forget_hbm()
    index, gone = fresh.manager.index, prompt_keys(fresh, prompt)[4]
    pin = index.pin
    monkeypatch.setattr(index, "pin", lambda keys: None if gone in keys else pin(keys))
    run = fresh.serve({0: [("a", prompt, 4)]})
    assert run.finished == ["a"]
    assert (fresh.manager.counters.vanished, fresh.manager.counters.bad) == (1, 0)


def test_a_key_that_can_never_be_pinned_does_not_keep_its_request_for_ever(fresh, prompt, monkeypatch):
    fresh.answer("cold", prompt)
    fresh.forget_hbm()
    monkeypatch.setattr(fresh.manager.index, "pin", lambda keys: None)
    run = fresh.serve({0: [("a", prompt, 4)]})
    assert run.finished == ["a"]
    assert fresh.manager.counters.failed_loads == FAILED_LOADS_PER_REQUEST


def test_a_store_that_fails_gives_its_page_back_and_the_next_turn_publishes_it(fresh, prompt, monkeypatch):
    seal, sealed = fresh.worker._pages.seal, []

    def fails_first(ref):
        sealed.append(ref)
        if len(sealed) == 3:
            raise OSError("no such memory")
        seal(ref)

    monkeypatch.setattr(fresh.worker._pages, "seal", fails_first)
    fresh.answer("cold", prompt)
    key = prompt_keys(fresh, prompt)[2]
    assert fresh.manager.counters.unwritten == 1
    assert not fresh.manager.index.ready(key)
    fresh.answer("again", prompt)
    assert fresh.manager.index.ready(key)


def hold_loads(engine, monkeypatch, steps):
    """Let loads end that many steps later, as transfers beside the execution do."""
    ended, held = engine.worker._ended, []

    def later():
        held.append((steps, ended()))
        due = [outcome for left, outcomes in held for outcome in outcomes if left <= 0 or not is_load(outcome)]
        held[:] = [(left - 1, [o for o in outcomes if left > 0 and is_load(o)]) for left, outcomes in held]
        return due

    def is_load(outcome):
        job = engine.connector.scheduler._jobs.get(outcome.job_id)
        return job is not None and not job.is_store

    monkeypatch.setattr(engine.worker, "_ended", later)


def test_a_request_that_is_aborted_during_its_load_leaves_nothing(fresh, prompt, unique, monkeypatch):
    fresh.answer("cold", prompt)
    fresh.forget_hbm()
    hold_loads(fresh, monkeypatch, steps=3)
    seen = []

    def abort(step):
        pending = [r for r in fresh.core.scheduler.requests.values() if r.request_id.startswith("gone")]
        if step == 1 and pending:
            seen.append((pending[0].status, fresh.manager.outstanding_restore_bytes))
            fresh.llm.llm_engine.abort_request(["gone"])

    fresh.serve({0: [("gone", prompt, 4), ("other", unique(5, 100), 8)]}, act=abort)
    assert seen == [(RequestStatus.WAITING_FOR_REMOTE_KVS, PROMPT_BLOCKS * BLOCK_BYTES)]


def test_a_request_under_restore_does_not_keep_others_from_running(fresh, prompt, unique, monkeypatch):
    fresh.answer("cold", prompt)
    fresh.forget_hbm()
    hold_loads(fresh, monkeypatch, steps=5)
    run = fresh.serve({0: [("restoring", prompt, 2), ("quick", unique(6, 60), 2)]})
    assert run.finished == ["quick", "restoring"]


def test_the_transfers_that_waiting_requests_are_passed_over_for_are_told(fresh, prompt, unique, monkeypatch):
    fresh.answer("cold", prompt)
    fresh.forget_hbm()
    hold_loads(fresh, monkeypatch, steps=2)
    shadow, told = fresh.connector.coda_shadow, []

    def is_passed_over(request):
        keys = {shadow_key(block_hash) for block_hash in request.block_hashes}
        return shadow.has_transfers(request.request_id) or not keys.isdisjoint(shadow.keys_being_restored)

    def look(step):
        waiting = [r for r in fresh.core.scheduler.requests.values() if r.status != RequestStatus.RUNNING]
        told.append({r.request_id.split("-")[0]: is_passed_over(r) for r in waiting})

    own, other = (name_and_prompt for name_and_prompt in (("a", prompt), ("b", prompt + unique(7, 30))))
    large = unique(8, 4_000)
    fresh.serve({0: [(*own, 2), (*other, 2)], 1: [("large", large, 1), ("late", unique(9, 900), 1)]}, act=look)
    assert told[0] == {"a": True, "b": True}
    assert {"late": False}.items() <= told[1].items()
    assert not any("b" in pending and pending["b"] for pending in told[4:])


def test_preempted_requests_come_back_from_the_shadow(fresh, unique):
    count, length, generated = 8, 480, 140
    script = {0: [(f"r{number}", unique(20 + number, length), generated) for number in range(count)]}
    free = []
    pool = fresh.core.scheduler.kv_cache_manager.block_pool
    run = fresh.serve(script, act=lambda step: free.append(pool.get_num_free_blocks()))
    assert sorted(run.finished) == sorted(f"r{number}" for number in range(count))
    assert all(len(run.outputs[name]) == generated for name in run.outputs)
    assert sum(request.startswith("r") for request in run.admitted) == count
    assert fresh.manager.counters.restored > 0, "nothing was preempted: the test's load is too small"


def test_restores_under_memory_pressure_all_end(fresh, unique, monkeypatch):
    prompts = [unique(40 + number, 1_000) for number in range(6)]
    for number, prompt in enumerate(prompts[:4]):
        fresh.answer(f"warm{number}", prompt, max_tokens=1)
    fresh.forget_hbm()
    hold_loads(fresh, monkeypatch, steps=2)
    holding = []
    script = {0: [(f"r{number}", prompt, 40) for number, prompt in enumerate(prompts)]}
    run = fresh.serve(script, act=lambda step: holding.append(len(fresh.core.scheduler.kv_holding_waiting)))
    assert len(run.finished) == 6
    assert max(holding) >= 2


def test_a_full_shadow_evicts_and_goes_on(fresh, unique):
    for number in range(9):
        fresh.answer(f"r{number}", unique(60 + number, 800), max_tokens=1)
    statistics = fresh.statistics
    assert statistics.evicted >= 9 * 25 - SHADOW_BLOCKS
    assert statistics.used_pages <= SHADOW_BLOCKS


def test_a_tenants_salt_keeps_its_pages_apart(fresh, prompt):
    from vllm import SamplingParams

    engine = fresh.llm.llm_engine
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for name, salt in (("first", "a"), ("second", "b")):
        engine.add_request(name, {"prompt_token_ids": prompt, "cache_salt": salt}, params)
        while engine.has_unfinished_requests():
            engine.step()
        fresh.drain()
        fresh.forget_hbm()
    assert fresh.manager.counters.restored == 0
    engine.add_request("third", {"prompt_token_ids": prompt, "cache_salt": "a"}, params)
    while engine.has_unfinished_requests():
        engine.step()
    fresh.drain()
    assert fresh.manager.counters.restored == PROMPT_BLOCKS
