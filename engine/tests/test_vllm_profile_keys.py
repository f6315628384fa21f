"""The engine's own side of a profile: its full key, soft fields, and forgetting what HBM holds (real schedulers)."""

import pytest
from scheduler_harness import Drive, attach, new_scheduler, settings_json

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.profiling.assumed import assumed_profile
from coda_engine.vllm_adapter.kv_facts import kv_facts

PROMPT = list(range(1_000, 1_200))


@pytest.fixture
def drive(vllm_config):
    return Drive(new_scheduler(vllm_config, blocks=64))


@pytest.fixture
def runtime(drive):
    return attach(drive.scheduler)


def test_an_engine_without_a_shadow_says_so_in_its_key(drive, runtime):
    facts = kv_facts(drive.scheduler)
    key = runtime.control.full_key
    assert (key.block_size, key.shadow_layout, key.transfer_topology) == (32, "", "")
    assert (facts.block_tokens, facts.block_bytes) == (32, key.kv_block_bytes)
    assert key.driver.startswith("Linux ")
    assert key.runtime.startswith("torch 2.")


def test_a_profile_of_other_patch_versions_is_in_force_and_wants_another_look(runtime):
    runtime.apply_settings(settings_json())
    key = runtime.control.full_key
    other = assumed_profile(key.model_copy(update={"runtime": "torch 1.0"}))
    answer = runtime.apply_profile(other.to_json().decode())
    assert answer["digest"] == other.digest()
    assert f"runtime: '{key.runtime}' != 'torch 1.0'" in answer["detail"]
    capability = runtime.capabilities.snapshot()[Feature.STATE_ADMISSION]
    assert (capability.enabled, capability.reason) == (True, Reason.PROFILE_NEEDS_REVALIDATION)

    assert runtime.apply_profile(assumed_profile(key).to_json().decode())["detail"] == ""
    assert runtime.capabilities.snapshot()[Feature.STATE_ADMISSION].reason is Reason.ENABLED


def test_a_profile_of_an_older_schema_leaves_the_one_in_force(runtime):
    profile = assumed_profile(runtime.control.full_key)
    runtime.apply_profile(profile.to_json().decode())
    answer = runtime.apply_profile(profile.to_json().decode().replace('"schema_version":2', '"schema_version":1'))
    assert "measure again" in answer["error"]
    assert runtime.control.profile == profile


def test_hbm_is_forgotten_only_when_nothing_waits_or_runs(drive, runtime):
    drive.add("first", PROMPT)
    assert runtime.forget_hbm() == {"forgotten": False}
    drive.step()
    assert runtime.forget_hbm() == {"forgotten": False}
    drive.finish()
    assert hit_tokens(drive, "again") == 192
    assert runtime.forget_hbm() == {"forgotten": True}
    assert hit_tokens(drive, "cold") == 0


def hit_tokens(drive, name):
    """Run the prompt once more; return how much of it was reused."""
    request = drive.add(name, PROMPT)
    scheduled = drive.step()[name]
    drive.finish()
    return len(request.prompt_token_ids) - scheduled
