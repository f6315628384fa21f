from dataclasses import replace

import pytest
from operator_builders import cluster_of

from coda_engine.contract.errors import DocumentError
from coda_engine.contract.interface import ENV_SHADOW_BYTES, ENV_SHADOW_DIR, ENV_SHADOW_EVICTION
from coda_operator.desired.cluster import ENGINE
from coda_operator.desired.engines import engine_deployment
from coda_operator.desired.kv_shadow import SHADOW_DIR, SHADOW_VOLUME
from coda_operator.desired.processes import shadow_space_bytes
from coda_operator.desired.profiling_job import profiling_job
from coda_operator.spec import quantity_bytes

GIB = 2**30


def pod(cluster):
    return engine_deployment(cluster)["spec"]["template"]["spec"]


def variables(spec):
    return {item["name"]: item["value"] for item in spec["containers"][0]["env"]}


def shadow_volumes(spec):
    return [volume for volume in spec["volumes"] if volume["name"] == SHADOW_VOLUME]


@pytest.mark.parametrize("shadow", [{}, {"size": "0"}, {"scope": "Node"}])
def test_without_a_size_nothing_of_a_pod_changes(shadow):
    assert pod(cluster_of(kvShadow=shadow)) == pod(cluster_of())
    assert ENV_SHADOW_BYTES not in variables(pod(cluster_of(kvShadow=shadow)))


def test_a_pods_shadow_is_memory_of_its_own_that_outlives_the_container():
    cluster = cluster_of(kvShadow={"size": "4Gi"})
    (volume,) = shadow_volumes(pod(cluster))
    assert volume["emptyDir"]["medium"] == "Memory"
    assert 4 * GIB < int(volume["emptyDir"]["sizeLimit"]) == shadow_space_bytes(cluster.spec) < 4.3 * GIB
    mounts = {mount["mountPath"]: mount["name"] for mount in pod(cluster)["containers"][0]["volumeMounts"]}
    assert mounts[SHADOW_DIR] == SHADOW_VOLUME


def test_the_engine_is_told_size_folder_and_eviction():
    told = variables(pod(cluster_of(kvShadow={"size": "4Gi", "eviction": "fifo"})))
    assert told[ENV_SHADOW_BYTES] == str(4 * GIB)
    assert told[ENV_SHADOW_EVICTION] == "fifo"
    # Not the volume itself: a volume's root belongs to others, and the engine refuses folders that are not its own.
    assert told[ENV_SHADOW_DIR] == f"{SHADOW_DIR}/demo"


def test_a_nodes_shadow_is_one_folder_for_each_cluster_and_is_made_the_engines_own():
    spec = pod(cluster_of(kvShadow={"size": "4Gi", "scope": "Node"}))
    (volume,) = shadow_volumes(spec)
    assert volume["hostPath"] == {"path": "/dev/shm/coda-shadow-team_demo", "type": "DirectoryOrCreate"}
    owner = next(container for container in spec["initContainers"] if container["name"] == "shadow-folder")
    assert "chown 65532 /shadow && chmod 0700 /shadow" in owner["command"][-1]
    assert owner["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN", "FOWNER"]}
    assert [mount["mountPath"] for mount in owner["volumeMounts"]] == [SHADOW_DIR]
    assert "runAsUser" not in spec["containers"][0]["securityContext"]


def test_no_two_clusters_have_the_same_folder_on_a_node():
    clusters = [
        replace(cluster_of(kvShadow={"size": "4Gi", "scope": "Node"}), namespace=namespace, name=name)
        for namespace, name in (("team", "a-b"), ("team-a", "b"), ("team", "a.b"), ("team", "a"))
    ]
    assert len({shadow_volumes(pod(cluster))[0]["hostPath"]["path"] for cluster in clusters}) == len(clusters)


def test_the_profilers_shadow_is_never_the_nodes():
    job = profiling_job(cluster_of(kvShadow={"size": "4Gi", "scope": "Node"}))
    spec = job["spec"]["template"]["spec"]
    assert "emptyDir" in shadow_volumes(spec)[0]
    assert [container["name"] for container in spec["initContainers"]] == ["model"]


def test_the_pods_memory_counts_the_shadow():
    plain = {"device": "cpu", "replicas": 1, "cpus": 1}
    cluster = cluster_of(engine=plain | {"memory": "8Gi"}, kvShadow={"size": "4Gi"})
    resources = pod(cluster)["containers"][0]["resources"]
    assert int(resources["limits"]["memory"]) == 8 * GIB + shadow_space_bytes(cluster.spec)
    unlimited = pod(cluster_of(engine=plain, kvShadow={"size": "4Gi"}))["containers"][0]["resources"]
    assert quantity_bytes(unlimited["requests"]["memory"]) == shadow_space_bytes(cluster.spec)
    gpu = cluster_of(engine={"device": "cuda", "gpus": 2}, kvShadow={"size": "4Gi"})
    assert pod(gpu)["containers"][0]["resources"] == {
        "requests": {"memory": str(shadow_space_bytes(cluster.spec))},
        "limits": {"nvidia.com/gpu": "2"},
    }


@pytest.mark.parametrize(
    ("shadow", "field"),
    [({"size": "4 GB"}, "size"), ({"scope": "Rack"}, "scope"), ({"eviction": "random"}, "eviction")],
)
def test_what_a_shadow_cannot_be_is_named(shadow, field):
    with pytest.raises(DocumentError, match=rf"spec\.kvShadow\.{field}"):
        cluster_of(kvShadow=shadow)


def test_the_engines_labels_do_not_depend_on_the_shadow():
    with_shadow = engine_deployment(cluster_of(kvShadow={"size": "4Gi"}))
    assert with_shadow["spec"]["selector"]["matchLabels"] == cluster_of().selector(ENGINE)
