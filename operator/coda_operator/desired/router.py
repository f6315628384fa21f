"""The router: a Deployment and the Service that clients talk to."""

from coda_operator.desired.cluster import ROUTER, Child, Cluster
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
from coda_operator.desired.documents import CLUSTER_SECRET_FILE, INTERNAL_TOKEN_FILE, SETTINGS_FILE
from coda_operator.desired.processes import ProcessSpec, RouterPlace, router_process

ROUTER_CONTAINER = "router"
ROUTER_CONTAINER_PORT = 8080
"""Port in the pod; the Service's port is the person's choice and may be a privileged one."""

_DRAIN_S = 60
_KEYS_DIR = "/etc/coda/api-keys"


def router_url(cluster: Cluster) -> str:
    """Return the router's base URL inside the Kubernetes cluster."""
    return f"http://{cluster.child_name('router')}.{cluster.namespace}.svc:{cluster.spec.router.port}"


def router_deployment(cluster: Cluster) -> Child:
    """Return the router's Deployment."""
    content = {
        "spec": {
            "replicas": cluster.spec.router.replicas,
            "revisionHistoryLimit": 2,
            "selector": {"matchLabels": cluster.selector(ROUTER)},
            "template": {"metadata": {"labels": cluster.labels(ROUTER)}, "spec": _pod(cluster)},
        }
    }
    return cluster.child("apps/v1", "Deployment", cluster.child_name("router"), ROUTER, content)


def router_service(cluster: Cluster) -> Child:
    """Return the Service that clients talk to."""
    port = {"name": "http", "port": cluster.spec.router.port, "targetPort": "http"}
    content = {"spec": {"type": "ClusterIP", "selector": cluster.selector(ROUTER), "ports": [port]}}
    return cluster.child("v1", "Service", cluster.child_name("router"), ROUTER, content)


def _process(cluster: Cluster) -> ProcessSpec:
    return router_process(
        RouterPlace(
            name=ROUTER_CONTAINER,
            python=PYTHON,
            host="0.0.0.0",  # noqa: S104 - a pod's own network
            port=ROUTER_CONTAINER_PORT,
            settings_file=f"{SETTINGS_DIR}/{SETTINGS_FILE}",
            discover=f"{cluster.namespace}/{cluster.child_name('engine')}",
            api_keys_dir=_KEYS_DIR,
            cluster_secret_file=f"{SECRET_DIR}/{CLUSTER_SECRET_FILE}",
            internal_token_file=f"{SECRET_DIR}/{INTERNAL_TOKEN_FILE}",
        )
    )


def _pod(cluster: Cluster) -> Child:
    process = _process(cluster)
    mounts = {"settings": SETTINGS_DIR, "api-keys": _KEYS_DIR, "internal": SECRET_DIR}
    container = {
        "name": ROUTER_CONTAINER,
        **image(cluster.router_image, cluster),
        "command": list(process.argv),
        "env": environment({**SURROUNDINGS, **process.env}),
        "ports": [{"name": "http", "containerPort": ROUTER_CONTAINER_PORT}],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}},
        "securityContext": container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "readinessProbe": {"httpGet": {"path": process.ready_path, "port": "http"}, "periodSeconds": 2},
        "livenessProbe": {"httpGet": {"path": "/healthz", "port": "http"}, "periodSeconds": 10, "timeoutSeconds": 5},
        "volumeMounts": [
            *(mount(name, path, read_only=True) for name, path in mounts.items()),
            mount("tmp", TMP_DIR),
        ],
    }
    return {
        "serviceAccountName": cluster.child_name("router"),
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _DRAIN_S,
        "securityContext": pod_security(),
        "containers": [container],
        "volumes": [
            {"name": "settings", "configMap": {"name": cluster.child_name("settings")}},
            {"name": "api-keys", "secret": {"secretName": cluster.api_key_secret}},
            {"name": "internal", "secret": {"secretName": cluster.child_name("internal")}},
            {"name": "tmp", "emptyDir": {}},
        ],
    }
