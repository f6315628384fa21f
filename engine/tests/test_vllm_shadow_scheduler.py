"""The CPU shadow around real schedulers whose KV content is checked in every step, and everything that can go wrong."""

import random

import pytest
from shadow_engine_harness import shadow_folder
from shadow_scheduler_harness import Faults, agents, driving, shadowed

from coda_engine.contract.reasons import Reason

HBM_BLOCKS, SHADOW_BLOCKS = 60, 300


@pytest.fixture
def folder():
    with shadow_folder() as made:
        yield made


def drain(drive):
    drive.abort([name for name, request in drive.requests.items() if not request.is_finished()])
    for _ in range(200):
        if not drive.scheduler.has_requests():
            return
        drive.step()
    raise AssertionError("transfers do not end")


def run(drive, steps, seed=1, aborts=0.02):
    rng = random.Random(seed)
    pool = drive.scheduler.kv_cache_manager.block_pool
    script = agents(drive, rng, sessions=10, aborts=aborts)
    for _ in range(steps):
        next(script)
        held = {block for r in drive.scheduler.requests for (ids,) in [blocks_of(drive, r)] for block in ids}
        assert len(held) + pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    drain(drive)
    assert set(drive.leftovers().values()) == {0}, drive.leftovers()


def blocks_of(drive, request_id):
    return drive.scheduler.kv_cache_manager.get_block_ids(request_id)


def test_sessions_come_back_from_the_shadow_with_the_right_content(vllm_config, folder):
    with driving(shadowed(vllm_config, folder, SHADOW_BLOCKS), HBM_BLOCKS) as drive:
        run(drive, 1_500)
        assert drive.manager.counters.restored > 1_000
        assert drive.manager.counters.bad == drive.manager.counters.failed_loads == 0
        assert drive.manager.index.statistics().evicted > 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_fault_lets_a_wrong_byte_through_or_keeps_anything(vllm_config, folder, ranks):
    faults = Faults(damage=0.01, unreadable=0.005, unwritable=0.03, most_late_steps=3)
    with driving(shadowed(vllm_config, folder, SHADOW_BLOCKS, ranks), HBM_BLOCKS, faults) as drive:
        run(drive, 1_500)
        counters = drive.manager.counters
        assert min(counters.restored, counters.bad, counters.failed_loads, counters.unwritten) > 5
        assert sum(rank.pages.damaged for rank in drive.ranks) > 5


def test_loads_that_fail_always_leave_every_request_answered(vllm_config, folder):
    with driving(shadowed(vllm_config, folder, SHADOW_BLOCKS), HBM_BLOCKS, Faults(unreadable=1.0)) as drive:
        run(drive, 1_000, aborts=0.0)
        assert drive.manager.counters.restored == 0
        assert drive.manager.counters.failed_loads > 10


def test_two_engines_on_a_node_share_pages_in_the_middle_of_each_others_steps(vllm_config, folder):
    config = shadowed(vllm_config, folder, SHADOW_BLOCKS)
    late = Faults(damage=0.002, most_late_steps=2)
    with driving(config, HBM_BLOCKS, late) as first, driving(config, HBM_BLOCKS, late) as second:
        scripts = [agents(drive, random.Random(5), 10, 0.02) for drive in (first, second)]
        for _ in range(1_000):
            for script in scripts:
                next(script)
        for drive in (first, second):
            drain(drive)
            assert not drive.manager._loads
            assert not drive.manager._stores
        first.manager.index.sync()
        statistics = first.manager.index.statistics()
        assert (statistics.pinned_pages, statistics.writing_pages) == (0, 0)
        assert first.manager.counters.restored + second.manager.counters.restored > 1_000


def test_a_page_that_goes_to_another_engine_in_the_middle_of_a_restore_is_not_served(vllm_config, folder):
    config, prompt = shadowed(vllm_config, folder, 40), list(range(500))
    with driving(config, HBM_BLOCKS) as first, driving(config, HBM_BLOCKS) as second:
        first.add("a", prompt)
        first.finish()
        first.scheduler.reset_prefix_cache()
        copies = first.ranks[0].connector.connector_worker.worker._copies
        from_page = copies.from_page

        def closed_and_taken(page, block):
            # The shadow closes while the copy runs, and with it go the pins; another engine needs the room.
            if first.manager.index is not None:
                first.manager.close(Reason.DISABLED_BY_SETTINGS, "closed by the test")
                for number in range(3):
                    second.add(f"other-{number}", [number + 2] * 600)
                    second.finish()
            from_page(page, block)

        copies.from_page = closed_and_taken
        first.add("b", prompt)
        first.finish()
        assert first.manager.index is None
        assert second.manager.index.statistics().evicted > 0


def test_an_engine_that_comes_later_finds_everything(vllm_config, folder):
    config = shadowed(vllm_config, folder, SHADOW_BLOCKS)
    prompt = list(range(500))
    with driving(config, HBM_BLOCKS) as first:
        first.add("a", prompt)
        first.finish()
    with driving(config, HBM_BLOCKS) as second:
        second.add("b", prompt)
        second.finish()
        assert second.manager.counters.restored == 500 // 32


def test_ten_thousand_steps_with_faults_preemptions_and_aborts(vllm_config, folder):
    faults = Faults(damage=0.005, unreadable=0.002, unwritable=0.005, most_late_steps=4)
    with driving(shadowed(vllm_config, folder, SHADOW_BLOCKS, 2), HBM_BLOCKS, faults) as drive:
        run(drive, 10_000, seed=7)
        assert drive.manager.counters.restored > 10_000
