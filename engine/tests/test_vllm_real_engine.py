"""Coda in a real engine: plug-ins by entry point, real forward passes, the schedule and the answers compared."""

import json
import time

import pytest
from engine_harness import RealEngine, environment, tokens
from scheduler_harness import settings_json

from coda_engine.contract.reasons import AdmissionReason, Feature, PlanReason, Reason
from coda_engine.contract.settings import (
    AdmissionSettings,
    ExecutionAdmissionMode,
    ExecutionAdmissionSettings,
    Settings,
    StateAdmissionPolicyName,
)
from coda_engine.contract.snapshot import EngineSnapshot
from coda_engine.profiling.assumed import assumed_profile
from coda_engine.vllm_adapter.config import current
from coda_engine.vllm_adapter.telemetry.page import PageReader, page_path
from coda_engine.vllm_adapter.telemetry.pages import SNAPSHOT_PAGE


@pytest.fixture(scope="module")
def engine(model_folder, tmp_path_factory):
    """One engine for the module (12 s), its pages in a folder of its own."""
    pages = tmp_path_factory.mktemp("pages")
    with environment({"VLLM_PLUGINS": "coda,coda_http", "CODA_PAGE_DIR": str(pages)}):
        built = RealEngine(model_folder)
        yield built
        built.core.shutdown()


@pytest.fixture
def tiered(engine):
    """The engine with a new scheduler under Tiered-Aging."""
    engine.renew_scheduler()
    core, runtime = engine.core, engine.runtime
    profile = assumed_profile(runtime.control.full_key)
    assert core.coda_apply_profile(profile.to_json().decode())["digest"] == profile.digest()
    core.coda_apply_settings(settings_json())
    return engine


SESSION = tokens(1, 300)
SCRIPT = {
    0: [("warm", SESSION, 3), ("other", tokens(2, 300), 12)],
    4: [("long", tokens(3, 1_000), 3), ("returning", SESSION + tokens(4, 20), 6)],
    6: [("fresh", tokens(5, 150), 10), ("again", SESSION + tokens(6, 40), 3)],
    9: [("late", tokens(7, 200), 4)],
}


def test_the_plug_in_came_by_its_entry_point_and_every_gate_is_open(engine):
    reasons = {feature: state.reason for feature, state in engine.runtime.capabilities.snapshot().items()}
    assert reasons == {
        Feature.SNAPSHOT: Reason.ENABLED,
        Feature.IDENTITY: Reason.NO_CLUSTER_SECRET,
        Feature.LIVE_SETTINGS: Reason.ENABLED,
        Feature.STATE_ADMISSION: Reason.NO_PROFILE,
        Feature.EXECUTION_ADMISSION: Reason.DISABLED_BY_SETTINGS,
        Feature.KV_SHADOW: Reason.DISABLED_BY_SETTINGS,
        Feature.RECLAIM: Reason.NOT_AVAILABLE,
        Feature.TRACE_ATTRIBUTES: Reason.DISABLED_BY_SETTINGS,
    }


def test_with_the_selector_off_schedule_and_answers_are_stock_step_by_step(engine):
    engine.renew_scheduler(stock=True)
    stock = engine.run(SCRIPT)
    engine.renew_scheduler()
    assert engine.core.scheduler.connector is None
    ours = engine.run(SCRIPT)
    assert ours.trace == stock.trace
    assert ours.outputs == stock.outputs
    assert len(stock.trace) > 15
    assert set(engine.runtime.admission.log.by_reason) == {AdmissionReason.FEATURE_OFF.value}


def test_a_resident_request_passes_a_long_prefill_and_everybody_is_answered_once(tiered):
    run = tiered.run(SCRIPT)
    assert run.admitted.index("returning") < run.admitted.index("long")
    names = {name for batch in SCRIPT.values() for name, _, _ in batch}
    assert sorted(run.finished) == sorted(names)
    assert sorted(run.admitted) == sorted(names)
    admission = tiered.runtime.admission
    assert (admission.refused_after_feasible, admission.unconfirmed) == (0, 0)
    assert admission.log.reordered >= 1


def test_the_guard_holds_in_a_real_run(tiered):
    run = tiered.run(SCRIPT, ages_s={"long": 30.0})
    assert run.admitted.index("long") < run.admitted.index("returning")
    assert AdmissionReason.MAX_WAIT_REACHED.value in tiered.runtime.admission.log.by_reason


def test_a_live_settings_change_turns_the_order_round(tiered):
    script = {0: [("warm", SESSION, 1)], 2: [("long", tokens(3, 600), 2), ("returning", SESSION + tokens(4, 20), 2)]}
    tiered.core.coda_apply_settings(settings_json(StateAdmissionPolicyName.FIFO))
    assert tiered.run(script).admitted == ["warm", "long", "returning"]
    tiered.core.scheduler.reset_prefix_cache()
    tiered.core.coda_apply_settings(settings_json())
    assert tiered.run(script).admitted == ["warm", "returning", "long"]


def test_a_profile_of_another_configuration_is_refused_and_the_one_in_force_stays(tiered):
    key = tiered.runtime.control.full_key
    in_force = tiered.runtime.control.profile.digest()
    foreign = assumed_profile(key.model_copy(update={"hardware": "another machine"}))
    answer = tiered.core.coda_apply_profile(foreign.to_json().decode())
    assert answer["reason"] == Reason.PROFILE_MISMATCH.value
    assert "hardware" in answer["detail"]
    assert "error" in tiered.core.coda_apply_profile("{}")
    assert "error" in tiered.core.coda_apply_settings('{"unknown": 1}')
    assert tiered.runtime.control.profile.digest() == in_force


def test_observing_execution_admission_counts_plans_and_changes_nothing(tiered):
    execution = ExecutionAdmissionSettings(mode=ExecutionAdmissionMode.OBSERVE)
    observing = Settings(admission=AdmissionSettings(execution=execution)).model_dump_json(by_alias=True)
    tiered.core.coda_apply_settings(observing)
    lengths = (40, 60, 150, 200)
    script = {0: [(f"r{length}", tokens(length, length), 12) for length in lengths]}
    tiered.run(script)
    steps = tiered.runtime.telemetry.steps
    assert sum(steps.cohort_plans.values()) == steps.pure_decode > 0
    assert PlanReason.NO_ATTENTION_PROFILE.value in steps.cohort_plans
    state = tiered.runtime.capabilities.snapshot()[Feature.EXECUTION_ADMISSION]
    assert (state.enabled, state.reason) == (False, Reason.OBSERVING)


def wait_for(read, matches):
    deadline_s = time.monotonic() + 10
    while time.monotonic() < deadline_s:
        content = read()
        if content is not None and matches(EngineSnapshot.from_json(content.payload)):
            return EngineSnapshot.from_json(content.payload)
        time.sleep(0.02)
    raise AssertionError(f"not published within 10 s; last: {read()}")


def test_the_snapshot_page_follows_the_engine_and_ends_idle(tiered):
    reader = PageReader(page_path(current().page_files, SNAPSHOT_PAGE))
    instance = tiered.runtime.instance_id
    seen = []

    def look(step):
        content = reader.read()
        snapshot = EngineSnapshot.from_json(content.payload)
        if snapshot.instance_id == instance:
            seen.append(snapshot)

    tiered.run(SCRIPT, act=look)
    versions = [snapshot.version for snapshot in seen]
    assert versions == sorted(versions)
    assert max(snapshot.running for snapshot in seen) >= 2
    assert any(snapshot.pending_prefill_tokens > 0 for snapshot in seen)
    assert any(snapshot.decode_context_tokens for snapshot in seen)
    idle = wait_for(reader.read, lambda snapshot: snapshot.instance_id == instance and snapshot.running == 0)
    assert (idle.waiting, idle.pending_prefill_tokens, idle.oldest_ready_wait_ms) == (0, 0, 0.0)
    assert idle.kv_blocks_free == idle.kv_blocks_total
    assert idle.steps.prefill + idle.steps.mixed + idle.steps.pure_decode > 10
    assert idle.settings_digest == tiered.runtime.control.settings.digest()
    assert idle.profile_digest == tiered.runtime.control.profile.digest()


def test_structured_output_requests_are_not_starved_by_promoted_ones(tiered):
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    engine = tiered.llm.llm_engine
    structured = StructuredOutputsParams(json={"type": "object", "properties": {"a": {"type": "integer"}}})
    params = SamplingParams(max_tokens=8, temperature=0.0, structured_outputs=structured)
    engine.add_request("grammar", {"prompt_token_ids": tokens(1, 40)}, params)
    script = {step: [(f"r{step}", tokens(10 + step, 30), 2)] for step in range(12)}
    run = tiered.run(script)
    assert "grammar" in run.finished


def test_decisions_are_listed_with_their_reasons(tiered):
    tiered.run(SCRIPT)
    document = json.loads(tiered.runtime.admission.log.encode())
    assert document["next"] == len(document["decisions"]) == 7
    assert [decision["sequence"] for decision in document["decisions"]] == list(range(7))
    assert {decision["reason"] for decision in document["decisions"]} <= {reason.value for reason in AdmissionReason}
    assert any(decision["reordered"] and decision["state_cost_ms"] > 0 for decision in document["decisions"])
