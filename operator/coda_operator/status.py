"""A CodaCluster's status: what the operator reports, as models (their schema is in the CRD)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Self

from pydantic import Field, ValidationError

from coda_engine.contract.models import ReportedModel


class ConditionType(StrEnum):
    """What can be true about a CodaCluster, in the order in which it becomes true."""

    PROFILED = "Profiled"
    ENGINES_READY = "EnginesReady"
    ROUTABLE = "Routable"
    ADMISSION_ENABLED = "AdmissionEnabled"
    READY = "Ready"


class ConditionReason(StrEnum):
    """Why a condition is as it is. AdmissionEnabled also uses the engines' own ``Reason`` values."""

    # Profiled
    PROFILE_FOUND = "ProfileFound"
    PROFILING_DISABLED = "ProfilingDisabled"
    PROFILING_PENDING = "ProfilingPending"
    PROFILING_RUNNING = "ProfilingRunning"
    PROFILING_BLOCKED = "ProfilingBlocked"
    PROFILING_FAILED = "ProfilingFailed"
    # EnginesReady
    ALL_ENGINES_READY = "AllEnginesReady"
    ENGINES_NOT_CREATED = "EnginesNotCreated"
    ENGINES_STARTING = "EnginesStarting"
    ENGINES_UPDATING = "EnginesUpdating"
    ENGINE_FAILING = "EngineFailing"
    # Routable
    ROUTER_READY = "RouterReady"
    ROUTER_STARTING = "RouterStarting"
    NO_ENGINE = "NoEngine"
    # AdmissionEnabled
    ADMISSION_RUNNING = "AdmissionRunning"
    SETTINGS_NOT_APPLIED = "SettingsNotApplied"
    SNAPSHOT_UNAVAILABLE = "SnapshotUnavailable"
    # Ready
    ALL_READY = "AllReady"
    INVALID_SPEC = "InvalidSpec"
    NAME_TAKEN = "NameTaken"
    REFUSED_BY_API_SERVER = "RefusedByAPIServer"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one look at the cluster says about one condition; becomes a :class:`Condition` when reported.

    Attributes:
        type: The condition.
        status: Whether it is true.
        reason: A :class:`ConditionReason` or an engine's ``Reason``.
        message: For people: what is so, and what to do about it.
    """

    type: ConditionType
    status: bool
    reason: str
    message: str


class Condition(ReportedModel):
    """One condition in Kubernetes' usual form."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str = Field(description="Machine-readable reason for the status.")
    message: str = Field(default="", description="What is so and what to do about it.")
    observed_generation: int = Field(default=0, description="Generation of the spec that this is about.")
    last_transition_time: str = Field(default="", description="When the status last changed, RFC 3339.")


class ProfileStatus(ReportedModel):
    """Which profile the engines run with."""

    name: str = Field(default="", description="The CodaProfile.")
    spec_key_digest: str = Field(default="", description="Digest of the configuration that this spec describes.")
    digest: str = Field(default="", description="Digest of the artifact, as the engines report it.")


class CodaClusterStatus(ReportedModel):
    """What the operator saw last."""

    observed_generation: int = Field(default=0, description="Generation of the spec that this status is about.")
    replicas: int = Field(default=0, description="Engine pods.")
    ready_replicas: int = Field(default=0, description="Engine pods that serve.")
    engines: str = Field(default="", description="Ready and wanted engines, for people.")
    selector: str = Field(default="", description="Label selector of the engine pods.")
    url: str = Field(default="", description="Base URL of the router inside the cluster.")
    api_key_secret: str = Field(default="", description="Secret with the API keys.")
    settings_digest: str = Field(default="", description="Digest of the settings that engines and router should run.")
    profile: ProfileStatus = ProfileStatus()
    conditions: list[Condition] = Field(
        default_factory=list,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )

    @classmethod
    def read(cls, status: object) -> Self:
        """Return the status in an object; an empty one when it cannot be read (it is written anew anyway)."""
        try:
            return cls.model_validate(status or {})
        except ValidationError:
            return cls()

    def condition(self, kind: ConditionType) -> Condition | None:
        """Return the condition of this type, or None before it was first reported."""
        return next((item for item in self.conditions if item.type == kind), None)


def merge_conditions(
    previous: Sequence[Condition], verdicts: Iterable[Verdict], generation: int, now: str
) -> list[Condition]:
    """Return the conditions after ``verdicts``; the transition time moves only when a status flips.

    Args:
        previous: Conditions reported before; those without a new verdict stay as they are.
        verdicts: What was just seen.
        generation: The spec's generation that the verdicts are about.
        now: RFC 3339 time of the observation.
    """
    merged = {item.type: item for item in previous}
    for verdict in verdicts:
        status: Literal["True", "False"] = "True" if verdict.status else "False"
        old = merged.get(verdict.type)
        merged[verdict.type] = Condition(
            type=verdict.type.value,
            status=status,
            reason=verdict.reason,
            message=verdict.message,
            observed_generation=generation,
            last_transition_time=old.last_transition_time if old is not None and old.status == status else now,
        )
    order = [kind.value for kind in ConditionType]
    return sorted(merged.values(), key=lambda item: order.index(item.type) if item.type in order else len(order))
