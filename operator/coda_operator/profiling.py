"""Decide where the profile of a configuration stands: found, being measured, failed, or not wanted."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from coda_engine.contract.profile import Profile
from coda_operator.desired.cluster import PROFILER, Child, Cluster
from coda_operator.desired.profiling_job import RETRIES, profiling_job
from coda_operator.kube.resources import Ref, ref_of
from coda_operator.observed import Observed
from coda_operator.pods import Pod
from coda_operator.spec import ProfilingMode
from coda_operator.status import ConditionReason, ConditionType, Verdict


class ProfilePhase(StrEnum):
    """Where a profile stands."""

    DISABLED = "Disabled"
    FOUND = "Found"
    PENDING = "Pending"
    RUNNING = "Running"
    FAILED = "Failed"


@dataclass(frozen=True, slots=True)
class ProfileState:
    """Where the profile of a CodaCluster stands.

    Attributes:
        phase: Where.
        verdict: The condition Profiled.
        job: The Job of this configuration; None when none is wanted.
        profile: The artifact, in phase Found.
        restart_job: The Job ended but its profile is gone: it has to go before it can run again.
    """

    phase: ProfilePhase
    verdict: Verdict
    job: Child | None = None
    profile: Profile | None = None
    restart_job: bool = False

    @property
    def engines_may_start(self) -> bool:
        """Whether engines of the present specification may run (mode Required measures first)."""
        return self.phase in (ProfilePhase.DISABLED, ProfilePhase.FOUND)

    @property
    def job_may_run(self) -> bool:
        """Whether the Job, and its right to write a profile, are wanted."""
        return self.phase in (ProfilePhase.PENDING, ProfilePhase.RUNNING, ProfilePhase.FAILED)


def profile_state(observed: Observed, cluster: Cluster) -> ProfileState:
    """Return where the profile stands.

    Raises:
        PodTemplateError: The person's patch of the pod does not fit.
    """
    if cluster.spec.profiling.mode is ProfilingMode.DISABLED:
        message = "profiling.mode is Disabled; admission is first come, first served"
        return ProfileState(ProfilePhase.DISABLED, _verdict(False, ConditionReason.PROFILING_DISABLED, message))
    job = profiling_job(cluster)
    stored = observed.profile
    if stored is not None and stored.profile is not None:
        message = f"CodaProfile {stored.name}, measured {stored.profile.provenance.measured_at}"
        verdict = _verdict(True, ConditionReason.PROFILE_FOUND, message)
        return ProfileState(ProfilePhase.FOUND, verdict, job, stored.profile)
    if stored is not None:
        message = f"CodaProfile {stored.name} cannot be read; delete it to measure again: {stored.problem}"
        return ProfileState(ProfilePhase.FAILED, _verdict(False, ConditionReason.PROFILING_FAILED, message), job)
    return _job_state(observed, job, observed.live.get(ref_of(job)))


def _job_state(observed: Observed, job: Child, live: Mapping[str, Any] | None) -> ProfileState:
    if live is None:
        verdict = _verdict(False, ConditionReason.PROFILING_PENDING, "starting the profiling Job")
        return ProfileState(ProfilePhase.PENDING, verdict, job)
    name, status = ref_of(job), live.get("status", {})
    ended = {item["type"]: item for item in status.get("conditions", []) if item["status"] == "True"}
    if "Failed" in ended:
        return ProfileState(
            ProfilePhase.FAILED,
            _verdict(False, ConditionReason.PROFILING_FAILED, _failure(observed, name, ended["Failed"])),
            job,
        )
    if "Complete" in ended:
        message = f"{name} ended, but its CodaProfile is gone; measuring again"
        verdict = _verdict(False, ConditionReason.PROFILING_PENDING, message)
        return ProfileState(ProfilePhase.PENDING, verdict, job, restart_job=True)
    return ProfileState(ProfilePhase.RUNNING, _progress(observed, name, status), job)


def _progress(observed: Observed, job: Ref, status: Mapping[str, Any]) -> Verdict:
    failed = status.get("failed", 0)
    attempt = f"attempt {min(failed + 1, RETRIES + 1)} of {RETRIES + 1}"
    words = _words_of(observed, job)
    if words and not any(pod.running for pod in _pods_of(observed, job)):
        return _verdict(False, ConditionReason.PROFILING_BLOCKED, f"{job}, {attempt}, does not run: {words}")
    return _verdict(False, ConditionReason.PROFILING_RUNNING, f"{job} is measuring, {attempt}")


def _failure(observed: Observed, job: Ref, condition: Mapping[str, Any]) -> str:
    words = _words_of(observed, job)
    return (
        f"{job} failed ({condition.get('reason', 'Failed')}: {condition.get('message', '')}), engines of this "
        f"configuration are not started; change the spec, or delete the Job to try again"
        + (f"; its last words: {words}" if words else "")
    )


def _words_of(observed: Observed, job: Ref) -> str:
    """Return what the Job's last pod says went wrong; "" when it says nothing."""
    for pod in reversed(_pods_of(observed, job)):
        words = ": ".join(part for part in (pod.problem, pod.last_words) if part)
        if words:
            return words
    return ""


def _pods_of(observed: Observed, job: Ref) -> list[Pod]:
    """Return the Job's pods, oldest first."""
    pods = [pod for pod in observed.pods if pod.component == PROFILER and pod.owner == job.name]
    return sorted(pods, key=lambda pod: pod.created_at)


def _verdict(status: bool, reason: ConditionReason, message: str) -> Verdict:
    return Verdict(ConditionType.PROFILED, status, reason, message)
