"""The Job that measures a configuration on the engine itself and writes the CodaProfile."""

import hashlib
import json

from coda_operator.desired.cluster import PROFILER, Child, Cluster
from coda_operator.desired.containers import PYTHON
from coda_operator.desired.engine_pod import Command, engine_of, engine_pod_template, internal_token_file
from coda_operator.desired.pod_template import merge_pod_template

RETRIES = 2
"""Pods that Kubernetes starts after a failed one, 10 s and then 20 s later."""


def profiling_job(cluster: Cluster) -> Child:
    """Return the profiling Job: the engines' pod with another command around the engine's.

    Its name holds a digest of its content: a Job cannot be changed, so another configuration is another Job.

    Raises:
        PodTemplateError: The person's patch does not fit.
    """
    template = engine_pod_template(cluster, PROFILER, _command(cluster))
    template["spec"] |= {
        "restartPolicy": "Never",
        "serviceAccountName": cluster.child_name(PROFILER),
        "automountServiceAccountToken": True,
    }
    spec = {
        "backoffLimit": RETRIES,
        "activeDeadlineSeconds": cluster.spec.profiling.timeout_seconds,
        "template": merge_pod_template(template, cluster.spec.engine.pod_template),
    }
    content = hashlib.sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest()[:10]
    return cluster.child("batch/v1", "Job", cluster.child_name(f"profile-{content}"), PROFILER, {"spec": spec})


def _command(cluster: Cluster) -> Command:
    engine = engine_of(cluster, "127.0.0.1")
    owner = cluster.owner_reference(controller=False)
    argv = [PYTHON, "-m", "coda_operator.profile_job"]
    argv += ["--namespace", cluster.namespace]
    argv += ["--owner", json.dumps(owner, sort_keys=True)]
    argv += ["--engine-url", f"http://127.0.0.1:{engine.port}"]
    argv += ["--internal-token-file", internal_token_file()]
    argv += ["--startup-timeout-seconds", str(cluster.spec.engine.startup_timeout_seconds)]
    if cluster.spec.profiling.quick:
        argv.append("--quick")
    return Command((*argv, "--", *engine.argv), dict(engine.env))
