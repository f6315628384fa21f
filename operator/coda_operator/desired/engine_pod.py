"""The pod that runs an engine, for serving and (with another command) for profiling."""

from dataclasses import dataclass
from typing import Any

from coda_operator.desired.cluster import PROFILER, Child, Cluster
from coda_operator.desired.containers import (
    PYTHON,
    SECRET_DIR,
    SETTINGS_DIR,
    SURROUNDINGS,
    TMP_DIR,
    container_security,
    environment,
    image,
    mount,
    pod_security,
)
from coda_operator.desired.documents import CLUSTER_SECRET_FILE, INTERNAL_TOKEN_FILE, PROFILE_FILE, SETTINGS_FILE
from coda_operator.desired.kv_shadow import SHADOW_DIR, SHADOW_VOLUME, shadow_container, shadow_volume
from coda_operator.desired.processes import EnginePlace, ProcessSpec, engine_process, shadow_space_bytes
from coda_operator.spec import Device, ShadowScope, quantity_bytes

ENGINE_CONTAINER = "engine"
ENGINE_PORT = 8000

_PROFILE_DIR = "/etc/coda/profile"
_MODELS_DIR = "/models"
_HOST_MODEL_DIR = "/model"
_HUB_DIR = f"{_MODELS_DIR}/hub"


@dataclass(frozen=True, slots=True)
class Command:
    """What the engine's container runs.

    Attributes:
        argv: Command line.
        env: Variables of the process.
    """

    argv: tuple[str, ...]
    env: dict[str, str]


def engine_of(cluster: Cluster, host: str) -> ProcessSpec:
    """Return the engine's process as it runs in a pod, bound to ``host``."""
    place = EnginePlace(
        name=ENGINE_CONTAINER,
        python=PYTHON,
        host=host,
        port=ENGINE_PORT,
        model_path=_model_path(cluster),
        settings_file=f"{SETTINGS_DIR}/{SETTINGS_FILE}",
        profile_file=f"{_PROFILE_DIR}/{PROFILE_FILE}",
        cluster_secret_file=f"{SECRET_DIR}/{CLUSTER_SECRET_FILE}",
        internal_token_file=f"{SECRET_DIR}/{INTERNAL_TOKEN_FILE}",
        # A folder within the volume: the engine makes it and lets nobody else in.
        shadow_dir=f"{SHADOW_DIR}/{cluster.name}",
        # Two engines on one node would otherwise both bind their threads to the node's first core.
        cores="nobind",
    )
    return engine_process(cluster.spec, cluster.spec_key, place)


def internal_token_file() -> str:
    """Return where a pod finds the token of the internal endpoints."""
    return f"{SECRET_DIR}/{INTERNAL_TOKEN_FILE}"


def engine_pod_template(cluster: Cluster, component: str, command: Command) -> Child:
    """Return the pod template around ``command``, before the person's own patch."""
    template: Child = {
        "metadata": {"labels": cluster.labels(component)},
        "spec": {
            "automountServiceAccountToken": False,
            # Service variables would collide with vLLM's own (a Service named vllm sets VLLM_PORT).
            "enableServiceLinks": False,
            "securityContext": pod_security(),
            "containers": [_container(cluster, command)],
            "volumes": _volumes(cluster),
        },
    }
    preparations = [_model_container(cluster)] if cluster.spec.model.source.builtin is not None else []
    if cluster.spec.kv_shadow.size_bytes:
        # What the profiler measures is not worth keeping: its shadow is always its pod's own.
        on_node = cluster.spec.kv_shadow.scope is ShadowScope.NODE and component != PROFILER
        template["spec"]["volumes"].append(shadow_volume(cluster, on_node=on_node))
        preparations += [shadow_container(cluster)] if on_node else []
    if preparations:
        template["spec"]["initContainers"] = preparations
    if cluster.spec.engine.gpu_product:
        template["spec"]["nodeSelector"] = {"nvidia.com/gpu.product": cluster.spec.engine.gpu_product}
    return template


def _model_path(cluster: Cluster) -> str | None:
    source = cluster.spec.model.source
    if source.builtin is not None:
        return f"{_MODELS_DIR}/{source.builtin}"
    return _HOST_MODEL_DIR if source.host_path is not None else None


def _container(cluster: Cluster, command: Command) -> dict[str, Any]:
    mounts = [
        mount("settings", SETTINGS_DIR, read_only=True),
        mount("profile", _PROFILE_DIR, read_only=True),
        mount("internal", SECRET_DIR, read_only=True),
        mount("models", _MODELS_DIR),
        mount("shm", "/dev/shm"),  # noqa: S108 - shared memory of vLLM's processes
        mount("tmp", TMP_DIR),
    ]
    if cluster.spec.model.source.host_path is not None:
        mounts.append(mount("host-model", _HOST_MODEL_DIR, read_only=True))
    if cluster.spec.kv_shadow.size_bytes:
        mounts.append(mount(SHADOW_VOLUME, SHADOW_DIR))
    return {
        "name": ENGINE_CONTAINER,
        **image(cluster.engine_image, cluster),
        "command": list(command.argv),
        "env": environment(_surroundings() | command.env),
        "ports": [{"name": "http", "containerPort": ENGINE_PORT}],
        "resources": _resources(cluster),
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": mounts,
    }


def _model_container(cluster: Cluster) -> dict[str, Any]:
    """Return the init container that makes the built-in model; does nothing when it is there."""
    return {
        "name": "model",
        **image(cluster.engine_image, cluster),
        "command": [PYTHON, "-m", "coda_cli", "model", str(cluster.spec.model.source.builtin), "--dir", _MODELS_DIR],
        "env": environment(_surroundings()),
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [mount("models", _MODELS_DIR), mount("tmp", TMP_DIR)],
    }


def _surroundings() -> dict[str, str]:
    return SURROUNDINGS | {"HF_HOME": _HUB_DIR, "VLLM_NO_USAGE_STATS": "1"}


def _resources(cluster: Cluster) -> dict[str, Any]:
    engine, shadow_bytes = cluster.spec.engine, shadow_space_bytes(cluster.spec)
    limits: dict[str, Any] = {}
    requests: dict[str, Any] = {}
    if engine.memory is not None:
        limits["memory"] = str(quantity_bytes(engine.memory) + shadow_bytes) if shadow_bytes else engine.memory
    elif shadow_bytes:
        # Whoever writes a page of shared memory first is charged for it: here the engine, whatever the scope.
        requests["memory"] = str(shadow_bytes)
    if engine.device is Device.CUDA:
        limits[engine.gpu_resource] = str(engine.device_count)
    else:
        # No CPU limit: throttling in the middle of a step would cost more than a busy neighbour does.
        requests["cpu"] = str(engine.device_count)
    return {name: values for name, values in (("requests", requests), ("limits", limits)) if values}


def _volumes(cluster: Cluster) -> list[dict[str, Any]]:
    volumes: list[dict[str, Any]] = [
        {"name": "settings", "configMap": {"name": cluster.child_name("settings")}},
        {"name": "profile", "configMap": {"name": cluster.child_name("profile"), "optional": True}},
        {"name": "internal", "secret": {"secretName": cluster.child_name("internal")}},
        {"name": "models", "emptyDir": {}},
        # Without it vLLM's processes cannot start: a container's own /dev/shm has 64 MB.
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
        {"name": "tmp", "emptyDir": {}},
    ]
    host_path = cluster.spec.model.source.host_path
    if host_path is not None:
        volumes.append({"name": "host-model", "hostPath": {"path": host_path, "type": "Directory"}})
    return volumes
