"""One CodaCluster as the builders see it: its specification, identity, names and labels."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coda_engine.contract.profile import SpecKey
from coda_operator.kube.resources import Ref
from coda_operator.profile_object import MANAGED_BY, MANAGED_BY_LABEL
from coda_operator.spec import API_VERSION, CLUSTER_KIND, CodaClusterSpec, Device

CLUSTER_LABEL = "coda-serving.dev/cluster"
COMPONENT_LABEL = "app.kubernetes.io/component"

ENGINE = "engine"
ROUTER = "router"
PROFILER = "profiler"

_ACCOUNT_KINDS = ("ServiceAccount", "Role", "RoleBinding")

Child = dict[str, Any]
"""A Kubernetes object as plain data."""


@dataclass(frozen=True, slots=True)
class Images:
    """Images that a CodaCluster gets unless it names its own.

    Attributes:
        router: Router image.
        engine_cpu: Engine image for device cpu.
        engine_cuda: Engine image for device cuda.
        pull_policy: ``imagePullPolicy`` of all pods; "" = Kubernetes' default.
    """

    router: str
    engine_cpu: str
    engine_cuda: str
    pull_policy: str = ""


@dataclass(frozen=True, slots=True)
class Cluster:
    """A CodaCluster whose specification is valid."""

    name: str
    namespace: str
    uid: str
    spec: CodaClusterSpec
    images: Images

    @property
    def engine_image(self) -> str:
        """Image of engines and profiling Job."""
        by_device = {Device.CPU: self.images.engine_cpu, Device.CUDA: self.images.engine_cuda}
        return self.spec.engine.image or by_device[self.spec.engine.device]

    @property
    def router_image(self) -> str:
        """Image of the router."""
        return self.spec.router.image or self.images.router

    @property
    def spec_key(self) -> SpecKey:
        """Key by which this configuration's profile is found; the engine image stands for the vLLM in it."""
        return self.spec.spec_key(self.engine_image)

    @property
    def api_key_secret(self) -> str:
        """Secret with the API keys: the one that the spec names, or the generated one."""
        return self.spec.router.api_key_secret or self.generated_api_key_secret

    @property
    def generated_api_key_secret(self) -> str:
        """Secret that is made for a CodaCluster that names none."""
        return self.child_name("api-key")

    def child_name(self, part: str) -> str:
        """Return the name of a child, for example ``demo-engine``."""
        return f"{self.name}-{part}"

    def selector(self, component: str) -> dict[str, str]:
        """Return the labels by which this cluster's pods of one component are found."""
        return {CLUSTER_LABEL: self.name, COMPONENT_LABEL: component}

    def labels(self, component: str) -> dict[str, str]:
        """Return the labels of this cluster's objects of one component."""
        return {
            "app.kubernetes.io/name": "coda",
            "app.kubernetes.io/instance": self.name,
            MANAGED_BY_LABEL: MANAGED_BY,
            **self.selector(component),
        }

    def owner_reference(self, controller: bool = True) -> dict[str, Any]:
        """Return the reference that lets Kubernetes delete a child together with the CodaCluster."""
        # blockOwnerDeletion stays false: true would need the right to set finalizers on CodaClusters.
        reference = {"apiVersion": API_VERSION, "kind": CLUSTER_KIND, "name": self.name, "uid": self.uid}
        return reference | {"controller": controller, "blockOwnerDeletion": False}

    def child(self, api_version: str, kind: str, name: str, component: str, content: Mapping[str, Any]) -> Child:
        """Return an object of this cluster: metadata with labels and owner, and ``content`` beside it."""
        return {
            "apiVersion": api_version,
            "kind": kind,
            "metadata": {
                "name": name,
                "namespace": self.namespace,
                "labels": self.labels(component),
                "ownerReferences": [self.owner_reference()],
            },
            **content,
        }


def possible_children(name: str) -> tuple[Ref, ...]:
    """Return every object that a CodaCluster of this name may have, except Jobs (their names hold a digest)."""
    accounts = [Ref(kind, f"{name}-{part}") for part in (ROUTER, PROFILER) for kind in _ACCOUNT_KINDS]
    return (
        Ref("ConfigMap", f"{name}-settings"),
        Ref("ConfigMap", f"{name}-profile"),
        Ref("Secret", f"{name}-internal"),
        Ref("Secret", f"{name}-api-key"),
        *accounts,
        Ref("Service", f"{name}-engine"),
        Ref("Service", f"{name}-router"),
        Ref("Deployment", f"{name}-engine"),
        Ref("Deployment", f"{name}-router"),
    )
