from dataclasses import replace
from typing import Any

from operator_builders import (
    cluster_of,
    decided,
    live_after,
    names,
    observed,
    pod,
    report_of,
    serving_deployment,
    stored,
    verdict,
)

from coda_engine.contract.reasons import Reason
from coda_engine.contract.snapshot import Capability
from coda_operator.desired.profiling_job import profiling_job
from coda_operator.kube.resources import Ref, ref_of
from coda_operator.observed import Observed, RouterReport
from coda_operator.plan import LOOK_AGAIN_SETTLED_S, LOOK_AGAIN_UNSETTLED_S, Plan
from coda_operator.status import CodaClusterStatus, ConditionType

ENGINES = Ref("Deployment", "demo-engine")


def deleted(plan: Plan) -> set[str]:
    return {str(doomed.ref) for doomed in plan.delete}


def serving(**changes: Any) -> Observed:
    """Return a CodaCluster of which everything is as it should be."""
    cluster = changes.pop("cluster", cluster_of())
    profile = stored(cluster)
    assert profile.profile is not None
    before = observed(cluster, profile=profile)
    live = live_after(decided(before), before)
    live[ENGINES] = serving_deployment(cluster, ready=2)
    digest = cluster.spec.settings().digest()
    values: dict[str, Any] = {
        "live": live,
        "profile": profile,
        "pods": [pod("engine-a"), pod("engine-b"), pod("router-a", "router")],
        "engines": [report_of(name, digest, profile.profile.digest()) for name in ("engine-a", "engine-b")],
        "routers": [RouterReport("router-a", "http://router-a:8080", digest)],
    }
    return observed(cluster, **{**values, **changes})


def test_without_a_profile_the_job_runs_and_no_engine_starts():
    plan = decided(observed())
    assert names(plan, "Job") == [profiling_job(cluster_of())["metadata"]["name"]]
    assert names(plan, "Deployment") == ["demo-router"]


def test_with_a_profile_engines_start_and_the_jobs_rights_are_gone():
    plan = decided(observed(profile=stored(cluster_of())))
    assert names(plan, "Deployment") == ["demo-engine", "demo-router"]
    assert names(plan, "Job") == []
    assert names(plan, "ServiceAccount") == ["demo-router"]


def test_with_profiling_disabled_engines_start_at_once_and_without_a_profile():
    cluster = cluster_of(profiling={"mode": "Disabled"})
    plan = decided(observed(cluster, profile=stored(cluster)))
    assert names(plan, "Deployment") == ["demo-engine", "demo-router"]
    assert names(plan, "Job") == []
    assert names(plan, "ConfigMap") == ["demo-settings"]


def test_secrets_are_made_once():
    plan = decided(observed())
    assert [child["metadata"]["name"] for child in plan.create] == ["demo-internal", "demo-api-key"]
    again = decided(observed(live=live_after(plan, observed())))
    assert again.create == []


def test_a_named_api_key_secret_replaces_the_generated_one_which_is_there_to_come_back_to():
    before = observed()
    cluster = cluster_of(router={"apiKeySecret": "mine"})
    named = observed(cluster, live=live_after(decided(before), before))
    plan = decided(named)
    assert deleted(plan) == set()
    assert plan.status.api_key_secret == "mine"
    back = decided(observed(live=live_after(plan, named)))
    assert back.create == []
    assert back.status.api_key_secret == "demo-api-key"


def test_a_named_api_key_secret_that_is_missing_is_said():
    cluster = cluster_of(router={"apiKeySecret": "mine"})
    plan = decided(serving(cluster=cluster, api_key_secret_exists=False))
    assert "spec.router.apiKeySecret: Secret mine does not exist" in verdict(plan, ConditionType.ROUTABLE).message


def test_once_all_is_well_the_plan_deletes_nothing_and_looks_seldom():
    plan = decided(serving())
    assert {item.type for item in plan.verdicts if item.status} == set(ConditionType)
    assert plan.delete == []
    assert plan.settings_to == []
    assert plan.profile_to == []
    assert plan.look_again_s == LOOK_AGAIN_SETTLED_S


def test_while_something_is_on_its_way_the_plan_looks_often():
    assert decided(observed()).look_again_s == LOOK_AGAIN_UNSETTLED_S


def test_other_settings_go_to_processes_and_config_map_and_not_into_the_pod_template():
    cluster = cluster_of(admission={"state": {"policy": "fifo"}})
    plan = decided(serving(cluster=cluster_of()))
    changed = decided(observed(cluster, **_same(serving())))
    assert changed.settings_to == ["http://engine-a:8000", "http://engine-b:8000", "http://router-a:8080"]
    assert changed.settings == cluster.spec.settings()
    assert _template(changed) == _template(plan)
    assert verdict(changed, ConditionType.ADMISSION_ENABLED).reason == "SettingsNotApplied"


def test_other_replicas_change_the_deployments_replicas_and_nothing_else():
    before = serving()
    cluster = cluster_of(engine={"device": "cpu", "replicas": 3, "cpus": 1})
    plan, same = decided(observed(cluster, **_same(before))), decided(before)
    different = [ref_of(new) for new, old in zip(plan.apply, same.apply, strict=True) if new != old]
    assert different == [ENGINES]
    assert plan.delete == []
    assert plan.settings_to == []


def test_an_engine_without_the_profile_is_given_it():
    digest = cluster_of().spec.settings().digest()
    off = Capability(enabled=False, reason=Reason.NO_PROFILE)
    plan = decided(serving(engines=[report_of("engine-a", digest, None, off)]))
    assert plan.profile_to == ["http://engine-a:8000"]


def test_an_engine_that_refused_the_profile_is_not_asked_again_and_again():
    digest = cluster_of().spec.settings().digest()
    off = Capability(enabled=False, reason=Reason.PROFILE_MISMATCH, detail="block_size: 32 != 16")
    plan = decided(serving(engines=[report_of("engine-a", digest, None, off)]))
    assert plan.profile_to == []
    admission = verdict(plan, ConditionType.ADMISSION_ENABLED)
    assert admission.reason == "ProfileMismatch"
    assert "block_size: 32 != 16" in admission.message
    assert "delete CodaProfile" in admission.message


def test_a_job_of_an_earlier_configuration_is_removed():
    before = observed()
    cluster = cluster_of(profiling={"quick": True})
    plan = decided(observed(cluster, live=live_after(decided(before), before)))
    assert deleted(plan) == {f"Job {profiling_job(cluster_of())['metadata']['name']}"}


def test_engines_of_an_earlier_configuration_serve_until_the_new_one_is_measured():
    before = serving()
    cluster = cluster_of(engine={"device": "cpu", "replicas": 2, "cpus": 2})
    plan = decided(observed(cluster, **{**_same(before), "profile": None}))
    assert "demo-engine" not in names(plan, "Deployment")
    assert not deleted(plan) & {"Deployment demo-engine", "ConfigMap demo-profile"}
    assert verdict(plan, ConditionType.READY).reason == "ProfilingPending"


def test_an_object_of_somebody_else_is_never_touched():
    theirs = {"kind": "ConfigMap", "metadata": {"name": "demo-settings", "uid": "x"}}
    plan = decided(observed(live={Ref("ConfigMap", "demo-settings"): theirs}))
    assert (plan.create, plan.apply, plan.delete) == ((), (), ())
    ready = verdict(plan, ConditionType.READY)
    assert ready.reason == "NameTaken"
    assert "ConfigMap demo-settings" in ready.message


def test_a_bad_spec_touches_nothing_and_conditions_stay_true_of_what_serves():
    before = serving()
    status = CodaClusterStatus(settings_digest=cluster_of().spec.settings().digest())
    problem = "spec.engine.replicas: at least 1 (given: 0)"
    plan = decided(replace(before, cluster=None, spec_problem=problem, status=status))
    assert (plan.create, plan.apply, plan.delete, plan.settings_to) == ((), (), (), ())
    assert verdict(plan, ConditionType.ENGINES_READY).status
    assert verdict(plan, ConditionType.ROUTABLE).status
    assert verdict(plan, ConditionType.ADMISSION_ENABLED).status
    ready = verdict(plan, ConditionType.READY)
    assert (ready.status, ready.reason) == (False, "InvalidSpec")
    assert "spec.engine.replicas" in ready.message


def test_a_pod_template_that_does_not_fit_is_an_invalid_spec():
    plan = decided(observed(cluster_of(engine={"device": "cpu", "podTemplate": {"sepc": {}}})))
    assert verdict(plan, ConditionType.READY).reason == "InvalidSpec"
    assert "spec.engine.podTemplate.sepc" in verdict(plan, ConditionType.READY).message
    assert plan.apply == ()


def test_a_profile_of_another_clusters_job_is_adopted_so_that_it_outlives_that_cluster():
    other = [{"uid": "another"}]
    assert decided(serving(profile=stored(cluster_of(), owners=other))).adopt_profile is not None
    assert decided(serving()).adopt_profile is None


def test_a_profile_that_a_person_made_stays_theirs():
    mine = stored(cluster_of(), owners=[], made_by_job=False)
    assert decided(serving(profile=mine)).adopt_profile is None


def test_the_status_says_where_everything_is():
    status = decided(serving()).status
    assert status.url == "http://demo-router.team.svc:8080"
    assert status.api_key_secret == "demo-api-key"
    assert status.engines == "2/2"
    assert status.selector == "coda-serving.dev/cluster=demo,app.kubernetes.io/component=engine"
    assert status.profile.spec_key_digest == cluster_of().spec_key.digest()


def _same(before: Observed) -> dict[str, Any]:
    return {name: getattr(before, name) for name in ("live", "profile", "pods", "engines", "routers", "internal_token")}


def _template(plan: Plan) -> Any:
    deployment = next(child for child in plan.apply if ref_of(child) == ENGINES)
    return deployment["spec"]["template"]
