"""ServiceAccounts with what each process needs and no more."""

from collections.abc import Sequence
from typing import Any

from coda_operator.desired.cluster import PROFILER, ROUTER, Child, Cluster
from coda_operator.profile_object import profile_name
from coda_operator.spec import GROUP

_RBAC = "rbac.authorization.k8s.io"


def router_access(cluster: Cluster) -> list[Child]:
    """Return the router's account: it may follow EndpointSlices, which name the engines."""
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    return _account(cluster, ROUTER, [rule])


def profiler_access(cluster: Cluster) -> list[Child]:
    """Return the profiling Job's account: it may write CodaProfiles, change only its own, and nothing else."""
    own = [profile_name(cluster.spec_key.digest())]
    resource = {"apiGroups": [GROUP], "resources": ["codaprofiles"]}
    # A name cannot restrict creation, because the object has none yet when that is decided.
    rules = [
        resource | {"verbs": ["create"]},
        resource | {"resourceNames": own, "verbs": ["get", "patch"]},
    ]
    return _account(cluster, PROFILER, rules)


def _account(cluster: Cluster, component: str, rules: Sequence[dict[str, Any]]) -> list[Child]:
    name = cluster.child_name(component)
    subject = {"kind": "ServiceAccount", "name": name, "namespace": cluster.namespace}
    role = {"apiGroup": _RBAC, "kind": "Role", "name": name}
    return [
        cluster.child("v1", "ServiceAccount", name, component, {}),
        cluster.child(f"{_RBAC}/v1", "Role", name, component, {"rules": list(rules)}),
        cluster.child(f"{_RBAC}/v1", "RoleBinding", name, component, {"roleRef": role, "subjects": [subject]}),
    ]
