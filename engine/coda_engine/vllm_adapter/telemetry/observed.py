"""The parts of an engine that telemetry looks at."""

from dataclasses import dataclass

from vllm.v1.core.sched.scheduler import Scheduler

from coda_engine.vllm_adapter.capabilities import CapabilityVector
from coda_engine.vllm_adapter.control import Control
from coda_engine.vllm_adapter.identity.table import IdentityTable
from coda_engine.vllm_adapter.reclaim.reclaim import Reclaim
from coda_engine.vllm_adapter.scheduler.admission import StateAdmission
from coda_engine.vllm_adapter.scheduler.residency import ResidencyIndex


@dataclass(frozen=True, slots=True)
class ObservedEngine:
    """What telemetry looks at.

    Attributes:
        scheduler: vLLM's.
        instance_id: New at each engine start.
        identities: Who each request is from.
        capabilities: What runs and why not.
        control: Settings and profile in force.
        admission: None while it is closed.
        residency: What is in HBM; None when that cannot be known.
        reclaim: None while it is closed.
    """

    scheduler: Scheduler
    instance_id: str
    identities: IdentityTable
    capabilities: CapabilityVector
    control: Control
    admission: StateAdmission | None
    residency: ResidencyIndex | None
    reclaim: Reclaim | None
