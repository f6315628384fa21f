"""Report: the status as it was seen, and an Event for whatever changed."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from coda_operator.apply import Action, Applied
from coda_operator.kube.client import FIELD_MANAGER, KubeClient
from coda_operator.kube.resources import Ref
from coda_operator.observed import Observed
from coda_operator.plan import Plan
from coda_operator.spec import API_VERSION, CLUSTER_KIND
from coda_operator.status import (
    CodaClusterStatus,
    Condition,
    ConditionReason,
    ConditionType,
    merge_conditions,
)

_MAX_EVENT_CHARS = 1024
_WARNINGS = frozenset(
    {
        ConditionReason.PROFILING_BLOCKED,
        ConditionReason.PROFILING_FAILED,
        ConditionReason.ENGINE_FAILING,
        ConditionReason.INVALID_SPEC,
        ConditionReason.NAME_TAKEN,
        ConditionReason.REFUSED_BY_API_SERVER,
    }
)


@dataclass(frozen=True, slots=True)
class Note:
    """An Event to record."""

    reason: str
    message: str
    is_warning: bool = False


async def report(kube: KubeClient, observed: Observed, plan: Plan, applied: Applied) -> None:
    """Write the status if it differs, and the Events that belong to it.

    Raises:
        ApiError: The API server refused, or could not be reached.
    """
    now = datetime.now(UTC)
    status = new_status(observed, plan, applied, now)
    ref = Ref(CLUSTER_KIND, observed.key.name)
    if status != observed.status:
        body = status.model_dump(mode="json", by_alias=True)
        await kube.merge(ref, observed.key.namespace, {"status": body}, subresource="status")
    for note in notes(observed.status.conditions, status.conditions, applied):
        await kube.record(event(observed, note, now))


def new_status(observed: Observed, plan: Plan, applied: Applied, now: datetime) -> CodaClusterStatus:
    """Return the status after this round."""
    verdicts = [*plan.verdicts]
    if applied.problem:
        message = f"the API server refused: {applied.problem}"
        verdicts = [
            replace(verdict, status=False, reason=ConditionReason.REFUSED_BY_API_SERVER, message=message)
            if verdict.type is ConditionType.READY
            else verdict
            for verdict in verdicts
        ]
    conditions = merge_conditions(observed.status.conditions, verdicts, observed.generation, _rfc3339(now))
    update = {"observed_generation": observed.generation, "conditions": conditions}
    return plan.status.model_copy(update=update)


def notes(before: Sequence[Condition], after: Sequence[Condition], applied: Applied) -> list[Note]:
    """Return an Event for each thing that was done and each condition that turned (not for a new message only)."""
    known = {item.type: (item.status, item.reason) for item in before}
    turned = [item for item in after if known.get(item.type) != (item.status, item.reason)]
    elsewhere = {item.reason for item in turned if item.type != ConditionType.READY}
    done = [Note(action.value, message) for action, message in summary(applied)]
    return done + [
        Note(item.reason, f"{item.type} is {item.status}: {item.message}", item.reason in _WARNINGS)
        for item in turned
        # Ready repeats the condition that it is false for.
        if item.type != ConditionType.READY or item.reason not in elsewhere
    ]


def summary(applied: Applied) -> Iterator[tuple[Action, str]]:
    """Yield one line for each kind of action: ten children made at once are one Event."""
    subjects: dict[Action, list[str]] = {}
    for change in applied.changes:
        subjects.setdefault(change.action, []).append(change.subject)
    for action, names in subjects.items():
        yield action, f"{action.verb} {', '.join(names)}"


def event(observed: Observed, note: Note, now: datetime) -> dict[str, Any]:
    """Return the Event object of a note about the CodaCluster."""
    timestamp = _rfc3339(now)
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {
            "name": f"{observed.key.name}.{secrets.token_hex(8)}",
            "namespace": observed.key.namespace,
        },
        "involvedObject": {
            "apiVersion": API_VERSION,
            "kind": CLUSTER_KIND,
            "name": observed.key.name,
            "namespace": observed.key.namespace,
            "uid": observed.uid,
        },
        "type": "Warning" if note.is_warning else "Normal",
        "reason": note.reason,
        "message": note.message[:_MAX_EVENT_CHARS],
        "source": {"component": FIELD_MANAGER},
        "reportingComponent": FIELD_MANAGER,
        "firstTimestamp": timestamp,
        "lastTimestamp": timestamp,
        "count": 1,
    }


def _rfc3339(moment: datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
