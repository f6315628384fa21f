import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from coda_operator.crd.__main__ import manifests
from coda_operator.crd.definitions import coda_cluster_definition, coda_profile_definition
from coda_operator.spec import CodaClusterSpec
from coda_operator.status import CodaClusterStatus, ConditionType

ROOT = Path(__file__).resolve().parents[2]


def schema_of(definition: dict[str, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, field in schema.get("properties", {}).items():
        yield f"{path}.{name}", field
        yield from fields(field, f"{path}.{name}")
        yield from fields(field.get("items", {}), f"{path}.{name}[]")


def test_the_files_in_the_repository_and_the_chart_are_the_generated_ones():
    for name, content in manifests():
        for folder in ("crds", "charts/coda/crds"):
            assert (ROOT / folder / name).read_text() == content, f"{folder}/{name}: run `make crds`"


def test_every_field_that_a_person_writes_is_explained():
    spec = schema_of(coda_cluster_definition())["properties"]["spec"]
    silent = [path for path, field in fields(spec) if "description" not in field and field.get("type") != "object"]
    assert silent == []


def test_every_default_of_the_models_is_a_default_of_the_api_server():
    spec = schema_of(coda_cluster_definition())["properties"]["spec"]
    minimal = {"model": {"name": "m", "source": {"hub": "a/b"}}}
    parsed = CodaClusterSpec.parse(minimal).model_dump(mode="json", by_alias=True, exclude_none=True)
    assert spec["properties"]["engine"]["default"]["replicas"] == parsed["engine"]["replicas"]
    assert spec["properties"]["admission"]["default"] == parsed["admission"]
    assert spec["properties"]["router"]["default"]["placement"] == parsed["router"]["placement"]


def test_rules_name_the_fields_that_exclude_each_other():
    text = json.dumps(schema_of(coda_cluster_definition()))
    for words in ("exactly one of hub, builtin, hostPath", "replicas: at least 1", "minCohort is more than half"):
        assert words in text


def test_the_category_is_not_the_short_name():
    """kubectl would take it for the category, and `kubectl delete coda NAME` would fail."""
    for definition in (coda_cluster_definition(), coda_profile_definition()):
        names = definition["spec"]["names"]
        assert not set(names["categories"]) & {*names["shortNames"], names["plural"], names["singular"]}


def test_columns_show_conditions_that_exist():
    columns = coda_cluster_definition()["spec"]["versions"][0]["additionalPrinterColumns"]
    shown = {part for column in columns for part in ConditionType if f'"{part}"' in column["jsonPath"]}
    assert shown == {ConditionType.PROFILED, ConditionType.ADMISSION_ENABLED, ConditionType.READY}


def test_the_scale_subresource_points_at_fields_of_spec_and_status():
    definition = coda_cluster_definition()
    paths = {path for path, _ in fields(schema_of(definition))}
    scale = definition["spec"]["versions"][0]["subresources"]["scale"]
    assert set(scale.values()) <= paths


def test_what_the_status_model_writes_is_in_the_schema():
    """The API server drops unknown status fields in silence."""
    status = schema_of(coda_cluster_definition())["properties"]["status"]
    written = CodaClusterStatus().model_dump(mode="json", by_alias=True)
    assert set(written) == set(status["properties"])


def test_definitions_survive_yaml():
    for _, content in manifests():
        assert yaml.safe_load(content)["kind"] == "CustomResourceDefinition"
