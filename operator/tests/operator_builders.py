"""Values that the operator's tests start from: one CodaCluster, its profile, what may exist around it."""

from typing import Any

from coda_engine.contract.profile import Profile, SpecKey
from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.snapshot import Capability, EngineSnapshot
from coda_engine.profiling.assumed import assumed_key, assumed_profile
from coda_operator.desired.cluster import Cluster, Images
from coda_operator.kube.resources import Ref
from coda_operator.observed import EngineReport, Key, Observed, StoredProfile
from coda_operator.plan import Plan, decide
from coda_operator.pods import Pod
from coda_operator.spec import CodaClusterSpec
from coda_operator.status import CodaClusterStatus, ConditionType, Verdict

IMAGES = Images(router="registry/router:1", engine_cpu="registry/engine-cpu:1", engine_cuda="registry/engine:1")
UID = "11111111-2222-3333-4444-555555555555"


def spec_of(**groups: Any) -> dict[str, Any]:
    """Return a CodaCluster's spec as a person writes it; ``groups`` replace or add top-level groups."""
    return {
        "model": {"name": "small", "source": {"builtin": "smollm2-135m-instruct"}},
        "engine": {"device": "cpu", "replicas": 2, "cpus": 1},
        **groups,
    }


def cluster_of(**groups: Any) -> Cluster:
    """Return the CodaCluster ``demo`` in namespace ``team``."""
    return Cluster("demo", "team", UID, CodaClusterSpec.parse(spec_of(**groups)), IMAGES)


def profile_of(key: SpecKey) -> Profile:
    """Return a profile that was measured for ``key``."""
    return assumed_profile(assumed_key(key))


def stored(cluster: Cluster, **changes: Any) -> StoredProfile:
    """Return the CodaProfile of a cluster's configuration as its Job wrote it."""
    values: dict[str, Any] = {
        "name": f"profile-{cluster.spec_key.digest()}",
        "owners": [cluster.owner_reference(controller=False)],
        "made_by_job": True,
        "profile": profile_of(cluster.spec_key),
    }
    return StoredProfile(**{**values, **changes})


def observed(cluster: Cluster | None = None, **changes: Any) -> Observed:
    """Return what is seen of a new CodaCluster; ``changes`` replace what is there."""
    values: dict[str, Any] = {
        "key": Key("team", "demo"),
        "uid": UID,
        "generation": 1,
        "status": CodaClusterStatus(),
        "cluster": cluster if cluster is not None else cluster_of(),
    }
    return Observed(**{**values, **changes})


def live_after(plan: Plan, before: Observed) -> dict[Ref, dict[str, Any]]:
    """Return what exists once ``plan`` has been applied, with the metadata that the API server adds."""
    live = dict(before.live)
    for child in [*plan.create, *plan.apply]:
        ref = Ref(child["kind"], child["metadata"]["name"])
        live[ref] = {**child, "metadata": {**child["metadata"], "uid": f"uid-{ref}", "generation": 1}}
    for doomed in plan.delete:
        live.pop(doomed.ref)
    return live


def serving_deployment(cluster: Cluster, ready: int, replicas: int = 2, updated: int | None = None) -> dict[str, Any]:
    """Return the engines' Deployment with this status."""
    return {
        "metadata": {
            "name": cluster.child_name("engine"),
            "uid": "deployment",
            "generation": 3,
            "ownerReferences": [cluster.owner_reference()],
        },
        "spec": {"replicas": replicas},
        "status": {
            "observedGeneration": 3,
            "replicas": replicas,
            "readyReplicas": ready,
            "updatedReplicas": replicas if updated is None else updated,
        },
    }


def pod(name: str, component: str = "engine", **changes: Any) -> Pod:
    """Return a pod that serves."""
    values: dict[str, Any] = {
        "owner": "owner",
        "created_at": "2026-01-01T00:00:00Z",
        "ip": "10.0.0.1",
        "running": True,
        "ready": True,
    }
    return Pod(name=name, component=component, **{**values, **changes})


def report_of(
    name: str,
    settings_digest: str,
    profile_digest: str | None,
    capability: Capability | None = None,
) -> EngineReport:
    """Return what an engine says that runs with these digests; admission is on unless ``capability`` differs."""
    snapshot = EngineSnapshot(
        instance_id=name,
        version=1,
        published_at_s=0.0,
        started_at_s=0.0,
        settings_digest=settings_digest,
        profile_digest=profile_digest,
        capabilities={Feature.STATE_ADMISSION: capability or Capability(enabled=True, reason=Reason.ENABLED)},
    )
    return EngineReport(name, f"http://{name}:8000", snapshot)


def verdict(plan: Plan, kind: ConditionType) -> Verdict:
    """Return the plan's verdict about one condition."""
    return next(item for item in plan.verdicts if item.type is kind)


def decided(before: Observed) -> Plan:
    """Return the plan, with secrets that are recognised in a test."""
    return decide(before, mint=lambda: "minted")


def names(plan: Plan, kind: str) -> list[str]:
    """Return the names of the applied objects of a kind."""
    return [child["metadata"]["name"] for child in plan.apply if child["kind"] == kind]
