"""From the settings document to policy values, the same way wherever policies run."""

from coda_engine.contract.settings import (
    ExecutionAdmissionSettings,
    StateAdmissionPolicyName,
    StateAdmissionSettings,
)
from coda_engine.policy.execution_admission import CompatibilityAware
from coda_engine.policy.state_admission import Fifo, StateAdmissionPolicy, TieredAging
from coda_engine.policy.state_admission_coda import Coda
from coda_engine.policy.state_admission_rivals import CacheWise, ShortestPreparation


def state_admission_policy(settings: StateAdmissionSettings) -> StateAdmissionPolicy:
    """Return the queue order that the settings name."""
    match settings.policy:
        case StateAdmissionPolicyName.CODA:
            coda = Coda()
            return Coda(
                aging=_aging(settings, coda.aging),
                on_time_ms=coda.on_time_ms if settings.on_time_ms is None else float(settings.on_time_ms),
                reserve=settings.reserve_for_oldest,
            )
        case StateAdmissionPolicyName.TIERED_AGING:
            return _aging(settings, TieredAging())
        case StateAdmissionPolicyName.CACHEWISE:
            return CacheWise()
        case StateAdmissionPolicyName.SHORTEST_PREPARATION:
            return ShortestPreparation()
        case StateAdmissionPolicyName.FIFO:
            return Fifo()


def _aging(settings: StateAdmissionSettings, own: TieredAging) -> TieredAging:
    """Return ``own`` with the constants that the settings give."""
    return TieredAging(
        tau_ms=own.tau_ms if settings.tau_ms is None else float(settings.tau_ms),
        max_wait_ms=own.max_wait_ms if settings.max_wait_ms is None else float(settings.max_wait_ms),
    )


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
