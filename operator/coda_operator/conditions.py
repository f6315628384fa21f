"""Decide the conditions from what is really there: one pure function for each."""

from collections.abc import Mapping, Sequence
from typing import Any

from coda_engine.contract.reasons import Feature, Reason
from coda_engine.contract.snapshot import EngineSnapshot
from coda_operator.desired.cluster import ENGINE, ROUTER
from coda_operator.kube.resources import Ref
from coda_operator.observed import Observed
from coda_operator.pods import Pod
from coda_operator.status import ConditionReason, ConditionType, Verdict


def engines_ready(observed: Observed) -> Verdict:
    """Return whether every engine that the Deployment asks for serves, in its newest form."""
    deployment = observed.live.get(Ref("Deployment", f"{observed.key.name}-engine"))
    if deployment is None:
        message = "no engines yet; they are started once the configuration has its profile"
        return Verdict(ConditionType.ENGINES_READY, False, ConditionReason.ENGINES_NOT_CREATED, message)
    wanted, ready, updated = replica_counts(deployment)
    message = f"{ready} of {wanted} engines serve"
    settled = deployment.get("status", {}).get("observedGeneration") == deployment["metadata"].get("generation")
    pods = [pod for pod in observed.pods if pod.component == ENGINE]
    if settled and ready == updated == wanted == deployment["status"].get("replicas", 0):
        return Verdict(ConditionType.ENGINES_READY, True, ConditionReason.ALL_ENGINES_READY, message)
    failing = _failing(pods)
    if failing:
        return Verdict(ConditionType.ENGINES_READY, False, ConditionReason.ENGINE_FAILING, f"{message}; {failing}")
    reason = ConditionReason.ENGINES_STARTING if settled and updated >= wanted else ConditionReason.ENGINES_UPDATING
    return Verdict(ConditionType.ENGINES_READY, False, reason, message)


def routable(observed: Observed, missing_key_secret: str = "") -> Verdict:
    """Return whether a request to the router's Service reaches an engine."""

    def answer(status: bool, reason: ConditionReason, message: str) -> Verdict:
        return Verdict(ConditionType.ROUTABLE, status, reason, message)

    if missing_key_secret:
        message = f"spec.router.apiKeySecret: Secret {missing_key_secret} does not exist; create it"
        return answer(False, ConditionReason.ROUTER_STARTING, message)
    if not any(pod.ready for pod in observed.pods if pod.component == ENGINE):
        return answer(False, ConditionReason.NO_ENGINE, "no engine serves yet")
    pods = [pod for pod in observed.pods if pod.component == ROUTER]
    ready = sum(pod.ready for pod in pods)
    if ready == 0:
        return answer(False, ConditionReason.ROUTER_STARTING, _failing(pods) or "no router serves yet")
    return answer(True, ConditionReason.ROUTER_READY, f"{ready} of {len(pods)} routers serve")


def admission_enabled(observed: Observed, settings_digest: str) -> Verdict:
    """Return whether every engine that serves decides by Coda's admission, on the present settings."""

    def answer(status: bool, reason: str, message: str) -> Verdict:
        return Verdict(ConditionType.ADMISSION_ENABLED, status, reason, message)

    if not observed.engines:
        return answer(False, ConditionReason.NO_ENGINE, "no engine serves yet")
    for report in observed.engines:
        if report.snapshot is None:
            return answer(False, ConditionReason.SNAPSHOT_UNAVAILABLE, f"{report.pod}: {report.problem}")
    for report in observed.engines:
        capability = report.snapshot.capabilities.get(Feature.STATE_ADMISSION) if report.snapshot else None
        if capability is None or not capability.enabled:
            reason, detail = (capability.reason, capability.detail) if capability else (Reason.NOT_AVAILABLE, "")
            return answer(False, reason, f"{report.pod}: {detail or reason.value}" + _remedy(observed, reason))
    behind = [report.pod for report in observed.engines if _digest(report.snapshot) != settings_digest]
    behind += [report.pod for report in observed.routers if report.settings_digest != settings_digest]
    if behind:
        message = f"settings {settings_digest} are not in force yet on {', '.join(behind)}"
        return answer(False, ConditionReason.SETTINGS_NOT_APPLIED, message)
    message = f"{len(observed.engines)} engines decide by settings {settings_digest}{_outdated(observed)}"
    return answer(True, ConditionReason.ADMISSION_RUNNING, message)


def ready(verdicts: Sequence[Verdict], needs: Sequence[ConditionType]) -> Verdict:
    """Return Ready: true when all of ``needs`` are, else for the first that is not, with its reason."""
    for verdict in verdicts:
        if verdict.type in needs and not verdict.status:
            message = f"{verdict.type.value}: {verdict.message}"
            return Verdict(ConditionType.READY, False, verdict.reason, message)
    return Verdict(ConditionType.READY, True, ConditionReason.ALL_READY, "serving as specified")


def replica_counts(deployment: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return a Deployment's wanted, ready and updated replicas."""
    status = deployment.get("status", {})
    return deployment["spec"].get("replicas", 1), status.get("readyReplicas", 0), status.get("updatedReplicas", 0)


def _digest(snapshot: EngineSnapshot | None) -> str | None:
    return snapshot.settings_digest if snapshot is not None else None


def _failing(pods: Sequence[Pod]) -> str:
    """Return what the first pod that cannot serve says; "" when all serve or are only starting."""
    for pod in pods:
        if not pod.ready and (pod.problem or pod.last_words):
            return f"{pod.name}: {': '.join(part for part in (pod.problem, pod.last_words) if part)}"
    return ""


def _outdated(observed: Observed) -> str:
    """Return which engines decide by a profile of other driver or patch versions, and the remedy; "" when none does."""
    pods = [
        report.pod
        for report in observed.engines
        if report.snapshot is not None
        and (capability := report.snapshot.capabilities.get(Feature.STATE_ADMISSION)) is not None
        and capability.reason is Reason.PROFILE_NEEDS_REVALIDATION
    ]
    if not pods or observed.profile is None:
        return ""
    return (
        f"; the profile was measured under other driver or patch versions than those of {', '.join(pods)}: delete "
        f"CodaProfile {observed.profile.name} to measure again"
    )


def _remedy(observed: Observed, reason: str) -> str:
    refused = (Reason.PROFILE_MISMATCH, Reason.PROFILE_NOT_VALIDATED)
    if reason in refused and observed.profile is not None:
        return f"; delete CodaProfile {observed.profile.name} to measure again"
    return ""
