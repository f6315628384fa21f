"""What the containers of engines, routers and profiling Jobs have in common: safety, folders, small builders."""

from typing import Any

from coda_operator.desired.cluster import Cluster

PYTHON = "python3"
"""Found on the image's PATH."""

UNPRIVILEGED_UID = 65532

SETTINGS_DIR = "/etc/coda/settings"
SECRET_DIR = "/etc/coda/internal"  # noqa: S105 - a folder's name
TMP_DIR = "/tmp"  # noqa: S108 - the container's only writable folder beside the volumes

SURROUNDINGS = {"HOME": TMP_DIR, "USER": "coda"}
"""The user id has no entry in the image's passwd: torch and kopf ask for a name, caches for a home."""


def pod_security() -> dict[str, Any]:
    """Return the pod's security context: no root, the runtime's system call filter."""
    return {
        "runAsNonRoot": True,
        "runAsUser": UNPRIVILEGED_UID,
        "runAsGroup": UNPRIVILEGED_UID,
        "fsGroup": UNPRIVILEGED_UID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security() -> dict[str, Any]:
    """Return a container's security context: nothing to gain, nothing to write outside its volumes."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def environment(variables: dict[str, str]) -> list[dict[str, str]]:
    """Return ``variables`` as a container's ``env``."""
    return [{"name": name, "value": value} for name, value in variables.items()]


def image(name: str, cluster: Cluster) -> dict[str, str]:
    """Return a container's image fields."""
    policy = cluster.images.pull_policy
    return {"image": name} | ({"imagePullPolicy": policy} if policy else {})


def mount(volume: str, path: str, read_only: bool = False) -> dict[str, Any]:
    """Return a volume's place in a container."""
    return {"name": volume, "mountPath": path} | ({"readOnly": True} if read_only else {})
