"""Where the API server keeps each kind that the operator touches."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coda_operator.spec import CLUSTER_KIND, GROUP, PROFILE_KIND, VERSION

Object = dict[str, Any]
"""A Kubernetes object as plain data."""


@dataclass(frozen=True, slots=True)
class Resource:
    """One kind of object.

    Attributes:
        group: API group; "" for the core group.
        version: API version.
        plural: Name in URLs.
        kind: Name in objects.
    """

    group: str
    version: str
    plural: str
    kind: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """Return the URL path of the collection, an object or its subresource; None = all namespaces."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = f"/namespaces/{namespace}" if namespace is not None else ""
        parts = [part for part in (self.plural, name, subresource) if part is not None]
        return f"{root}{scope}/{'/'.join(parts)}"


CODA_CLUSTERS = Resource(GROUP, VERSION, "codaclusters", CLUSTER_KIND)
CODA_PROFILES = Resource(GROUP, VERSION, "codaprofiles", PROFILE_KIND)
CONFIG_MAPS = Resource("", "v1", "configmaps", "ConfigMap")
SECRETS = Resource("", "v1", "secrets", "Secret")
SERVICES = Resource("", "v1", "services", "Service")
SERVICE_ACCOUNTS = Resource("", "v1", "serviceaccounts", "ServiceAccount")
PODS = Resource("", "v1", "pods", "Pod")
EVENTS = Resource("", "v1", "events", "Event")
DEPLOYMENTS = Resource("apps", "v1", "deployments", "Deployment")
JOBS = Resource("batch", "v1", "jobs", "Job")
ROLES = Resource("rbac.authorization.k8s.io", "v1", "roles", "Role")
ROLE_BINDINGS = Resource("rbac.authorization.k8s.io", "v1", "rolebindings", "RoleBinding")

_BY_KIND = {
    resource.kind: resource
    for resource in (
        CODA_CLUSTERS,
        CODA_PROFILES,
        CONFIG_MAPS,
        SECRETS,
        SERVICES,
        SERVICE_ACCOUNTS,
        PODS,
        EVENTS,
        DEPLOYMENTS,
        JOBS,
        ROLES,
        ROLE_BINDINGS,
    )
}


@dataclass(frozen=True, slots=True, order=True)
class Ref:
    """Which object: kind and name; its namespace is its CodaCluster's."""

    kind: str
    name: str

    @property
    def resource(self) -> Resource:
        """Where the API server keeps it."""
        return _BY_KIND[self.kind]

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


def ref_of(item: Mapping[str, Any]) -> Ref:
    """Return the kind and name of an object."""
    return Ref(item["kind"], item["metadata"]["name"])
