import base64
import json
from pathlib import Path
from typing import Any

from operator_builders import cluster_of, decided, live_after, observed, profile_of, stored

from coda_engine.contract.settings import Settings
from coda_operator.desired.access import profiler_access, router_access
from coda_operator.desired.cluster import possible_children
from coda_operator.desired.documents import (
    api_key_secret,
    internal_secret,
    profile_config_map,
    settings_config_map,
)
from coda_operator.desired.engines import engine_deployment, engine_service
from coda_operator.desired.profiling_job import profiling_job
from coda_operator.desired.router import router_deployment, router_service, router_url
from coda_operator.kube.resources import ref_of
from coda_router.auth.keys import ApiKeys
from coda_router.auth.reading import read_api_keys


def engine_of(deployment: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = deployment["spec"]["template"]["spec"]["containers"][0]
    return container


def variables(container: dict[str, Any]) -> dict[str, str]:
    return {item["name"]: item["value"] for item in container["env"]}


def test_the_pod_template_does_not_depend_on_what_may_change_on_a_running_engine():
    first = engine_deployment(cluster_of())
    other = engine_deployment(
        cluster_of(
            engine={"device": "cpu", "cpus": 1, "replicas": 7},
            admission={"state": {"policy": "fifo", "tauMs": 1}},
            router={"placement": {"policy": "round-robin"}},
        )
    )
    assert first["spec"]["template"] == other["spec"]["template"]
    assert (first["spec"]["replicas"], other["spec"]["replicas"]) == (2, 7)


def test_the_settings_config_map_is_the_document_that_processes_read():
    cluster = cluster_of(admission={"state": {"tauMs": 123}})
    document = settings_config_map(cluster)["data"]["settings.json"]
    assert Settings.parse(document) == cluster.spec.settings()
    assert Settings.parse(document).admission.state.tau_ms == 123


def test_a_config_map_delivers_the_profile_unchanged():
    cluster = cluster_of()
    profile = profile_of(cluster.spec_key)
    assert type(profile).from_json(profile_config_map(cluster, profile)["data"]["profile.json"]) == profile


def test_the_engine_finds_its_documents_where_they_are_mounted():
    engine = engine_of(engine_deployment(cluster_of()))
    mounts = {item["mountPath"] for item in engine["volumeMounts"]}
    paths = {name: value for name, value in variables(engine).items() if name.endswith("_FILE")}
    assert len(paths) == 4
    assert all(path.rsplit("/", 1)[0] in mounts for path in paths.values())


def test_every_mount_has_its_volume():
    for child in (engine_deployment(cluster_of()), router_deployment(cluster_of()), profiling_job(cluster_of())):
        pod = child["spec"]["template"]["spec"]
        volumes = {item["name"] for item in pod["volumes"]}
        containers = [*pod["containers"], *pod.get("initContainers", [])]
        assert {mount["name"] for item in containers for mount in item["volumeMounts"]} <= volumes


def test_vllm_gets_shared_memory():
    pod = engine_deployment(cluster_of())["spec"]["template"]["spec"]
    assert {"name": "shm", "emptyDir": {"medium": "Memory"}} in pod["volumes"]
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


def test_no_process_is_privileged_and_none_writes_outside_its_volumes():
    for child in (engine_deployment(cluster_of()), router_deployment(cluster_of()), profiling_job(cluster_of())):
        pod = child["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_an_engine_has_no_token_of_the_api_server():
    assert engine_deployment(cluster_of())["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_a_gpu_engine_asks_for_its_gpus_and_its_product():
    cluster = cluster_of(engine={"gpus": 2, "gpuProduct": "H200", "memory": "64Gi"})
    deployment = engine_deployment(cluster)
    assert engine_of(deployment)["resources"] == {"limits": {"memory": "64Gi", "nvidia.com/gpu": "2"}}
    assert deployment["spec"]["template"]["spec"]["nodeSelector"] == {"nvidia.com/gpu.product": "H200"}
    assert engine_of(deployment)["image"] == "registry/engine:1"


def test_a_built_in_model_is_made_by_an_init_container_and_a_hub_model_is_not():
    pod = engine_deployment(cluster_of())["spec"]["template"]["spec"]
    assert pod["initContainers"][0]["command"][-3:] == ["smollm2-135m-instruct", "--dir", "/models"]
    hub = cluster_of(model={"name": "m", "source": {"hub": "a/b"}})
    assert "initContainers" not in engine_deployment(hub)["spec"]["template"]["spec"]


def test_a_model_on_the_node_is_mounted_read_only():
    cluster = cluster_of(model={"name": "m", "source": {"hostPath": "/data/m"}})
    pod = engine_deployment(cluster)["spec"]["template"]["spec"]
    assert {"name": "host-model", "hostPath": {"path": "/data/m", "type": "Directory"}} in pod["volumes"]
    command = pod["containers"][0]["command"]
    assert command[command.index("--model") + 1] == "/model"


def test_the_startup_probe_gives_an_engine_its_time():
    engine = engine_of(engine_deployment(cluster_of(engine={"device": "cpu", "startupTimeoutSeconds": 600})))
    probe = engine["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] == 600


def test_the_job_runs_the_same_engine_as_the_deployment_on_loopback():
    cluster = cluster_of()
    job = profiling_job(cluster)["spec"]["template"]["spec"]["containers"][0]
    served = engine_of(engine_deployment(cluster))
    engine = job["command"][job["command"].index("--") + 1 :]
    assert engine[: engine.index("--host")] == served["command"][: served["command"].index("--host")]
    assert engine[engine.index("--host") + 1] == "127.0.0.1"
    assert variables(job)["CODA_SPEC_KEY"] == variables(served)["CODA_SPEC_KEY"]


def test_another_configuration_is_another_job():
    names = {
        profiling_job(cluster)["metadata"]["name"]
        for cluster in (
            cluster_of(),
            cluster_of(profiling={"quick": True}),
            cluster_of(engine={"device": "cpu", "cpus": 2}),
        )
    }
    assert len(names) == 3


def test_settings_and_replicas_do_not_make_another_job():
    other = cluster_of(engine={"device": "cpu", "replicas": 9, "cpus": 1}, admission={"state": {"tauMs": 1}})
    assert profiling_job(cluster_of())["metadata"]["name"] == profiling_job(other)["metadata"]["name"]


def test_the_job_ends_by_itself_and_retries_a_bounded_number_of_times():
    spec = profiling_job(cluster_of(profiling={"timeoutSeconds": 77}))["spec"]
    assert spec["activeDeadlineSeconds"] == 77
    assert spec["backoffLimit"] == 2


def test_the_persons_patch_reaches_engines_and_job_alike():
    patch = {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}]}}
    cluster = cluster_of(engine={"device": "cpu", "podTemplate": patch})
    for child in (engine_deployment(cluster), profiling_job(cluster)):
        assert child["spec"]["template"]["spec"]["tolerations"] == patch["spec"]["tolerations"]


def test_the_profiler_may_change_its_own_profile_only():
    role = next(child for child in profiler_access(cluster_of()) if child["kind"] == "Role")
    assert all(rule["resources"] == ["codaprofiles"] for rule in role["rules"])
    changing = [rule for rule in role["rules"] if "patch" in rule["verbs"]]
    assert [rule["resourceNames"] for rule in changing] == [[f"profile-{cluster_of().spec_key.digest()}"]]


def test_the_router_may_follow_endpoint_slices_and_nothing_else():
    role = next(child for child in router_access(cluster_of()) if child["kind"] == "Role")
    assert [rule["resources"] for rule in role["rules"]] == [["endpointslices"]]


def test_the_router_discovers_the_engines_service():
    command = router_deployment(cluster_of())["spec"]["template"]["spec"]["containers"][0]["command"]
    service = engine_service(cluster_of())
    assert command[command.index("--discover") + 1] == f"team/{service['metadata']['name']}"


def test_the_url_is_the_routers_service():
    service = router_service(cluster_of(router={"port": 80}))
    assert router_url(cluster_of(router={"port": 80})) == "http://demo-router.team.svc:80"
    assert service["spec"]["ports"][0]["port"] == 80


def test_secrets_hold_what_they_are_given():
    data = internal_secret(cluster_of(), "sign", "token")["data"]
    assert {name: base64.b64decode(value).decode() for name, value in data.items()} == {
        "cluster-secret": "sign",
        "internal-token": "token",
    }


def test_every_child_belongs_to_the_cluster_so_that_kubernetes_deletes_it():
    plan = decided(observed(cluster_of(), profile=stored(cluster_of())))
    for child in [*plan.create, *plan.apply]:
        assert child["metadata"]["ownerReferences"] == [cluster_of().owner_reference()], child["kind"]
        assert child["metadata"]["namespace"] == "team"


def test_every_child_is_among_those_that_are_looked_for():
    before = observed(cluster_of(), profile=stored(cluster_of()))
    made = {ref_of(child) for child in [*decided(before).create, *decided(before).apply]}
    assert made <= set(possible_children("demo"))
    assert set(live_after(decided(before), before)) >= made


def test_the_longest_names_still_fit():
    from coda_operator.desired.cluster import Cluster
    from coda_operator.spec import MAX_NAME_CHARS

    template = cluster_of()
    longest = Cluster("n" * MAX_NAME_CHARS, "team", template.uid, template.spec, template.images)
    assert len(profiling_job(longest)["metadata"]["name"]) <= 63
    assert all(len(ref.name) <= 63 for ref in possible_children(longest.name))


def test_builders_return_plain_data():
    json.dumps(engine_deployment(cluster_of()))


def test_the_generated_api_key_is_a_folder_of_keys_that_the_router_takes(tmp_path: Path):
    for name, content in api_key_secret(cluster_of(), "coda-generated")["data"].items():
        (tmp_path / name).write_bytes(base64.b64decode(content))
    keys = ApiKeys()
    keys.replace(read_api_keys(tmp_path))
    assert keys.account_of({b"authorization": b"Bearer coda-generated"}).key.tenant == "default"
