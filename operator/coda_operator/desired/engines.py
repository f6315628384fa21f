"""The engines: a Deployment, and the headless Service whose EndpointSlices the router follows."""

from coda_operator.desired.cluster import ENGINE, Child, Cluster
from coda_operator.desired.engine_pod import ENGINE_PORT, Command, engine_of, engine_pod_template
from coda_operator.desired.pod_template import merge_pod_template

_PROBE_PERIOD_S = 5


def engine_deployment(cluster: Cluster) -> Child:
    """Return the engines' Deployment.

    Its pod template depends on nothing that may change on a running engine: not on settings, not on the
    profile, not on the number of replicas.

    Raises:
        PodTemplateError: The person's patch does not fit.
    """
    process = engine_of(cluster, "0.0.0.0")  # noqa: S104 - a pod's own network
    template = engine_pod_template(cluster, ENGINE, Command(process.argv, dict(process.env)))
    health = {"httpGet": {"path": process.ready_path, "port": "http"}, "timeoutSeconds": 5}
    failures = -(-cluster.spec.engine.startup_timeout_seconds // _PROBE_PERIOD_S)
    template["spec"]["containers"][0] |= {
        "startupProbe": health | {"periodSeconds": _PROBE_PERIOD_S, "failureThreshold": failures},
        "readinessProbe": health | {"periodSeconds": 2, "failureThreshold": 2},
        "livenessProbe": health | {"periodSeconds": 10, "failureThreshold": 6},
    }
    content = {
        "spec": {
            "replicas": cluster.spec.engine.replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": cluster.spec.engine.startup_timeout_seconds + 600,
            # One at a time and none extra: there is rarely a spare GPU to start a new engine beside an old one.
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}},
            "selector": {"matchLabels": cluster.selector(ENGINE)},
            "template": merge_pod_template(template, cluster.spec.engine.pod_template),
        }
    }
    return cluster.child("apps/v1", "Deployment", cluster.child_name("engine"), ENGINE, content)


def engine_service(cluster: Cluster) -> Child:
    """Return the headless Service that lists the ready engines."""
    content = {
        "spec": {
            "clusterIP": "None",
            "selector": cluster.selector(ENGINE),
            "ports": [{"name": "http", "port": ENGINE_PORT, "targetPort": "http"}],
        }
    }
    return cluster.child("v1", "Service", cluster.child_name("engine"), ENGINE, content)
