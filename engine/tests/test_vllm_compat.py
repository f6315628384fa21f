"""Compatibility gates: closed for other versions and changed internals, feature by feature, serving goes on."""

import inspect
import textwrap
import time

import pytest
from scheduler_harness import Drive, attach, new_scheduler, open_gates, use_tiered_aging

from coda_engine.contract.reasons import AdmissionReason, Feature, Reason
from coda_engine.vllm_adapter.compat import (
    TOUCHED,
    check,
    installed_version,
    resolve_target,
    source_digest,
)

PREEMPT = "vllm.v1.core.sched.scheduler:Scheduler._preempt_request"


def plain(value):
    """Say something."""
    # A comment.
    return value + 1


def same_without_words(value):
    return value + 1


same_without_words.__name__ = "plain"


def changed(value):
    """Say something."""
    return value + 2


def renamed_source(function, name: str) -> str:
    return textwrap.dedent(inspect.getsource(function)).replace(function.__code__.co_name, name)


def test_every_gate_is_open_on_the_vllm_that_was_tested():
    assert {feature: gate.detail for feature, gate in open_gates().items() if not gate.open} == {}


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.0", ""])
def test_another_version_family_closes_every_gate(version):
    gates = check(version)
    assert {gate.reason for gate in gates.values()} == {Reason.UNSUPPORTED_VLLM_VERSION}
    assert all("0.32." in gate.detail for gate in gates.values())


def test_comments_and_docstrings_do_not_matter_and_statements_do(tmp_path, monkeypatch):
    module = tmp_path / "three_functions.py"
    bodies = [renamed_source(function, "f") for function in (plain, same_without_words, changed)]
    digests = []
    for number, body in enumerate(bodies):
        module = tmp_path / f"variant{number}.py"
        module.write_text(body)
        namespace: dict[str, object] = {}
        exec(compile(body, str(module), "exec"), namespace)  # noqa: S102 - the test's own source
        digests.append(source_digest(namespace["f"]))
    assert digests[0] == digests[1]
    assert digests[0] != digests[2]


def test_a_changed_private_function_closes_only_the_features_that_rely_on_it():
    def resolve(target):
        return changed if target == PREEMPT else resolve_target(target)

    gates = check(installed_version(), resolve)
    closed = {feature for feature, gate in gates.items() if not gate.open}
    assert closed == {feature for feature, targets in TOUCHED.items() if PREEMPT in targets}
    gate = gates[Feature.STATE_ADMISSION]
    assert (gate.reason, gate.detail) == (Reason.CHANGED_VLLM_INTERNALS, "Scheduler._preempt_request has changed")


def test_a_function_that_is_gone_is_named():
    def resolve(target):
        if target == PREEMPT:
            raise AttributeError(target)
        return resolve_target(target)

    assert check(installed_version(), resolve)[Feature.STATE_ADMISSION].detail == "Scheduler._preempt_request is gone"


def test_behind_a_closed_gate_the_engine_serves_in_its_own_order(vllm_config, monkeypatch):
    from vllm.v1.core.sched.scheduler import Scheduler

    monkeypatch.setattr(Scheduler, "_preempt_request", Scheduler._free_request)
    gates = check(installed_version())
    monkeypatch.undo()
    scheduler = new_scheduler(vllm_config, 201)
    native_queue = scheduler.waiting
    runtime = attach(scheduler, gates=gates)
    use_tiered_aging(runtime)
    assert scheduler.waiting is native_queue
    drive = Drive(scheduler)
    drive.add("long", list(range(2_000)), arrival_s=time.time())
    drive.add("short", list(range(50)), arrival_s=time.time())
    drive.finish()
    assert drive.admitted == ["long", "short"]
    state = runtime.capabilities.snapshot()[Feature.STATE_ADMISSION]
    assert (state.enabled, state.reason) == (False, Reason.CHANGED_VLLM_INTERNALS)
    assert runtime.capabilities.snapshot()[Feature.LIVE_SETTINGS].enabled


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("num_spec_tokens", 2, "--speculative-config"),
        ("scheduler_reserve_full_isl", False, "--no-scheduler-reserve-full-isl"),
        ("connector", object(), "connector"),
        ("use_pp", True, "parallelism"),
        ("is_encoder_decoder", True, "encoder-decoder"),
    ],
)
def test_a_configuration_that_cannot_be_predicted_is_named_with_its_remedy(vllm_config, attribute, value, said):
    scheduler = new_scheduler(vllm_config, 50)
    setattr(scheduler, attribute, value)
    runtime = attach(scheduler)
    state = runtime.capabilities.snapshot()[Feature.STATE_ADMISSION]
    assert (state.enabled, state.reason) == (False, Reason.UNSUPPORTED_CONFIGURATION)
    assert said in state.detail


def test_the_priority_queue_of_vllm_is_left_alone(vllm_config):
    from vllm.v1.core.sched.request_queue import PriorityRequestQueue

    scheduler = new_scheduler(vllm_config, 50)
    scheduler.waiting = PriorityRequestQueue()
    runtime = attach(scheduler)
    assert type(scheduler.waiting) is PriorityRequestQueue
    assert "--scheduling-policy" in runtime.capabilities.snapshot()[Feature.STATE_ADMISSION].detail


def test_reasons_of_decisions_are_known_to_the_contract(vllm_config):
    scheduler = new_scheduler(vllm_config, 50)
    runtime = attach(scheduler)
    drive = Drive(scheduler)
    drive.add("one", list(range(50)))
    drive.finish()
    assert set(runtime.admission.log.by_reason) <= {reason.value for reason in AdmissionReason}
