from typing import Any

from operator_builders import cluster_of, observed, pod, report_of, serving_deployment, stored

from coda_engine.contract.reasons import Reason
from coda_engine.contract.snapshot import Capability
from coda_operator.conditions import admission_enabled, engines_ready, ready, routable
from coda_operator.desired.profiling_job import profiling_job
from coda_operator.kube.resources import Ref, ref_of
from coda_operator.observed import EngineReport, Observed, RouterReport
from coda_operator.profiling import ProfilePhase, profile_state
from coda_operator.status import ConditionType, Verdict

ENGINES = Ref("Deployment", "demo-engine")


def with_engines(ready: int, pods: list[Any], **status: Any) -> Observed:
    return observed(live={ENGINES: serving_deployment(cluster_of(), ready, **status)}, pods=pods)


def with_job(status: dict[str, Any], pods: list[Any] | None = None) -> Observed:
    job = profiling_job(cluster_of())
    live = {**job, "metadata": {**job["metadata"], "uid": "job"}, "status": status}
    return observed(live={ref_of(job): live}, pods=pods or [])


def job_name() -> str:
    name: str = profiling_job(cluster_of())["metadata"]["name"]
    return name


def test_engines_are_ready_when_all_of_them_serve():
    verdict = engines_ready(with_engines(2, [pod("a"), pod("b")]))
    assert (verdict.status, verdict.reason, verdict.message) == (True, "AllEnginesReady", "2 of 2 engines serve")


def test_a_killed_engine_is_missing_until_it_is_back():
    verdict = engines_ready(with_engines(1, [pod("a"), pod("b", ready=False)]))
    assert (verdict.status, verdict.reason, verdict.message) == (False, "EnginesStarting", "1 of 2 engines serve")


def test_a_crashing_engine_is_named_with_its_last_words():
    crashed = pod("b", ready=False, problem="engine: CrashLoopBackOff", last_words="ValueError: no such model")
    verdict = engines_ready(with_engines(1, [pod("a"), crashed]))
    assert verdict.reason == "EngineFailing"
    assert "b: engine: CrashLoopBackOff: ValueError: no such model" in verdict.message


def test_engines_of_the_old_form_are_being_updated():
    verdict = engines_ready(with_engines(2, [pod("a"), pod("b")], updated=1))
    assert (verdict.status, verdict.reason) == (False, "EnginesUpdating")


def test_a_deployment_that_kubernetes_has_not_looked_at_is_not_ready():
    deployment = serving_deployment(cluster_of(), 2)
    deployment["metadata"]["generation"] = 4
    assert not engines_ready(observed(live={ENGINES: deployment})).status


def test_without_a_deployment_no_engine_is_expected_yet():
    assert engines_ready(observed()).reason == "EnginesNotCreated"


def test_one_engine_and_one_router_are_enough_to_be_routable():
    verdict = routable(observed(pods=[pod("a"), pod("b", ready=False), pod("r", "router")]))
    assert (verdict.status, verdict.message) == (True, "1 of 1 routers serve")


def test_a_router_without_engines_routes_nothing():
    assert routable(observed(pods=[pod("r", "router")])).reason == "NoEngine"


def test_a_router_that_cannot_start_is_named():
    router = pod("r", "router", ready=False, problem="router: ImagePullBackOff: not found")
    verdict = routable(observed(pods=[pod("a"), router]))
    assert verdict.reason == "RouterStarting"
    assert "r: router: ImagePullBackOff" in verdict.message


def test_admission_is_enabled_when_every_engine_and_router_runs_the_settings():
    seen = observed(engines=[report_of("a", "d", "p")], routers=[RouterReport("r", "u", "d")])
    assert admission_enabled(seen, "d").status


def test_admission_is_not_enabled_while_one_process_runs_other_settings():
    seen = observed(engines=[report_of("a", "d", "p"), report_of("b", "old", "p")])
    verdict = admission_enabled(seen, "d")
    assert (verdict.status, verdict.reason) == (False, "SettingsNotApplied")
    assert "b" in verdict.message


def test_an_engines_own_reason_is_the_conditions_reason():
    off = Capability(enabled=False, reason=Reason.CHANGED_VLLM_INTERNALS, detail="Scheduler.schedule differs")
    verdict = admission_enabled(observed(engines=[report_of("a", "d", "p", off)]), "d")
    assert (verdict.status, verdict.reason) == (False, "ChangedVLLMInternals")
    assert "Scheduler.schedule differs" in verdict.message


def test_an_engine_under_another_driver_decides_and_says_that_its_profile_wants_another_look():
    outdated = Capability(enabled=True, reason=Reason.PROFILE_NEEDS_REVALIDATION, detail="driver")
    seen = observed(engines=[report_of("a", "d", "p", outdated)], profile=stored(cluster_of()))
    verdict = admission_enabled(seen, "d")
    assert (verdict.status, verdict.reason) == (True, "AdmissionRunning")
    assert "versions than those of a: delete CodaProfile profile-" in verdict.message


def test_a_silent_engine_is_said():
    verdict = admission_enabled(observed(engines=[EngineReport("a", "u", None, "connection refused")]), "d")
    assert (verdict.reason, verdict.message) == ("SnapshotUnavailable", "a: connection refused")


def test_ready_gives_the_first_reason_that_it_is_not():
    verdicts = [
        Verdict(ConditionType.PROFILED, False, "ProfilingRunning", "measuring"),
        Verdict(ConditionType.ENGINES_READY, False, "EnginesStarting", "0 of 2"),
    ]
    assert ready(verdicts, list(ConditionType)).reason == "ProfilingRunning"
    assert ready(verdicts, [ConditionType.ENGINES_READY]).message == "EnginesReady: 0 of 2"
    assert ready(verdicts, [ConditionType.ROUTABLE]).status


def test_a_new_configuration_is_pending():
    assert profile_state(observed(), cluster_of()).phase is ProfilePhase.PENDING


def test_a_running_job_says_its_attempt():
    state = profile_state(with_job({"active": 1, "failed": 1}), cluster_of())
    assert (state.phase, state.verdict.reason) == (ProfilePhase.RUNNING, "ProfilingRunning")
    assert "attempt 2 of 3" in state.verdict.message


def test_a_job_whose_pod_cannot_start_says_why():
    stuck = pod("p", "profiler", owner=job_name(), running=False, ready=False, problem="engine: ErrImagePull: no")
    state = profile_state(with_job({"active": 1}, [stuck]), cluster_of())
    assert state.verdict.reason == "ProfilingBlocked"
    assert "engine: ErrImagePull: no" in state.verdict.message


def test_a_failed_job_keeps_engines_away_and_gives_its_last_words_and_the_remedy():
    failed = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded", "message": "m"}]}
    first = pod("p1", "profiler", owner=job_name(), created_at="1", running=False, last_words="old")
    last = pod("p2", "profiler", owner=job_name(), created_at="2", running=False, last_words="the engine is not ready")
    state = profile_state(with_job(failed, [last, first]), cluster_of())
    assert state.phase is ProfilePhase.FAILED
    assert not state.engines_may_start
    assert "its last words: the engine is not ready" in state.verdict.message
    assert "delete the Job to try again" in state.verdict.message


def test_a_profile_deleted_after_the_job_is_measured_again():
    complete = {"conditions": [{"type": "Complete", "status": "True"}]}
    state = profile_state(with_job(complete), cluster_of())
    assert (state.phase, state.restart_job) == (ProfilePhase.PENDING, True)


def test_an_unreadable_profile_is_named_and_not_overwritten():
    broken = stored(cluster_of(), profile=None, problem="spec.artifact: missing")
    state = profile_state(observed(profile=broken), cluster_of())
    assert state.phase is ProfilePhase.FAILED
    assert "spec.artifact: missing" in state.verdict.message
