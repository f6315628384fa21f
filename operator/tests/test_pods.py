from typing import Any

from coda_operator.pods import read_pod


def pod_with(**status: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "p",
            "labels": {"app.kubernetes.io/component": "engine"},
            "ownerReferences": [{"name": "set"}],
        },
        "status": status,
    }


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "engine", **state}]


def test_a_ready_pod_serves():
    pod = read_pod(pod_with(phase="Running", podIP="10.0.0.9", conditions=[{"type": "Ready", "status": "True"}]))
    assert (pod.ready, pod.running, pod.ip, pod.component, pod.owner) == (True, True, "10.0.0.9", "engine", "set")


def test_a_pod_that_is_being_deleted_does_not_serve():
    item = pod_with(phase="Running", conditions=[{"type": "Ready", "status": "True"}])
    item["metadata"]["deletionTimestamp"] = "now"
    assert (read_pod(item).ready, read_pod(item).running) == (False, False)


def test_a_pod_without_any_status_is_read():
    assert read_pod({"metadata": {"name": "p"}}).ready is False


def test_a_pod_that_fits_nowhere_says_why():
    message = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    blocked = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}
    assert read_pod(pod_with(phase="Pending", conditions=[blocked])).problem == f"Unschedulable: {message}"


def test_starting_is_no_problem():
    status = container(state={"waiting": {"reason": "ContainerCreating"}})
    assert read_pod(pod_with(containerStatuses=status)).problem == ""


def test_an_image_that_cannot_be_pulled_is_a_problem():
    status = container(state={"waiting": {"reason": "ErrImagePull", "message": "not found"}})
    assert read_pod(pod_with(containerStatuses=status)).problem == "engine: ErrImagePull: not found"


def test_an_init_container_that_failed_is_a_problem():
    failed = [{"name": "model", "state": {"terminated": {"exitCode": 2, "reason": "Error", "message": "no space"}}}]
    pod = read_pod(pod_with(initContainerStatuses=failed))
    assert pod.problem == "model: Error (exit code 2)"
    assert pod.last_words == "no space"


def test_last_words_are_the_end_of_a_long_log_in_whole_lines():
    log = "\n".join(f"line {number} of many" for number in range(200))
    status = container(lastState={"terminated": {"exitCode": 1, "message": log}}, state={"running": {}})
    words = read_pod(pod_with(containerStatuses=status)).last_words
    assert words.startswith("...\nline ")
    assert words.endswith("line 199 of many")
    assert len(words) <= 410


def test_last_words_of_one_long_line_are_its_beginning():
    status = container(state={"terminated": {"exitCode": 1, "message": "ValueError: " + "x" * 900}})
    words = read_pod(pod_with(containerStatuses=status)).last_words
    assert words.startswith("ValueError: xxx")
    assert words.endswith("x...")
    assert len(words) <= 410


def test_an_ended_container_without_an_error_has_no_last_words():
    status = container(state={"terminated": {"exitCode": 0, "message": "done"}})
    assert read_pod(pod_with(containerStatuses=status)).last_words == ""
