import copy
from typing import Any

import pytest

from coda_operator.desired.pod_template import merge_pod_template
from coda_operator.errors import PodTemplateError

TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"app": "coda"}},
    "spec": {
        "containers": [
            {
                "name": "engine",
                "command": ["python3"],
                "image": "engine:1",
                "env": [{"name": "HOME", "value": "/tmp"}, {"name": "CODA_SPEC_KEY", "value": "{}"}],
                "volumeMounts": [{"name": "models", "mountPath": "/models"}],
                "resources": {"limits": {"memory": "8Gi"}},
            }
        ],
        "volumes": [{"name": "models", "emptyDir": {}}, {"name": "tmp", "emptyDir": {}}],
        "nodeSelector": {"gpu": "a"},
    },
}


def merged(patch: dict[str, Any]) -> dict[str, Any]:
    return merge_pod_template(TEMPLATE, patch)


def engine_patch(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def test_an_empty_patch_changes_nothing():
    assert merged({}) == TEMPLATE


def test_the_template_itself_is_never_changed():
    before = copy.deepcopy(TEMPLATE)
    merged(engine_patch(env=[{"name": "HOME", "value": "/other"}]))
    assert before == TEMPLATE


def test_environment_is_merged_by_name():
    env = merged(engine_patch(env=[{"name": "HOME", "value": "/h"}, {"name": "NEW", "value": "1"}]))
    assert [item["value"] for item in env["spec"]["containers"][0]["env"]] == ["/h", "{}", "1"]


def test_mounts_are_merged_by_path():
    mounts = merged(engine_patch(volumeMounts=[{"name": "venv", "mountPath": "/venv", "readOnly": True}]))
    assert [item["mountPath"] for item in mounts["spec"]["containers"][0]["volumeMounts"]] == ["/models", "/venv"]


def test_a_volume_is_replaced_whole_because_it_has_one_source():
    volumes = merged({"spec": {"volumes": [{"name": "models", "hostPath": {"path": "/m"}}]}})["spec"]["volumes"]
    assert volumes == [{"name": "models", "hostPath": {"path": "/m"}}, {"name": "tmp", "emptyDir": {}}]


def test_a_new_container_stands_beside_the_engine():
    containers = merged({"spec": {"containers": [{"name": "sidecar", "image": "x"}]}})["spec"]["containers"]
    assert [item["name"] for item in containers] == ["engine", "sidecar"]


def test_mappings_are_merged_and_null_removes():
    spec = merged({"spec": {"nodeSelector": {"gpu": None, "zone": "b"}}})["spec"]
    assert spec["nodeSelector"] == {"zone": "b"}


def test_lists_without_a_key_are_replaced():
    spec = merged({"spec": {"tolerations": [{"key": "gpu"}]}})["spec"]
    assert spec["tolerations"] == [{"key": "gpu"}]


def test_a_directive_removes_an_item():
    volumes = merged({"spec": {"volumes": [{"name": "tmp", "$patch": "delete"}]}})["spec"]["volumes"]
    assert [item["name"] for item in volumes] == ["models"]


def test_resources_are_merged_field_by_field():
    resources = merged(engine_patch(resources={"requests": {"cpu": "2"}}))["spec"]["containers"][0]["resources"]
    assert resources == {"limits": {"memory": "8Gi"}, "requests": {"cpu": "2"}}


@pytest.mark.parametrize(
    ("patch", "words"),
    [
        ({"sepc": {}}, r"spec\.engine\.podTemplate\.sepc: unknown field"),
        ({"spec": []}, r"podTemplate\.spec: must be a mapping"),
        ({"spec": {"volumes": {"name": "x"}}}, r"podTemplate\.spec\.volumes: must be a list"),
        ({"spec": {"volumes": [{"emptyDir": {}}]}}, r"podTemplate\.spec\.volumes\[0\]: needs name"),
        ({"spec": {"nodeSelector": "a"}}, r"podTemplate\.spec\.nodeSelector: must be a mapping"),
        ({"metadata": {"labels": {"app": "mine"}}}, "app belongs to Coda"),
        (engine_patch(command=["sh"]), r"containers\[0\]\.command: belongs to Coda; use spec\.engine\.extraArgs"),
        (engine_patch(image="x"), r"image: belongs to Coda; use spec\.engine\.image"),
        (engine_patch(env=[{"name": "CODA_SPEC_KEY", "value": ""}]), "CODA_SPEC_KEY belongs to Coda"),
        (engine_patch(**{"$patch": "delete"}), "cannot be deleted"),
        ({"metadata": 5}, r"podTemplate\.metadata: must be a mapping"),
        ({"metadata": {"labels": 5}}, r"metadata\.labels: must be a mapping"),
        ({"metadata": {"labels": None}}, r"metadata\.labels: must be a mapping \(given: None\)"),
        ({"spec": None}, r"podTemplate\.spec: must be a mapping"),
        ({"spec": {"containers": 5}}, r"spec\.containers: must be a list"),
        ({"spec": {"containers": None}}, r"spec\.containers: must be a list"),
        ({"spec": {"containers": [{"name": {}}]}}, r"containers\[0\]: needs name"),
        ({"spec": {"volumes": [{"name": ["x"]}]}}, r"volumes\[0\]: needs name"),
        (engine_patch(env=5), r"containers\[0\]\.env: must be a list"),
        (engine_patch(env=None), r"containers\[0\]\.env: must be a list \(given: None\)"),
    ],
)
def test_a_wrong_patch_is_refused_naming_the_field_and_the_remedy(patch: dict[str, Any], words: str):
    with pytest.raises(PodTemplateError, match=words):
        merged(patch)


def test_labels_of_ones_own_are_fine():
    assert merged({"metadata": {"labels": {"team": "a"}}})["metadata"]["labels"] == {"app": "coda", "team": "a"}
