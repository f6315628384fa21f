"""Case 1: one YAML file to a served, admission-controlled model, on a real cluster.

The tests share one operator and one CodaCluster with two engines, and run in this order.
"""

import base64
import json
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubectl import Kubectl, wait_for
from places import ROOT, Site
from transitions import Recorder

from coda_cli.demo.agent import TASKS, Agent
from coda_cli.demo.chat import ChatClient
from coda_cli.demo.tools import Workbench
from coda_cli.errors import CliError
from coda_engine.profiling import ProcessClient

pytestmark = pytest.mark.cluster

NAME = "smollm2"
MODEL = "smollm2-135m-instruct"
LOCAL_PORT = 24080
SYSTEM_NAMESPACE = "coda-e2e-system"
READY_TIMEOUT_S = 900
RESTART_TIMEOUT_S = 420
SETTLE_TIMEOUT_S = 60
MAX_OPERATOR_RSS_MB = 120
ENGINE_PODS = f"coda-serving.dev/cluster={NAME},app.kubernetes.io/component=engine"
ROUTER_PODS = f"coda-serving.dev/cluster={NAME},app.kubernetes.io/component=router"
CHILDREN = "deployments,replicasets,jobs,pods,services,configmaps,secrets,serviceaccounts,roles,rolebindings"


@dataclass
class Served:
    """The CodaCluster that all tests look at."""

    kubectl: Kubectl
    recorder: Recorder
    url: str
    api_key: str
    internal_token: str

    def client(self, session: str) -> ChatClient:
        return ChatClient(self.url, MODEL, session, self.api_key)

    def ask(self, question: str, session: str = "question") -> str:
        messages = [{"role": "user", "content": question}]
        return self.client(session).chat(uuid.uuid4().hex, messages, max_tokens=24).text

    def decisions(self) -> list[dict[str, Any]]:
        """Return the router's placements."""
        return ProcessClient(self.url, self.internal_token).decisions(0).decisions

    def cluster(self) -> dict[str, Any]:
        return self.kubectl.get("codacluster", NAME)

    def condition(self, kind: str) -> dict[str, Any]:
        conditions = self.cluster().get("status", {}).get("conditions", [])
        return next((item for item in conditions if item["type"] == kind), {"status": "Unknown"})

    def wait_until(self, kind: str, status: str, timeout_s: float) -> None:
        wait_for(f"{kind}={status}", lambda: self.condition(kind)["status"] == status, timeout_s, self.state)

    def state(self) -> str:
        conditions = self.cluster().get("status", {}).get("conditions", [])
        lines = [f"{item['type']}={item['status']} {item['reason']}: {item['message']}" for item in conditions]
        return "\n".join([*lines, self.kubectl.run("get", "pods").stdout, str(self.recorder)])

    def pods(self, selector: str) -> dict[str, dict[str, Any]]:
        """Return the pods that are not being deleted, by name."""
        found = self.kubectl.find("pods", selector)
        return {item["metadata"]["name"]: item for item in found if "deletionTimestamp" not in item["metadata"]}


def document(site: Site, replicas: int = 2) -> dict[str, Any]:
    """Return the example that a person applies, with two engines and what this place needs."""
    example: dict[str, Any] = yaml.safe_load((ROOT / "examples/smollm2-cpu.yaml").read_text())
    # One thread each: the lab has two cores, and both engines compute at the same time.
    example["spec"]["engine"] |= {"replicas": replicas, "cpus": 1, "podTemplate": site.pod_template}
    return example


def secret(kubectl: Kubectl, name: str, key: str) -> str:
    return base64.b64decode(kubectl.get("secret", name)["data"][key]).decode()


@pytest.fixture(scope="module")
def system(site: Site) -> Iterator[Kubectl]:
    """The operator, installed by its chart and removed at the end."""
    kubectl = Kubectl(site.kubeconfig, site.path, SYSTEM_NAMESPACE)
    kubectl.must("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))
    kubectl.helm(
        "upgrade", "--install", "coda", str(ROOT / "charts/coda"), "--create-namespace", "--wait", "--timeout", "120s",
        "--set", f"operator.image={site.images['operator']}",
        "--set", f"images.router={site.images['router']}",
        "--set", f"images.engineCpu={site.images['engine-cpu']}",
        "--set", f"imagePullPolicy={site.pull_policy}",
    )  # fmt: skip
    yield kubectl
    kubectl.helm("uninstall", "coda", "--wait")
    kubectl.run("delete", "namespace", SYSTEM_NAMESPACE, "--wait=false")


@pytest.fixture(scope="module")
def served(site: Site, system: Kubectl) -> Iterator[Served]:
    """The CodaCluster, Ready; its namespace is removed at the end."""
    kubectl = Kubectl(site.kubeconfig, site.path, f"coda-e2e-{uuid.uuid4().hex[:6]}")
    kubectl.must("create", "namespace", kubectl.namespace)
    try:
        kubectl.apply(document(site))
        with Recorder(kubectl, NAME) as recorder:
            wait_for("the operator's first look", lambda: kubectl.get("codacluster", NAME).get("status"), 30)
            served = Served(kubectl, recorder, "", secret(kubectl, f"{NAME}-api-key", "default"), "")
            served.internal_token = secret(kubectl, f"{NAME}-internal", "internal-token")
            served.wait_until("Ready", "True", READY_TIMEOUT_S)
            served.wait_until("AdmissionEnabled", "True", SETTLE_TIMEOUT_S)
            print(f"\nReady after {recorder.transitions[-1].at_s:.0f} s:\n{recorder}")
            with kubectl.forwarded(f"service/{NAME}-router", LOCAL_PORT, 8080) as url:
                served.url = url
                yield served
    finally:
        kubectl.run("delete", "namespace", kubectl.namespace, "--wait=false")


def test_the_profiling_job_wrote_the_profile_that_the_engines_run(served: Served):
    jobs = served.kubectl.find("jobs", f"coda-serving.dev/cluster={NAME}")
    assert [job["status"].get("succeeded") for job in jobs] == [1]
    profile = served.cluster()["status"]["profile"]
    stored = served.kubectl.get("codaprofile", profile["name"])
    assert stored["metadata"]["labels"]["coda-serving.dev/spec-key"] == profile["specKeyDigest"]
    assert stored["spec"]["artifact"]["full_key"]["spec"]["model"] == MODEL
    assert served.condition("AdmissionEnabled")["reason"] == "AdmissionRunning"


def test_conditions_became_true_in_their_order(served: Served):
    became_true = [item.condition for item in served.recorder.transitions if item.status == "True"]
    assert became_true.index("Profiled") < became_true.index("EnginesReady") < became_true.index("Ready")
    engines = served.recorder.since(0, "EnginesReady")
    assert engines[0].reason == "EnginesNotCreated", "no engine may start before its profile is there"


def test_a_person_can_follow_it_in_the_events(served: Served):
    described = served.kubectl.must("describe", "codacluster", NAME)
    for words in ("created", "Profiled is True", "EnginesReady is True", "Ready is True"):
        assert words in described


def test_the_capital_of_france_is_paris(served: Served):
    assert "Paris" in served.ask("What is the capital of France?")


def test_without_the_key_nobody_is_answered(served: Served):
    stranger = ChatClient(served.url, MODEL, "stranger", "not-the-key")
    with pytest.raises(CliError, match="401"):
        stranger.chat("stranger", [{"role": "user", "content": "hello"}], max_tokens=4)


def test_two_sessions_of_several_tool_rounds_keep_their_home_engine(served: Served, tmp_path: Path):
    before = len(served.decisions())

    def work(session: str) -> list[str]:
        folder = tmp_path / session
        folder.mkdir()
        agent = Agent(served.client(session), Workbench(folder))
        return [done.action for done in agent.work(TASKS[session], report=lambda _: None)]

    with ThreadPoolExecutor(2) as pool:
        actions = dict(zip(TASKS, pool.map(work, TASKS), strict=True))
    assert all("(" in action for rounds in actions.values() for action in rounds[:-1]), actions
    homes: dict[str, set[str]] = {}
    rounds: dict[str, int] = {}
    for decision in served.decisions()[before:]:
        homes.setdefault(decision["session"], set()).add(decision["worker"])
        rounds[decision["session"]] = rounds.get(decision["session"], 0) + 1
    assert sorted(rounds.values()) == [5, 5]
    assert all(len(workers) == 1 for workers in homes.values()), homes


def test_other_admission_settings_reach_the_engines_without_a_restart(served: Served):
    pods = served.pods(ENGINE_PODS)
    starts = {name: pod["status"]["containerStatuses"][0]["containerID"] for name, pod in pods.items()}
    generation = served.kubectl.get("deployment", f"{NAME}-engine")["metadata"]["generation"]
    digest = served.cluster()["status"]["settingsDigest"]
    change = {"spec": {"admission": {"state": {"tauMs": 7000}}}}
    served.kubectl.must("patch", "codacluster", NAME, "--type=merge", "-p", json.dumps(change))

    def reported() -> bool:
        new = served.cluster()["status"]["settingsDigest"]
        admission = served.condition("AdmissionEnabled")
        return new != digest and admission["status"] == "True" and new in admission["message"]

    wait_for("the engines report the new settings", reported, SETTLE_TIMEOUT_S, served.state)
    after = served.pods(ENGINE_PODS)
    assert {name: pod["status"]["containerStatuses"][0]["containerID"] for name, pod in after.items()} == starts
    assert served.kubectl.get("deployment", f"{NAME}-engine")["metadata"]["generation"] == generation
    document = served.kubectl.get("configmap", f"{NAME}-settings")["data"]["settings.json"]
    assert json.loads(document)["admission"]["state"]["tauMs"] == 7000


def test_a_killed_engine_costs_no_request_and_comes_back(served: Served):
    mark = len(served.recorder.transitions)
    victim = min(served.pods(ENGINE_PODS))
    served.kubectl.must("delete", "pod", victim, "--grace-period=0", "--force")
    answers: list[str] = []
    while not served.recorder.since(mark, "EnginesReady") and len(answers) < 60:
        answers.append(served.ask("What is the capital of France?", session=f"during-{len(answers)}"))
    for _ in range(5):
        answers.append(served.ask("What is the capital of France?", session=f"during-{len(answers)}"))
    assert all("Paris" in answer for answer in answers), answers
    served.wait_until("EnginesReady", "True", RESTART_TIMEOUT_S)
    served.wait_until("Ready", "True", SETTLE_TIMEOUT_S)
    assert victim not in served.pods(ENGINE_PODS)
    assert len(served.pods(ENGINE_PODS)) == 2
    engines = [item.status for item in served.recorder.since(mark, "EnginesReady")]
    assert engines[0] == "False", f"the loss of an engine was not said:\n{served.recorder}"
    assert engines[-1] == "True"
    assert all(item.status == "True" for item in served.recorder.since(mark, "Routable")), str(served.recorder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"engine": {"replicas": 0}}, "replicas: at least 1"),
        ({"engine": {"cpus": "many"}}, "spec.engine.cpus"),
        ({"engine": {"device": "tpu"}}, "spec.engine.device"),
        ({"engine": {"gpus": 1}}, "gpus and gpuProduct are for device cuda"),
        ({"engine": {"replcas": 3}}, 'unknown field "spec.engine.replcas"'),
        ({"model": {"source": {"hub": "a/b"}}}, "exactly one of hub, builtin, hostPath"),
        ({"admission": {"state": {"tauMs": -1}}}, "spec.admission.state.tauMs"),
        ({"admission": {"execution": {"minCohort": 3}}}, "minCohort is more than half of minRequests"),
        ({"admission": {"state": {"policy": "lifo"}}}, "spec.admission.state.policy"),
    ],
)
def test_a_bad_spec_is_refused_naming_the_field(served: Served, site: Site, change: dict[str, Any], words: str):
    bad = merged(document(site), {"metadata": {"name": "bad"}, "spec": change})
    refused = served.kubectl.run("apply", "-f", "-", given=json.dumps(bad))
    assert refused.returncode != 0
    assert words in refused.stderr


def test_what_the_schema_cannot_say_is_a_condition_and_disturbs_nothing(served: Served):
    mark = len(served.recorder.transitions)
    before = {name: pod["metadata"]["uid"] for name, pod in served.pods(ENGINE_PODS).items()}
    arguments = served.cluster()["spec"]["engine"].get("extraArgs", [])
    served.kubectl.must("patch", "codacluster", NAME, "--type=merge", "-p", extra_args(["--port", "1"]))
    wait_for(
        "InvalidSpec", lambda: served.condition("Ready").get("reason") == "InvalidSpec", SETTLE_TIMEOUT_S, served.state
    )
    ready = served.condition("Ready")
    assert "spec.engine.extraArgs: --port belongs to Coda" in ready["message"]
    assert "InvalidSpec" in served.kubectl.must("describe", "codacluster", NAME)
    assert "Paris" in served.ask("What is the capital of France?")
    served.kubectl.must("patch", "codacluster", NAME, "--type=merge", "-p", extra_args(arguments))
    served.wait_until("Ready", "True", SETTLE_TIMEOUT_S)
    assert {name: pod["metadata"]["uid"] for name, pod in served.pods(ENGINE_PODS).items()} == before
    assert not served.recorder.since(mark, "Routable"), str(served.recorder)


def test_fewer_replicas_change_nothing_else(served: Served):
    deployment = served.kubectl.get("deployment", f"{NAME}-engine")
    before = {name: pod["metadata"]["uid"] for name, pod in served.pods(ENGINE_PODS).items()}
    routers = served.pods(ROUTER_PODS).keys()
    served.kubectl.must("scale", "codacluster", NAME, "--replicas=1")
    wait_for("one engine", lambda: len(served.pods(ENGINE_PODS)) == 1, SETTLE_TIMEOUT_S, served.state)
    served.wait_until("Ready", "True", SETTLE_TIMEOUT_S)
    after = served.kubectl.get("deployment", f"{NAME}-engine")
    assert after["spec"]["template"] == deployment["spec"]["template"]
    assert {name: pod["metadata"]["uid"] for name, pod in served.pods(ENGINE_PODS).items()}.items() <= before.items()
    assert served.pods(ROUTER_PODS).keys() == routers
    wait_for(
        "the status to count one engine",
        lambda: served.cluster()["status"]["replicas"] == 1,
        SETTLE_TIMEOUT_S,
        served.state,
    )


def test_a_settled_cluster_is_left_in_peace(served: Served):
    # A Deployment counts the pods that still drain, so its status changes until they are gone.
    wait_for(
        "the other engine to be gone",
        lambda: len(served.kubectl.find("pods", ENGINE_PODS)) == 1,
        SETTLE_TIMEOUT_S,
        served.state,
    )
    time.sleep(5)
    before = versions(served)
    time.sleep(15)
    assert versions(served) == before


def test_the_operator_is_small(served: Served, system: Kubectl):
    script = "print(next(line for line in open('/proc/1/status') if line.startswith('VmRSS')).split()[1])"
    rss_kb = int(system.must("exec", "deployment/coda-operator", "--", "/opt/coda/bin/python3", "-c", script))
    print(f"\noperator RSS: {rss_kb / 1024:.0f} MB")
    assert rss_kb / 1024 <= MAX_OPERATOR_RSS_MB


def test_a_deleted_cluster_leaves_nothing(served: Served):
    served.kubectl.must("delete", "codacluster", NAME, "--timeout=30s")

    def left() -> list[str]:
        names = [
            f"{item['kind']} {item['metadata']['name']}" for item in served.kubectl.find(f"{CHILDREN},codaprofiles")
        ]
        return [name for name in names if not name.endswith((" default", " kube-root-ca.crt"))]

    wait_for("nothing is left", lambda: not left(), 120, lambda: "\n".join(left()))


def extra_args(arguments: list[str]) -> str:
    return json.dumps({"spec": {"engine": {"extraArgs": arguments}}})


def versions(served: Served) -> dict[str, str]:
    """Return the resource version of everything that the operator writes."""
    kinds = "codaclusters,deployments,jobs,services,configmaps,secrets,serviceaccounts,roles,rolebindings"
    return {
        f"{item['kind']} {item['metadata']['name']}": item["metadata"]["resourceVersion"]
        for item in served.kubectl.find(kinds)
    }


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in change.items():
        result[key] = merged(result[key], value) if isinstance(value, dict) and key in result else value
    return result
