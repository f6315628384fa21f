"""A pod as conditions speak of it: does it serve, and if not, what does Kubernetes or the process itself say."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from coda_operator.desired.cluster import COMPONENT_LABEL

_MAX_LAST_WORDS_CHARS = 400
_STILL_STARTING = frozenset({"ContainerCreating", "PodInitializing"})


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod.

    Attributes:
        name: Its name.
        component: ``engine``, ``router`` or ``profiler``.
        owner: Name of its Job or ReplicaSet.
        created_at: When it was made, RFC 3339.
        ip: Its address; "" before it has one.
        running: Its containers run (they may not serve yet).
        ready: It serves.
        problem: What keeps it from running, as Kubernetes puts it; "" when nothing does.
        last_words: The end of the log of a container that ended; "" otherwise.
    """

    name: str
    component: str
    owner: str
    created_at: str
    ip: str
    running: bool
    ready: bool
    problem: str = ""
    last_words: str = ""


def read_pod(item: Mapping[str, Any]) -> Pod:
    """Return the pod in a Kubernetes object."""
    metadata, status = item["metadata"], item.get("status", {})
    statuses = [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]
    going = "deletionTimestamp" in metadata
    owners = metadata.get("ownerReferences") or [{}]
    return Pod(
        name=metadata["name"],
        component=metadata.get("labels", {}).get(COMPONENT_LABEL, ""),
        owner=owners[0].get("name", ""),
        created_at=metadata.get("creationTimestamp", ""),
        ip=status.get("podIP", ""),
        running=status.get("phase") == "Running" and not going,
        ready=not going and _condition_is_true(status, "Ready"),
        problem=_unschedulable(status) or _container_problem(statuses),
        last_words=_last_words(statuses),
    )


def _condition_is_true(status: Mapping[str, Any], kind: str) -> bool:
    return any(item["type"] == kind and item["status"] == "True" for item in status.get("conditions", []))


def _unschedulable(status: Mapping[str, Any]) -> str:
    for item in status.get("conditions", []):
        if item["type"] == "PodScheduled" and item["status"] == "False":
            return f"{item.get('reason', 'Unschedulable')}: {item.get('message', '')}"
    return ""


def _container_problem(statuses: Sequence[Mapping[str, Any]]) -> str:
    for item in statuses:
        state = item.get("state", {})
        waiting = state.get("waiting", {})
        if waiting.get("reason") and waiting["reason"] not in _STILL_STARTING:
            return f"{item['name']}: {waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
        ended = state.get("terminated", {})
        if ended.get("exitCode", 0) != 0:
            return f"{item['name']}: {ended.get('reason', 'Error')} (exit code {ended['exitCode']})"
    return ""


def _last_words(statuses: Sequence[Mapping[str, Any]]) -> str:
    for item in statuses:
        for state in (item.get("state", {}), item.get("lastState", {})):
            ended = state.get("terminated", {})
            if ended.get("exitCode", 0) != 0 and ended.get("message"):
                return _tail(ended["message"])
    return ""


def _tail(text: str) -> str:
    """Return the last whole lines of a log that fit a condition's message, or the beginning of a long last line."""
    kept: list[str] = []
    for line in reversed(text.strip().splitlines()):
        if sum(map(len, kept)) + len(kept) + len(line) > _MAX_LAST_WORDS_CHARS:
            return "\n".join(["...", *kept]) if kept else f"{line[:_MAX_LAST_WORDS_CHARS]}..."
        kept.insert(0, line)
    return "\n".join(kept)
