"""The operator against a real API server: the lab's, or that of KUBECONFIG. No pod has to start."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import kopf
import pytest
from operator_builders import IMAGES, profile_of, spec_of

from coda_operator.crd.definitions import coda_cluster_definition, coda_profile_definition
from coda_operator.desired.cluster import possible_children
from coda_operator.errors import ApiError
from coda_operator.kube.client import KubeClient, login
from coda_operator.kube.resources import CODA_CLUSTERS, DEPLOYMENTS, JOBS, Ref
from coda_operator.loops import Loops
from coda_operator.observe import observe, read_cluster
from coda_operator.observed import Key
from coda_operator.profile_object import profile_object
from coda_operator.reconcile import Reconciler
from coda_operator.spec import API_VERSION, GROUP
from coda_operator.telemetry import Telemetry
from coda_operator.watchdog import Watchdog

pytestmark = pytest.mark.cluster

ROOT = Path(__file__).resolve().parents[2]
LAB_KUBECONFIG = Path(os.environ.get("CODA_LAB_DIR", "/tmp/coda-lab")) / "pki/admin.conf"
NAME = "demo"
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def kubeconfig() -> Iterator[Path]:
    """The cluster, with the CRDs as generated."""
    path = Path(os.environ.get("KUBECONFIG") or LAB_KUBECONFIG)
    if not path.exists():
        give_up = pytest.fail if os.environ.get("CODA_REQUIRE_ALL") == "1" else pytest.skip
        give_up("no cluster: run `make lab-up`, or set KUBECONFIG")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(path))
        for definition in (coda_cluster_definition(), coda_profile_definition()):
            kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=json.dumps(definition))
        for plural in ("codaclusters", "codaprofiles"):
            kubectl("wait", "--for=condition=Established", "crd", f"{plural}.{GROUP}", "--timeout=30s")
            wait_until_served(f"{plural}.{GROUP}")
        yield path


def wait_until_served(resource: str) -> None:
    """Wait until a new kind can be listed: an API server answers 429 while it makes the kind's storage."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while subprocess.run(["kubectl", "get", resource, "-A"], capture_output=True, timeout=TIMEOUT_S).returncode:
        assert time.monotonic() < deadline_s, f"{resource} is not served"
        time.sleep(0.2)


@pytest.fixture
def namespace(kubeconfig: Path) -> Iterator[str]:
    name = f"coda-api-{uuid.uuid4().hex[:6]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
async def kube(kubeconfig: Path) -> AsyncIterator[KubeClient]:
    async with KubeClient(login) as client:
        yield client


@pytest.fixture
async def reconciler(kube: KubeClient) -> AsyncIterator[Reconciler]:
    async with Telemetry() as telemetry:
        yield Reconciler(kube, telemetry, IMAGES)


def kubectl(*arguments: str, given: str | None = None) -> str:
    done = subprocess.run(
        ["kubectl", *arguments], input=given, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def item(namespace: str, **groups: Any) -> dict[str, Any]:
    metadata = {"name": NAME, "namespace": namespace}
    return {"apiVersion": API_VERSION, "kind": "CodaCluster", "metadata": metadata, "spec": spec_of(**groups)}


async def make(kube: KubeClient, namespace: str, **groups: Any) -> Key:
    await kube.create(item(namespace, **groups))
    return Key(namespace, NAME)


async def change(kube: KubeClient, key: Key, **groups: Any) -> None:
    await kube.merge(Ref("CodaCluster", key.name), key.namespace, {"spec": groups})


async def give_profile(kube: KubeClient, key: Key) -> None:
    """Write the profile as the profiling Job does."""
    stored = await kube.get(CODA_CLUSTERS, key.namespace, key.name)
    assert stored is not None
    cluster, _ = read_cluster(stored, IMAGES)
    assert cluster is not None
    owner = cluster.owner_reference(controller=False)
    await kube.create(profile_object(profile_of(cluster.spec_key), key.namespace, owner))


async def ready_reason(kube: KubeClient, key: Key) -> tuple[str, str]:
    stored = await kube.get(CODA_CLUSTERS, key.namespace, key.name)
    assert stored is not None
    ready = next(entry for entry in stored["status"]["conditions"] if entry["type"] == "Ready")
    return ready["reason"], ready["message"]


async def versions(kube: KubeClient, key: Key) -> dict[str, str]:
    found = {}
    for ref in [*possible_children(key.name), Ref("CodaCluster", key.name)]:
        stored = await kube.get(ref.resource, key.namespace, ref.name)
        if stored is not None:
            found[str(ref)] = stored["metadata"]["resourceVersion"]
    return found


async def test_the_first_round_makes_the_job_and_no_engine(kube: KubeClient, reconciler: Reconciler, namespace: str):
    key = await make(kube, namespace)
    await reconciler.reconcile(key)
    assert len(await kube.find(JOBS, namespace)) == 1
    assert [found["metadata"]["name"] for found in await kube.find(DEPLOYMENTS, namespace)] == ["demo-router"]
    assert (await ready_reason(kube, key))[0] == "ProfilingPending"


async def test_a_profile_brings_the_engines(kube: KubeClient, reconciler: Reconciler, namespace: str):
    key = await make(kube, namespace)
    await reconciler.reconcile(key)
    await give_profile(kube, key)
    await reconciler.reconcile(key)
    engines = await kube.get(DEPLOYMENTS, namespace, "demo-engine")
    assert engines is not None
    assert engines["spec"]["replicas"] == 2
    await reconciler.reconcile(key)
    assert (await ready_reason(kube, key))[0] in ("EnginesStarting", "EnginesUpdating", "EngineFailing")


async def test_a_round_without_news_writes_nothing(kube: KubeClient, reconciler: Reconciler, namespace: str):
    key = await make(kube, namespace, router={"replicas": 1}, engine={"device": "cpu", "memory": "2048Mi"})
    await give_profile(kube, key)
    for _ in range(3):
        await reconciler.reconcile(key)
    before = await versions(kube, key)
    observed = await observe(kube, reconciler.telemetry, key, IMAGES)
    await reconciler.reconcile(key)
    after = await versions(kube, key)
    own = {ref for ref in before if not ref.startswith(("Deployment", "CodaCluster"))}
    assert observed is not None
    assert {ref: after[ref] for ref in own} == {ref: before[ref] for ref in own}


async def test_other_replicas_are_one_change_of_one_object(kube: KubeClient, reconciler: Reconciler, namespace: str):
    key = await make(kube, namespace)
    await give_profile(kube, key)
    await reconciler.reconcile(key)
    template = (await kube.get(DEPLOYMENTS, namespace, "demo-engine") or {})["spec"]["template"]
    await change(kube, key, engine={"replicas": 3})
    await reconciler.reconcile(key)
    changed = await kube.get(DEPLOYMENTS, namespace, "demo-engine") or {}
    assert changed["spec"]["replicas"] == 3
    assert changed["spec"]["template"] == template


async def test_generated_secrets_are_never_overwritten(kube: KubeClient, reconciler: Reconciler, namespace: str):
    key = await make(kube, namespace)
    await reconciler.reconcile(key)
    before = kubectl("-n", namespace, "get", "secrets", "-o", "jsonpath={.items[*].data}")
    await change(kube, key, admission={"state": {"tauMs": 1}})
    await reconciler.reconcile(key)
    assert kubectl("-n", namespace, "get", "secrets", "-o", "jsonpath={.items[*].data}") == before


async def test_a_field_that_kubernetes_does_not_know_is_named(kube: KubeClient, reconciler: Reconciler, namespace: str):
    patch = {"spec": {"containers": [{"name": "engine", "resourcess": {}}]}}
    key = await make(kube, namespace, engine={"device": "cpu", "podTemplate": patch})
    await reconciler.reconcile(key)
    reason, message = await ready_reason(kube, key)
    assert reason == "RefusedByAPIServer"
    assert "resourcess" in message


async def test_an_object_of_somebody_else_stays_theirs(kube: KubeClient, reconciler: Reconciler, namespace: str):
    kubectl("-n", namespace, "create", "configmap", "demo-settings", "--from-literal=mine=1")
    key = await make(kube, namespace)
    await reconciler.reconcile(key)
    reason, message = await ready_reason(kube, key)
    assert reason == "NameTaken"
    assert "ConfigMap demo-settings" in message
    assert kubectl("-n", namespace, "get", "configmap", "demo-settings", "-o", "jsonpath={.data}") == '{"mine":"1"}'
    assert await kube.find(JOBS, namespace) == []


async def test_what_only_the_operator_can_see_is_an_invalid_spec(
    kube: KubeClient, reconciler: Reconciler, namespace: str
):
    key = await make(kube, namespace, engine={"device": "cpu", "extraArgs": ["--scheduler-cls", "x"]})
    await reconciler.reconcile(key)
    reason, message = await ready_reason(kube, key)
    assert reason == "InvalidSpec"
    assert "spec.engine.extraArgs: --scheduler-cls belongs to Coda" in message
    assert await kube.find(JOBS, namespace) == []


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"engine": {"device": "cpu", "replicas": 0}}, "replicas: at least 1"),
        ({"engine": {"device": "cuda", "cpus": 2}}, "cpus is for device cpu"),
        ({"model": {"name": "m", "source": {}}}, "exactly one of hub, builtin, hostPath"),
        ({"model": {"name": "m", "source": {"hub": "a/b", "hostPath": "/m"}}}, "exactly one of"),
        ({"admission": {"execution": {"minCohort": 3}}}, "minCohort is more than half"),
        ({"engine": {"memory": "lots"}}, "spec.engine.memory"),
        ({"profiling": {"mode": "Sometimes"}}, "spec.profiling.mode"),
    ],
)
async def test_the_api_server_refuses_a_bad_spec_by_itself(
    kube: KubeClient, namespace: str, groups: dict[str, Any], words: str
):
    with pytest.raises(ApiError, match=words):
        await make(kube, namespace, **groups)


async def test_the_api_server_refuses_a_name_that_children_cannot_have(kube: KubeClient, namespace: str):
    for name in ("n" * 41, "with.dots", "9lives"):
        bad = item(namespace)
        bad["metadata"]["name"] = name
        with pytest.raises(ApiError, match="because Services are named after it"):
            await kube.create(bad)


async def test_quantities_may_be_numbers(kube: KubeClient, namespace: str):
    key = await make(kube, namespace, engine={"device": "cpu", "memory": 4294967296})
    stored = await kube.get(CODA_CLUSTERS, key.namespace, key.name)
    assert stored is not None
    cluster, problem = read_cluster(stored, IMAGES)
    assert problem == ""
    assert cluster is not None
    assert cluster.spec.engine.memory == "4294967296"


async def test_the_watchdog_notices_a_cluster_that_no_watch_announced(
    kube: KubeClient, reconciler: Reconciler, namespace: str
):
    await make(kube, namespace)
    loops = Loops(reconciler.reconcile)
    watchdog = Watchdog(kube, loops, [namespace])
    await watchdog.look()
    assert watchdog.check() == "0 CodaClusters"
    await watchdog.look()
    assert loops.keys == {Key(namespace, NAME)}
    with pytest.raises(RuntimeError, match=f"did not announce {namespace}/{NAME}"):
        watchdog.check()
    await loops.close()


async def test_the_watchdog_does_not_wait_for_a_cluster_that_is_going(kube: KubeClient, namespace: str):
    held = item(namespace)
    held["metadata"]["finalizers"] = ["example.com/held"]
    stored = await kube.create(held)
    await kube.delete(Ref("CodaCluster", NAME), namespace, stored["metadata"]["uid"])

    async def never(_: Key) -> float | None:
        raise AssertionError("woken")

    watchdog = Watchdog(kube, Loops(never), [namespace])
    for _ in range(3):
        await watchdog.look()
    assert watchdog.check() == "0 CodaClusters"
    await kube.merge(Ref("CodaCluster", NAME), namespace, {"metadata": {"finalizers": []}})


async def test_deleting_a_vanished_object_is_no_error(kube: KubeClient, namespace: str):
    await kube.delete(Ref("ConfigMap", "never-was"), namespace, "no-uid")


async def test_an_api_server_that_is_not_there_is_one_error():
    nowhere = kopf.ConnectionInfo(server="http://127.0.0.1:24998")
    async with KubeClient(lambda: nowhere) as kube:
        with pytest.raises(ApiError, match="GET /api/v1/namespaces/a/secrets/b") as raised:
            await kube.get(Ref("Secret", "b").resource, "a", "b")
    assert raised.value.status == 0


async def test_the_process_follows_its_namespace_and_ends_when_asked(kube: KubeClient, namespace: str):
    command = [sys.executable, "-m", "coda_operator", "--namespace", namespace]
    command += ["--router-image", "r", "--engine-cpu-image", "e", "--engine-cuda-image", "c"]
    operator = await asyncio.create_subprocess_exec(
        *command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=ROOT
    )
    try:
        key = await make(kube, namespace)
        async with asyncio.timeout(TIMEOUT_S):
            while not (stored := await kube.get(CODA_CLUSTERS, key.namespace, key.name) or {}).get("status"):
                await asyncio.sleep(0.2)
        # Nothing of kopf's is left on the object: no finalizer to hang on, no state that could grow.
        assert "finalizers" not in stored["metadata"]
        assert "annotations" not in stored["metadata"]
        await kube.delete(Ref("CodaCluster", NAME), namespace, stored["metadata"]["uid"])
        async with asyncio.timeout(TIMEOUT_S):
            while await kube.find(JOBS, namespace) or await kube.find(DEPLOYMENTS, namespace):
                await asyncio.sleep(0.5)
    finally:
        operator.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            output, _ = await operator.communicate()
    assert operator.returncode == 0, output
    assert b"Traceback" not in output
