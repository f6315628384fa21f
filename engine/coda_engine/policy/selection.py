"""From the settings document to policy values, the same way wherever policies run."""

from coda_engine.contract.settings import (
    ExecutionAdmissionSettings,
    StateAdmissionPolicyName,
    StateAdmissionSettings,
)
from coda_engine.policy.execution_admission import CompatibilityAware
from coda_engine.policy.state_admission import Fifo, StateAdmissionPolicy, TieredAging


def state_admission_policy(settings: StateAdmissionSettings) -> StateAdmissionPolicy:
    """Return the queue order that the settings name."""
    match settings.policy:
        case StateAdmissionPolicyName.FIFO:
            return Fifo()
        case StateAdmissionPolicyName.TIERED_AGING:
            return TieredAging(tau_ms=settings.tau_ms, max_wait_ms=settings.max_wait_ms)


def execution_admission_policy(settings: ExecutionAdmissionSettings) -> CompatibilityAware:
    """Return the cohort planner that the settings describe."""
    return CompatibilityAware(
        min_requests=settings.min_requests,
        min_context_ratio=settings.min_context_ratio,
        min_cohort=settings.min_cohort,
        min_share=settings.min_share,
        launch_allowance_ms=settings.launch_allowance_ms,
        min_gain=settings.min_gain,
    )
