"""Putting Coda together inside EngineCore: an error in one part closes that part, nothing grows for nobody."""

import time

import pytest
from scheduler_harness import Drive, attach, new_scheduler, use_tiered_aging

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.profiling.assumed import assumed_profile
from coda_engine.vllm_adapter import keys as keys_module
from coda_engine.vllm_adapter import runtime as runtime_module
from coda_engine.vllm_adapter.config import ENV_PAGE_FILES
from coda_engine.vllm_adapter.telemetry import telemetry as telemetry_module
from coda_engine.vllm_adapter.telemetry.page import PageFiles
from coda_engine.vllm_adapter.telemetry.pages import CAPACITIES


def explode(*args, **kwargs):
    raise RuntimeError("a bug while attaching")


def serve_two(scheduler) -> list[str]:
    drive = Drive(scheduler)
    drive.add("one", list(range(300)), arrival_s=time.time())
    drive.add("two", list(range(500, 560)), arrival_s=time.time())
    drive.finish()
    return drive.admitted


@pytest.mark.parametrize(
    ("module", "part", "feature"),
    [
        (runtime_module, "ResidencyIndex", Feature.STATE_ADMISSION),
        (runtime_module, "Reclaim", Feature.RECLAIM),
        (runtime_module, "report_shadow", Feature.KV_SHADOW),
        (telemetry_module, "SessionTable", Feature.SNAPSHOT),
        (telemetry_module, "SnapshotGatherer", Feature.SNAPSHOT),
    ],
)
def test_an_error_in_one_part_closes_only_that_part(vllm_config, monkeypatch, tmp_path, module, part, feature):
    monkeypatch.setattr(module, part, explode)
    pages = PageFiles.create(tmp_path, CAPACITIES)
    scheduler = new_scheduler(vllm_config, 201)
    runtime = attach(scheduler, {ENV_PAGE_FILES: str(pages.prefix)})
    states = runtime.capabilities.snapshot()
    assert (states[feature].enabled, states[feature].reason) == (False, Reason.INTERNAL_ERROR)
    assert [one for one, state in states.items() if state.reason is Reason.INTERNAL_ERROR] == [feature]
    if feature is not Feature.STATE_ADMISSION:
        use_tiered_aging(runtime)
        assert runtime.capabilities.snapshot()[Feature.STATE_ADMISSION].enabled
    assert sorted(serve_two(scheduler)) == ["one", "two"]


def test_without_step_hooks_identity_goes_on_and_everything_else_is_off(vllm_config, monkeypatch):
    monkeypatch.setattr(runtime_module, "hook_steps", explode)
    scheduler = new_scheduler(vllm_config, 201)
    runtime = attach(scheduler)
    assert scheduler.coda_runtime is runtime
    for feature in (Feature.STATE_ADMISSION, Feature.RECLAIM):
        assert runtime.capabilities.is_closed(feature)
    assert not runtime.capabilities.is_closed(Feature.IDENTITY)
    assert serve_two(scheduler) == ["one", "two"]


def test_no_session_table_is_kept_that_nobody_reads(vllm_config):
    scheduler = new_scheduler(vllm_config, 201)
    runtime = attach(scheduler)
    assert runtime.capabilities.is_closed(Feature.SNAPSHOT)
    use_tiered_aging(runtime)
    assert runtime.admission.plan.inspects
    assert runtime.telemetry.sessions is None


def test_the_session_table_goes_with_telemetry_that_fails(vllm_config, tmp_path):
    pages = PageFiles.create(tmp_path, CAPACITIES)
    runtime = attach(new_scheduler(vllm_config, 201), {ENV_PAGE_FILES: str(pages.prefix)})
    assert runtime.telemetry.sessions is not None
    runtime.telemetry.fail(RuntimeError("once"))
    assert runtime.telemetry.sessions is None


def test_an_engine_that_cannot_tell_its_configuration_runs_without_a_profile(vllm_config, monkeypatch):
    key_of_another = attach(new_scheduler(vllm_config, 201)).control.full_key
    monkeypatch.setattr(keys_module, "full_key", explode)
    runtime = attach(new_scheduler(vllm_config, 201))
    refused = runtime.apply_profile(assumed_profile(key_of_another).to_json().decode())
    assert refused["reason"] == Reason.PROFILE_MISMATCH.value
    assert not runtime.capabilities.is_closed(Feature.STATE_ADMISSION)
