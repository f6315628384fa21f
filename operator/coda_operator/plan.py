"""Decide: from what there is to what should be done and said. Pure; the same input gives the same plan."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from coda_engine.contract.profile import Profile
from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.settings import Settings
from coda_operator.conditions import admission_enabled, engines_ready, ready, replica_counts, routable
from coda_operator.desired.access import profiler_access, router_access
from coda_operator.desired.cluster import ENGINE, Child, Cluster, possible_children
from coda_operator.desired.documents import api_key_secret, internal_secret, profile_config_map, settings_config_map
from coda_operator.desired.engines import engine_deployment, engine_service
from coda_operator.desired.router import router_deployment, router_service, router_url
from coda_operator.errors import PodTemplateError
from coda_operator.kube.resources import Ref, ref_of
from coda_operator.observed import Observed
from coda_operator.profiling import ProfileState, profile_state
from coda_operator.spec import ProfilingMode
from coda_operator.status import CodaClusterStatus, ConditionReason, ConditionType, ProfileStatus, Verdict

LOOK_AGAIN_UNSETTLED_S = 2.0
"""While something is on its way: engines report over HTTP, which no watch announces."""

LOOK_AGAIN_SETTLED_S = 60.0
"""While all is as it should be: what a lost watch event would cost at most."""

_REFUSED = (Reason.PROFILE_MISMATCH, Reason.PROFILE_NOT_VALIDATED, Reason.PROFILE_UNREADABLE)


@dataclass(frozen=True, slots=True)
class Doomed:
    """An object to delete; the uid makes sure that it is still the one that was seen."""

    ref: Ref
    uid: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do and to report.

    Attributes:
        create: Objects that are made once and then left alone (generated secrets).
        apply: Objects that should be so, in the order in which they are needed.
        delete: This CodaCluster's objects that should not be any more.
        settings: The settings document in force.
        settings_to: Base URLs of the processes that run another one.
        profile: The profile in force; None without one.
        profile_to: Base URLs of the engines that do not run it.
        adopt_profile: Name of the CodaProfile that should also be owned by this CodaCluster.
        verdicts: The conditions as seen.
        status: The rest of the status.
        look_again_s: When to look again without being told, seconds.
    """

    verdicts: Sequence[Verdict]
    status: CodaClusterStatus
    create: Sequence[Child] = ()
    apply: Sequence[Child] = ()
    delete: Sequence[Doomed] = ()
    settings: Settings = field(default_factory=Settings)
    settings_to: Sequence[str] = ()
    profile: Profile | None = None
    profile_to: Sequence[str] = ()
    adopt_profile: str | None = None
    look_again_s: float = LOOK_AGAIN_UNSETTLED_S


def decide(observed: Observed, mint: Callable[[], str]) -> Plan:
    """Return the plan for one CodaCluster.

    Args:
        observed: What there is.
        mint: Returns a new random secret; called only for secrets that do not exist.
    """
    cluster = observed.cluster
    if cluster is None:
        return _leave_alone(observed, ConditionReason.INVALID_SPEC, observed.spec_problem)
    taken = [ref for ref in possible_children(observed.key.name) if ref in observed.live and not _owns(observed, ref)]
    if taken:
        names = ", ".join(str(ref) for ref in taken)
        message = f"{names} is not this CodaCluster's; delete it, or choose another metadata.name"
        return _leave_alone(observed, ConditionReason.NAME_TAKEN, message)
    try:
        state = profile_state(observed, cluster)
        return _plan(observed, cluster, state, mint)
    except PodTemplateError as error:
        return _leave_alone(observed, ConditionReason.INVALID_SPEC, str(error))


def _plan(observed: Observed, cluster: Cluster, state: ProfileState, mint: Callable[[], str]) -> Plan:
    settings = cluster.spec.settings()
    digest = settings.digest()
    create = _secrets_to_create(observed, cluster, mint)
    apply = _children(cluster, state)
    verdicts = _verdicts(observed, cluster, state, digest)
    return Plan(
        verdicts=verdicts,
        status=_status(observed, cluster, state, digest),
        create=create,
        apply=apply,
        delete=_doomed(observed, cluster, state, [ref_of(child) for child in apply]),
        settings=settings,
        settings_to=_settings_behind(observed, digest),
        profile=state.profile,
        profile_to=_profile_behind(observed, state.profile),
        adopt_profile=_profile_to_adopt(observed, state),
        look_again_s=_look_again_s(verdicts, cluster),
    )


def _children(cluster: Cluster, state: ProfileState) -> list[Child]:
    """Return the objects that should exist now, in the order in which they are needed."""
    children = [settings_config_map(cluster)]
    if state.profile is not None:
        children.append(profile_config_map(cluster, state.profile))
    if state.job_may_run and state.job is not None and not state.restart_job:
        children += [*profiler_access(cluster), state.job]
    children += [engine_service(cluster), *router_access(cluster), router_service(cluster)]
    if state.engines_may_start:
        children.append(engine_deployment(cluster))
    children.append(router_deployment(cluster))
    return children


def _secrets_to_create(observed: Observed, cluster: Cluster, mint: Callable[[], str]) -> list[Child]:
    secrets = []
    if Ref("Secret", cluster.child_name("internal")) not in observed.live:
        secrets.append(internal_secret(cluster, mint(), mint()))
    if cluster.spec.router.api_key_secret is None and Ref("Secret", cluster.api_key_secret) not in observed.live:
        secrets.append(api_key_secret(cluster, f"coda-{mint()}"))
    return secrets


def _doomed(observed: Observed, cluster: Cluster, state: ProfileState, applied: Sequence[Ref]) -> list[Doomed]:
    """Return this cluster's objects that are not wanted any more."""
    kept = {*applied, Ref("Secret", cluster.child_name("internal"))}
    # Clients hold the generated key: naming another Secret, or misspelling one, must not make it worthless for ever.
    kept |= {Ref("Secret", cluster.api_key_secret), Ref("Secret", cluster.generated_api_key_secret)}
    if not state.engines_may_start:
        # Engines of an earlier specification go on serving until the new one is measured.
        kept |= {Ref("Deployment", cluster.child_name("engine")), Ref("ConfigMap", cluster.child_name("profile"))}
    if state.job is not None and not state.restart_job:
        kept.add(ref_of(state.job))  # for its log
    return [
        Doomed(ref, item["metadata"]["uid"])
        for ref, item in observed.live.items()
        if ref not in kept and _owns(observed, ref) and "deletionTimestamp" not in item["metadata"]
    ]


def _settings_behind(observed: Observed, digest: str) -> list[str]:
    engines = [
        report.address
        for report in observed.engines
        if report.snapshot is not None and report.snapshot.settings_digest != digest
    ]
    return engines + [report.address for report in observed.routers if report.settings_digest not in (None, digest)]


def _profile_behind(observed: Observed, profile: Profile | None) -> list[str]:
    """Return the engines without this profile, except those that have refused it."""
    if profile is None:
        return []
    behind = []
    for report in observed.engines:
        if report.snapshot is None or report.snapshot.profile_digest == profile.digest():
            continue
        capability = report.snapshot.capabilities.get(Feature.STATE_ADMISSION)
        if capability is None or capability.reason not in _REFUSED:
            behind.append(report.address)
    return behind


def _profile_to_adopt(observed: Observed, state: ProfileState) -> str | None:
    stored = observed.profile
    if stored is None or state.profile is None or not stored.made_by_job:
        return None
    return stored.name if all(owner.get("uid") != observed.uid for owner in stored.owners) else None


def _verdicts(observed: Observed, cluster: Cluster, state: ProfileState, digest: str) -> list[Verdict]:
    named = cluster.spec.router.api_key_secret
    missing = named if named is not None and not observed.api_key_secret_exists else ""
    verdicts = [
        state.verdict,
        engines_ready(observed),
        routable(observed, missing),
        admission_enabled(observed, digest),
    ]
    needs = [ConditionType.ENGINES_READY, ConditionType.ROUTABLE]
    if cluster.spec.profiling.mode is not ProfilingMode.DISABLED:
        needs.append(ConditionType.PROFILED)
    return [*verdicts, ready(verdicts, needs)]


def _status(observed: Observed, cluster: Cluster, state: ProfileState, digest: str) -> CodaClusterStatus:
    stored = observed.profile
    profile = ProfileStatus(
        name=stored.name if stored is not None and state.profile is not None else "",
        spec_key_digest=cluster.spec_key.digest(),
        digest=state.profile.digest() if state.profile is not None else "",
    )
    status = CodaClusterStatus(
        selector=",".join(f"{name}={value}" for name, value in cluster.selector(ENGINE).items()),
        url=router_url(cluster),
        api_key_secret=cluster.api_key_secret,
        settings_digest=digest,
        profile=profile,
    )
    return _with_counts(status, observed, wanted=cluster.spec.engine.replicas)


def _with_counts(status: CodaClusterStatus, observed: Observed, wanted: int | None = None) -> CodaClusterStatus:
    deployment = observed.live.get(Ref("Deployment", f"{observed.key.name}-engine"))
    asked, serving, _ = replica_counts(deployment) if deployment is not None else (0, 0, 0)
    replicas = deployment.get("status", {}).get("replicas", 0) if deployment is not None else 0
    engines = f"{serving}/{asked if wanted is None else wanted}"
    return status.model_copy(update={"replicas": replicas, "ready_replicas": serving, "engines": engines})


def _leave_alone(observed: Observed, reason: ConditionReason, message: str) -> Plan:
    """Return a plan that touches nothing: what serves goes on serving, and the conditions stay true of it."""
    seen = [
        engines_ready(observed),
        routable(observed),
        admission_enabled(observed, observed.status.settings_digest),
    ]
    verdicts = [*seen, Verdict(ConditionType.READY, False, reason, message)]
    # A taken name may be a deleted namesake's child that Kubernetes is about to remove.
    look_again_s = LOOK_AGAIN_UNSETTLED_S if reason is ConditionReason.NAME_TAKEN else LOOK_AGAIN_SETTLED_S
    return Plan(verdicts, _with_counts(observed.status, observed), look_again_s=look_again_s)


def _owns(observed: Observed, ref: Ref) -> bool:
    owners: list[dict[str, Any]] = observed.live[ref]["metadata"].get("ownerReferences", [])
    return any(owner.get("uid") == observed.uid for owner in owners)


def _look_again_s(verdicts: Sequence[Verdict], cluster: Cluster) -> float:
    unsettled = [verdict for verdict in verdicts if not verdict.status]
    if cluster.spec.profiling.mode is ProfilingMode.DISABLED:
        unsettled = [item for item in unsettled if item.type in (ConditionType.ENGINES_READY, ConditionType.ROUTABLE)]
    final = {ConditionReason.PROFILING_FAILED, Reason.DISABLED_BY_SETTINGS, *_REFUSED}
    waiting = [item for item in unsettled if item.reason not in final]
    return LOOK_AGAIN_UNSETTLED_S if waiting else LOOK_AGAIN_SETTLED_S
