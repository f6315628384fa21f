"""Where a pod's CPU shadow lives: memory of its own, or this CodaCluster's folder in the node's shared memory."""

from typing import Any

from coda_engine.contract.interface import SHADOW_FOLDER_PREFIX
from coda_operator.desired.cluster import Cluster
from coda_operator.desired.containers import UNPRIVILEGED_UID, image, mount
from coda_operator.desired.processes import shadow_space_bytes

SHADOW_DIR = "/shadow"
SHADOW_VOLUME = "kv-shadow"

_NODE_MEMORY = "/dev/shm"  # noqa: S108 - the node's shared memory, not a temporary folder


def shadow_volume(cluster: Cluster, *, on_node: bool) -> dict[str, Any]:
    """Return the volume of the CPU shadow: the pod's own memory, or this CodaCluster's folder on the node."""
    if on_node:
        # A namespace has no underscore: with a hyphen here "a" and "b-c" would name the same folder as "a-b" and "c".
        path = f"{_NODE_MEMORY}/{SHADOW_FOLDER_PREFIX}{cluster.namespace}_{cluster.name}"
        return {"name": SHADOW_VOLUME, "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
    size = str(shadow_space_bytes(cluster.spec))
    return {"name": SHADOW_VOLUME, "emptyDir": {"medium": "Memory", "sizeLimit": size}}


def shadow_container(cluster: Cluster) -> dict[str, Any]:
    """Return the init container that gives a node's folder to the engines: the kubelet makes it as root's own."""
    return {
        "name": "shadow-folder",
        **image(cluster.engine_image, cluster),
        "command": ["sh", "-c", f"chown {UNPRIVILEGED_UID} {SHADOW_DIR} && chmod 0700 {SHADOW_DIR}"],
        "securityContext": {
            "runAsUser": 0,
            "runAsNonRoot": False,
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount(SHADOW_VOLUME, SHADOW_DIR)],
    }
