"""The two custom resource definitions: names, columns, subresources and the rules between fields."""

from typing import Any

from coda_operator.crd.structural import add_rules, structural_schema
from coda_operator.profile_object import CodaProfileSpec
from coda_operator.spec import (
    CLUSTER_KIND,
    GROUP,
    MAX_NAME_CHARS,
    NAME_PATTERN,
    NAME_RULE,
    PROFILE_KIND,
    VERSION,
    CodaClusterSpec,
)
from coda_operator.status import CodaClusterStatus

_CATEGORIES = ["coda-serving"]
"""Not the short name: kubectl takes a category before it, and `kubectl delete coda NAME` would fail."""


def coda_cluster_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of CodaCluster."""
    schema = _object_schema(
        "A model served by vLLM engines with Coda's admission, and the router in front of them.",
        spec=structural_schema(CodaClusterSpec),
        status=structural_schema(CodaClusterStatus),
    )
    _add_cluster_rules(schema)
    return _definition(
        kind=CLUSTER_KIND,
        short_names=["coda"],
        schema=schema,
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.engine.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        columns=[
            _column("Model", ".spec.model.name"),
            _column("Engines", ".status.engines"),
            _column("Profiled", _condition_path("Profiled", "status")),
            _column("Admission", _condition_path("AdmissionEnabled", "status")),
            _column("Ready", _condition_path("Ready", "status")),
            _column("Reason", _condition_path("Ready", "reason")),
            _column("Age", ".metadata.creationTimestamp", "date"),
            _column("URL", ".status.url", priority=1),
            _column("Message", _condition_path("Ready", "message"), priority=1),
        ],
    )


def coda_profile_definition() -> dict[str, Any]:
    """Return the CustomResourceDefinition of CodaProfile."""
    schema = _object_schema(
        "What was measured once for a model on a kind of hardware; engines take it only if it is their own.",
        spec=structural_schema(CodaProfileSpec),
    )
    schema["required"] = ["spec"]
    key = ".spec.artifact.full_key"
    return _definition(
        kind=PROFILE_KIND,
        short_names=["codaprof"],
        schema=schema,
        subresources={},
        columns=[
            _column("Model", f"{key}.spec.model"),
            _column("Hardware", f"{key}.hardware"),
            _column("vLLM", f"{key}.vllm_version"),
            _column("Quick", ".spec.artifact.provenance.quick", "boolean"),
            _column("Age", ".metadata.creationTimestamp", "date"),
        ],
    )


def _object_schema(description: str, **parts: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            **parts,
        },
    }


def _add_cluster_rules(schema: dict[str, Any]) -> None:
    """Add what a single field's schema cannot say; each message tells what to do."""
    schema["required"] = ["spec"]
    add_rules(
        schema,
        (),
        [
            _rule(
                f"self.metadata.name.size() <= {MAX_NAME_CHARS} && self.metadata.name.matches('{NAME_PATTERN}')",
                f"metadata.name: {NAME_RULE}",
            )
        ],
    )
    add_rules(
        schema,
        ("spec", "model", "source"),
        [
            _rule(
                "[has(self.hub), has(self.builtin), has(self.hostPath)].filter(given, given).size() == 1",
                "set exactly one of hub, builtin, hostPath",
            )
        ],
    )
    add_rules(
        schema,
        ("spec", "engine"),
        [
            _rule("self.replicas >= 1", "replicas: at least 1; this version has no scale-to-zero"),
            _rule(
                "self.device != 'cpu' || (!has(self.gpus) && self.gpuProduct == '')",
                "gpus and gpuProduct are for device cuda; remove them or set device: cuda",
            ),
            _rule(
                "self.device != 'cuda' || !has(self.cpus)",
                "cpus is for device cpu; for device cuda set resources in podTemplate",
            ),
        ],
    )
    add_rules(
        schema,
        ("spec", "admission", "execution"),
        [
            _rule(
                "self.minCohort * 2 <= self.minRequests",
                "minCohort is more than half of minRequests, so no step could be split",
            )
        ],
    )


def _definition(
    kind: str,
    short_names: list[str],
    schema: dict[str, Any],
    subresources: dict[str, Any],
    columns: list[dict[str, Any]],
) -> dict[str, Any]:
    singular = kind.lower()
    plural = f"{singular}s"
    version: dict[str, Any] = {"name": VERSION, "served": True, "storage": True}
    if subresources:
        version["subresources"] = subresources
    version["additionalPrinterColumns"] = columns
    version["schema"] = {"openAPIV3Schema": schema}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": singular,
                "shortNames": short_names,
                "categories": _CATEGORIES,
            },
            "versions": [version],
        },
    }


def _column(name: str, path: str, kind: str = "string", priority: int = 0) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path}
    return column | {"priority": priority} if priority else column


def _condition_path(condition: str, field: str) -> str:
    return f'.status.conditions[?(@.type=="{condition}")].{field}'


def _rule(rule: str, message: str) -> dict[str, str]:
    return {"rule": rule, "message": message}
